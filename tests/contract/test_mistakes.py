"""The contract itself: methods with a single planted mistake each, which one check finds and one sentence names."""

import re
from dataclasses import dataclass
from functools import partial
from textwrap import dedent, indent

import pytest

from perfed.contract import checks, runner
from perfed.contract.toy import plain_net
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.methods.fedavg import FedAvg
from perfed.training import catalog

FILE = '''"""Planted: a method with a mistake."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from perfed import Down, Method, Up, hyper
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg

CALLS = {{}}


@dataclass(frozen=True)
class Planted({base}):
{body}
'''

# name: (base, body of the class, the check that fails, what its sentence says)
RUNS, KEEPS, PURE, SAME, FORM = runner.RUNS, runner.KEEPS, runner.PURE, runner.SAME, runner.FORM
EVALUATES, FILLING, LEARNS = runner.EVALUATES, runner.FILLING, runner.LEARNS
TEST, PLACE = "test samples change nothing", "a tensor is in one compartment"
STATISTICS = "BatchNorm statistics move, and stay what they can be"
FROZEN = "what is frozen stays so"
VECTORISED, SETTINGS = "vectorised equals sequential, plain network", "every hyper-parameter matters"

MISTAKES = {
    "closure": (
        "FedAvg",
        """
        def local(self, client, down, data):
            def step(theta, batch, given):
                return theta - self.lr * self.gradient(theta, batch)[0]
            w = data.fold(step, down.shared)
            return client, Up(mean=w - down.shared)
        """,
        RUNS,
        r"planted.py, line 23: TypeError: a step must be a method of the class.*`given`",
    ),
    "a theta put together on zeros": (
        "FedAvg",
        """
        def personalise(self, client, down, data):
            return self.model.moving.only(down.shared)
        """,
        FROZEN,
        r"'personal' has other values where the network is frozen",
    ),
    "a tensor fixed in a step": (
        "FedAvg",
        """
        def step(self, centre, theta, batch, given):
            return theta - self.lr * (self.gradient(theta, batch)[0] + 0.1 * (theta - centre))

        def local(self, client, down, data):
            w = data.fold(partial(self.step, down.shared), down.shared)
            return client, Up(mean=w - down.shared)
        """,
        RUNS,
        "step 'step' holds a tensor from outside: hand it over through `given`",
    ),
    "local returns the upload alone": (
        "FedAvg",
        """
        def local(self, client, down, data):
            return Up(mean=self.descend(down.shared, data) - down.shared)
        """,
        RUNS,
        r"Planted.local must return \(state, Up\), not Up",
    ),
    "a shape that depends on the client": (
        "FedAvg",
        """
        def local(self, client, down, data):
            return client, Up(mean=self.descend(down.shared, data) - down.shared, own=torch.ones(int(data.size)))
        """,
        RUNS,
        r"client \d of the toy federation, own: its shape is \(\d+,\), not \(2,\)",
    ),
    "numbers that are not finite": (
        "FedAvg",
        """
        def local(self, client, down, data):
            change = self.descend(down.shared, data) - down.shared
            return client, Up(mean=torch.where(data.size < 5, torch.nan, change))
        """,
        RUNS,
        "client 3 of the toy federation, mean: it holds numbers that are not finite",
    ),
    "one row for all in own": (
        "FedAvg",
        """
        def broadcast(self, server, ids):
            return Down(own=server)

        def local(self, client, down, data):
            return client, Up(mean=self.descend(down.own, data) - down.own)

        def personalise(self, client, down, data):
            return down.own
        """,
        RUNS,
        r"Planted sends Down.own with \d+ rows to 3 clients: .*for everybody belongs into `shared`",
    ),
    "everybody's rows in own": (
        "Ditto",
        """
        def init_server(self, clients):
            return self.model.init(self.context.seed).repeat(clients, 1)

        def broadcast(self, server, ids):
            return Down(own=server)

        def local(self, client, down, data):
            w = self.descend(down.own, data)
            return w, Up(own=w)

        def aggregate(self, server, cohort):
            return server.index_copy(0, cohort.ids, cohort.own)
        """,
        RUNS,
        "Planted sends Down.own with 5 rows to 3 clients: `own` holds one row for each of the clients `ids`",
    ),
    "a model of another size": (
        "FedAvg",
        """
        def personalise(self, client, down, data):
            return {"personal": down.shared, "head": self.model.head.take(down.shared)}
        """,
        RUNS,
        r"Planted.personalise must return theta, a tensor of shape \(84,\), or a dict of thetas .* not shape \(27,\)",
    ),
    "a client's state that changes its form": (
        "FedAvg",
        """
        def init_client(self):
            return torch.zeros(2)

        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            return torch.zeros(3), Up(mean=w - down.shared)
        """,
        RUNS,
        r"a client's state changed its form",
    ),
    "a server's state that changes its form": (
        "FedAvg",
        """
        def init_server(self, clients):
            return {"w": self.model.init(self.context.seed)}

        def broadcast(self, server, ids):
            return Down(shared=server["w"])

        def aggregate(self, server, cohort):
            return {"w": server["w"] + cohort.mean, "last": cohort.mean}
        """,
        FORM,
        "the server's state changes its form: .* after round 1",
    ),
    "a tensor on self": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            object.__setattr__(self, "last", w)
            return client, Up(mean=w - down.shared)
        """,
        KEEPS,
        r"it keeps a tensor in self.last: what a client remembers belongs into the state that `local` returns",
    ),
    "a tensor on the class": (
        "FedAvg",
        """
        cache = {}

        def local(self, client, down, data):
            w = self.descend(self.cache.get("w", down.shared), data)
            self.cache["w"] = w
            return client, Up(mean=w - down.shared)
        """,
        KEEPS,
        "it keeps a tensor in Planted.cache",
    ),
    "a counter in the file": (
        "FedAvg",
        """
        def local(self, client, down, data):
            CALLS["number"] = CALLS.get("number", 0) + 1
            return client, Up(mean=(self.descend(down.shared, data) - down.shared) / CALLS["number"])
        """,
        KEEPS,
        "it keeps something in planted.py.CALLS",
    ),
    "local writes into the message": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            change = w - down.shared
            down.shared.mul_(0.5)
            return client, Up(mean=change)
        """,
        PURE,
        "local writes into the state or the message that it is given",
    ),
    "aggregate writes into the server's state": (
        "FedAvg",
        """
        def aggregate(self, server, cohort):
            return server.add_(cohort.mean)
        """,
        PURE,
        "broadcast or aggregate writes into the server's state: make a new one",
    ),
    "random numbers of torch": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            return client, Up(mean=w - down.shared + 0.01 * torch.randn(len(w)))
        """,
        SAME,
        "it draws from the global random state of torch: the batches .* bring all randomness",
    ),
    "random numbers of NumPy": (
        "FedAvg",
        """
        def aggregate(self, server, cohort):
            return server + cohort.mean * np.random.rand()
        """,
        SAME,
        "it draws from the global random state of numpy",
    ),
    "the clock": (
        "FedAvg",
        """
        def aggregate(self, server, cohort):
            return server + cohort.mean * (1 + time.perf_counter() % 1)
        """,
        SAME,
        "two equal runs differ",
    ),
    "training on the test samples": (
        "FedAvg",
        """
        def slope(self, batch, theta):
            return self.model.grad(theta, batch, train=False)[0]

        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            w = w - self.lr * data.mean(self.slope, w, split="test")
            return client, Up(mean=w - down.shared)
        """,
        TEST,
        "local looks at the test samples: other ones change the server; a method may read 'train' and 'val'",
    ),
    "tuning on the test samples": (
        "Ditto",
        """
        def slope(self, batch, theta):
            return self.model.grad(theta, batch, train=False)[0]

        def tuned(self, theta, client, down, data):
            return theta - self.lr * self.fine_tune * data.mean(self.slope, theta, split="test")
        """,
        TEST,
        "personalise looks at the test samples",
    ),
    "a forgotten batch.weight": (
        "FedAvg",
        """
        def risk(self, theta, batch, train):
            out, theta = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
            return cross_entropy(out, batch.y), theta

        def mine(self, theta, batch, given):
            g, fresh, _ = self.model.grad(theta, batch, self.risk)
            return g, fresh

        def local(self, client, down, data):
            return client, Up(mean=self.descend(down.shared, data, self.mine) - down.shared)
        """,
        FILLING,
        "the server depend on rows that only fill a batch up: .* forgets `batch.weight`",
    ),
    "a tensor in two compartments": (
        "FedAvg",
        """
        def init_server(self, clients):
            w = self.model.init(self.context.seed)
            return {"w": w, "last": w.repeat(clients, 1)}

        def broadcast(self, server, ids):
            return Down(shared=server["w"])

        def local(self, client, down, data):
            change = self.descend(down.shared, data) - down.shared
            return client, Up(mean=change, own={"change": change})

        def aggregate(self, server, cohort):
            last = server["last"].index_copy(0, cohort.ids, cohort.own["change"])
            return {"w": server["w"] + cohort.mean, "last": last}
        """,
        PLACE,
        "Up.mean and Up.own/change are the same numbers: one tensor, one compartment",
    ),
    "rows that only their mean is made of": (
        "FedAvg",
        """
        def local(self, client, down, data):
            return client, Up(own=self.descend(down.shared, data) - down.shared)

        def aggregate(self, server, cohort):
            return server + cohort.own.mean(0)
        """,
        PLACE,
        "the server makes nothing of Up.own but a mean over the clients: put it into Up.mean",
    ),
    "one model for all that does not say so": (
        "FedAvg",
        """
        evaluates = "own"
        """,
        EVALUATES,
        "all clients predict with the same model: say evaluates = 'global' in place of 'own' .the values are 'own', "
        "'assembled', 'adapted', 'global'",
    ),
    "models of their own that are said to be global": (
        "Ditto",
        """
        evaluates = "global"
        """,
        EVALUATES,
        "it says evaluates = 'global', but clients have different models; the values are 'own'",
    ),
    "momentum at the server, statistics with it": (
        "FedAvg",
        """
        beta: float = hyper(0.5, "momentum at the server", at_least=0, below=1)

        def init_server(self, clients):
            return {"w": self.model.init(self.context.seed), "velocity": self.model.zeros()}

        def broadcast(self, server, ids):
            return Down(shared=server["w"])

        def aggregate(self, server, cohort):
            velocity = self.beta * server["velocity"] + cohort.mean
            return {"w": server["w"] + velocity, "velocity": velocity}
        """,
        STATISTICS,
        r"'1.running_var' of BatchNorm falls to -.*`self.model.weights.only\(change\)`",
    ),
    "an if over a tensor": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            if data.size > 10:
                w = (w + down.shared) / 2
            return client, Up(mean=w - down.shared)
        """,
        VECTORISED,
        r"Planted \(planted.py, line 22\): an `if`.*torch.where\(condition, a, b\) chooses \(rule 1 of docs/methods",
    ),
    "a tensor's number": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            return client, Up(mean=(w - down.shared) / (1 + 0.01 * data.size.item()))
        """,
        VECTORISED,
        r"Planted \(planted.py, line 22\): a tensor's number as a plain one \(`.item\(\)`",
    ),
    "a mask as an index": (
        "FedAvg",
        """
        def local(self, client, down, data):
            w = self.descend(down.shared, data) - down.shared
            return client, Up(mean=w - w[w > 0].sum() / len(w))
        """,
        VECTORISED,
        r"Planted \(planted.py, line 22\): a shape that depends on numbers",
    ),
    "a setting without effect": (
        "FedAvg",
        """
        mu: float = hyper(0.1, "weight of nothing at all", at_least=0)

        def local(self, client, down, data):
            w = self.descend(down.shared, data)
            return client, Up(mean=w - down.shared + self.mu - self.mu)
        """,
        SETTINGS,
        "'mu' changes nothing, whatever else is set",
    ),
    "settings of every method without effect": (
        "FedAvg",
        """
        def local(self, client, down, data):
            return client, Up(mean=self.descend(down.shared, data, epochs=2) - down.shared)

        def tuned(self, theta, client, down, data):
            return theta
        """,
        SETTINGS,
        "'epochs', 'fine_tune' change nothing",
    ),
    "a method that does not learn": (
        "Ditto",
        """
        def personalise(self, client, down, data):
            return client / 1000
        """,
        LEARNS,
        "accuracy 0.3. where clients disagree",
    ),
}
# What takes long, and differs little from another one.
SLOW = (
    "settings of every method without effect",
    "a tensor's number",
    "a mask as an index",
    "a method that does not learn",
)


@pytest.fixture
def written(tmp_path):
    def write(base, body):
        path = tmp_path / "planted.py"
        path.write_text(FILE.format(base=base, body=indent(dedent(body).strip("\n"), "    ")))
        return catalog.find(str(path))

    return write


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MISTAKES], ids=str
)
def test_a_mistake_gets_a_sentence_of_its_own(written, monkeypatch, name):
    """A single check fails; those that build on it are not tried, and no other one repeats what is wrong."""
    monkeypatch.setattr(runner, "BATCHED", ())  # compiling takes seconds
    monkeypatch.setattr(runner, "ENGINES", ("vectorised",))
    base, body, title, sentence = MISTAKES[name]
    verdicts = list(runner.check_method(written(base, body)))
    failed = {check: error for check, ok, error in verdicts if ok is False}
    assert list(failed) == [title], failed
    assert re.search(sentence, failed[title]), failed[title]
    assert not re.search(r"Traceback|please|\n", failed[title])


LOADED = {
    "no decorator": ("@dataclass(frozen=True)\n", "", r"Planted needs @dataclass\(frozen=True\)"),
    "not frozen": ("(frozen=True)", "", r"planted.py': Planted needs @dataclass\(frozen=True\), not @dataclass$"),
}


@pytest.mark.parametrize("name", LOADED)
def test_what_is_no_frozen_dataclass_is_refused_when_it_is_loaded(written, name):
    before, after, sentence = LOADED[name]
    entry = written("FedAvg", "mu: float = hyper(0.1, 'a weight', at_least=0)")
    entry.file.write_text(entry.file.read_text().replace(before, after))
    with pytest.raises(Problem, match=sentence):
        entry.load()
    with pytest.raises(Problem, match=sentence):
        next(runner.check_method(entry))


@pytest.mark.parametrize("line", ['evaluates = "globl"', 'evaluates: str = "globl"', "evaluates = None"])
def test_what_a_method_evaluates_is_one_of_four_values(written, line):
    """The file is refused as it is read, without torch; a class in Python as an instance is made."""
    sentence = "line 20: evaluates must be one of own, assembled, adapted, global, not ('globl'|None)"
    with pytest.raises(Problem, match=sentence):
        written("FedAvg", line)

    @dataclass(frozen=True)
    class Odd(FedAvg):
        evaluates = "globl"  # pyright: ignore[reportAssignmentType]

    with pytest.raises(Problem, match=r"Odd.evaluates must be one of own, assembled, adapted, global, not 'globl'"):
        Odd(Model(plain_net))


def test_a_class_in_python_without_the_decorator():
    class Bare(FedAvg):
        mu = 1.0

    with pytest.raises(Problem, match=r"Bare needs @dataclass\(frozen=True\)"):
        Bare(Model(plain_net))


def test_an_error_of_a_worker_process_is_a_sentence_with_the_line_of_the_file(written):
    """Its traceback stays in the error."""
    body = """
    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        return client, Up(mean=w - down.shared + 0 // int(os.getpid() == PARENT))
    """
    entry = written("FedAvg", body)
    entry.file.write_text(entry.file.read_text().replace("CALLS = {}", "import os; PARENT = os.getpid()"))
    check = runner.Check("workers", partial(checks.check_engines, network="plain", engine="workers"))
    (verdict,) = runner.carried_out([check], entry)
    error = "ZeroDivisionError: integer division or modulo by zero"
    expected = f"planted.py, line 22: {error}"
    assert verdict == ("workers", False, expected)
