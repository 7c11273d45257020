"""Many clients: states that page to disk, cohorts, what is written, and errors found late."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_clients, plain_net

import perfed
from perfed.contract import checks, rules
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import choose, derive, shuffle
from perfed.core.tree import rows, stack, tree_map
from perfed.engines.base import Job
from perfed.engines.client_states import States
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.pgfed import PGFed
from perfed.methods.scaffold import SCAFFOLD
from perfed.training import files, train
from perfed.training.catalog import find
from perfed.training.folder import MethodFolder
from perfed.training.observers.checkpoint import Checkpoints, restore
from perfed.training.observers.log import MetricsLog

WHOLE = {
    "a": torch.zeros(5),
    "seen": torch.tensor(False),
    "pair": (torch.ones(2, 3, dtype=torch.float64), torch.tensor(3), torch.zeros(0)),
}
WIDTH = 5 * 4 + 1 + 6 * 8 + 8


def drawn(count):
    whole = (torch.randn(count, 2, 3, dtype=torch.float64), torch.randint(9, (count,)), torch.zeros(count, 0))
    return {"a": torch.randn(count, 5), "seen": torch.rand(count) > 0.5, "pair": whole}


BUDGETS = [(None,), (8 * WIDTH,), (0,), (3 * WIDTH, 7 * WIDTH), (0, 0), (5 * WIDTH, None), (1000 * WIDTH,)]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_states_are_what_was_put_wherever_they_lie(budget, tmp_path):
    torch.manual_seed(0)
    draw, states, expected = random.Random(0), States(WHOLE, budget=budget, folder=tmp_path), {}
    for _ in range(60):
        ids = sorted(draw.sample(range(40), draw.randint(1, 12)))
        found = states.take(ids)
        assert checks.difference(found, stack([expected.get(id, WHOLE) for id in ids])) == 0
        new = drawn(len(ids))
        states.put(ids, new)
        expected |= {id: tree_map(torch.clone, rows(new, row)) for row, id in enumerate(ids)}
    assert checks.difference(dict(states), dict(sorted(expected.items()))) == 0
    assert len(states) == 40
    for shelf, limit in zip(states.shelves, budget, strict=False):
        assert limit is None or len(shelf.slot) <= limit // WIDTH
    assert sum(map(len, (shelf.slot for shelf in states.shelves))) == 40
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left after a crash
    del states[7]
    assert 7 not in states
    states.clear()
    assert not states


def test_what_was_written_longest_ago_goes_to_disk_first():
    states = States(torch.zeros(2), budget=(3 * 8,))
    for id in (5, 1, 4, 5, 2):
        states[id] = torch.full((2,), float(id))
    memory, disk = (sorted(shelf.slot) for shelf in states.shelves)
    assert (memory, disk) == ([2, 4, 5], [1])
    assert states[1].tolist() == [1.0, 1.0]
    assert len(states.shelves[0].table) == 3


def test_a_method_without_states_has_no_table():
    states = States((), budget=(100,))
    states.put([1, 2], ())
    assert states.take([1, 2]) == ()
    assert len(states) == 0


def test_states_taken_do_not_move(tmp_path):
    states = States(torch.zeros(2), budget=(8,), folder=tmp_path)
    states.put([0, 1], torch.ones(2, 2))
    taken, new = states.take([0, 1]), states.take([5])
    states.put([0, 1, 5], torch.full((3, 2), 7.0))
    assert taken.tolist() == [[1.0, 1.0]] * 2
    new += 1
    assert states.take([9]).tolist() == [[0.0, 0.0]]


def test_a_state_of_another_form_is_refused():
    states = States({"a": torch.zeros(2)})
    for wrong in ({"a": torch.zeros(1, 3)}, {"b": torch.zeros(1, 2)}, {"a": torch.zeros(1, 2).double()}):
        with pytest.raises(TypeError, match="changed its form"):
            states.put([0], wrong)


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(Problem, match="cannot keep the clients' states"):
        States(torch.zeros(2), budget=(0,), folder=tmp_path / "missing").put([0], torch.zeros(1, 2))


def federation(budget, folder):
    method = PGFed(Model(plain_net, dtype=torch.float64), lr=0.05, batch_size=5, epochs=1)
    clients = make_clients((9, 5, 12, 7, 4, 6))
    width = States(method.at(population=6).init_client()).width
    return Federation(Sequential(Job(method, clients, cohort=3, folder=folder), memory=(budget * width,)))


def test_training_and_resuming_are_the_same_when_states_page(tmp_path):
    """Bit for bit, with one row in memory and with all; the checkpoint is the same file, too."""
    for name in ("roomy", "narrow"):
        (tmp_path / name).mkdir()
    whole, paged = federation(100, tmp_path), federation(1, tmp_path)
    for fed, name in ((whole, "roomy"), (paged, "narrow")):
        for _ in range(4):
            fed.step()
        folder = MethodFolder(tmp_path / name)
        Checkpoints(folder, 1, MetricsLog(folder)).write(fed)
    kept = [sorted((tmp_path / name / "checkpoints").iterdir()) for name in ("roomy", "narrow")]
    assert [path.name for path in kept[0]] == ["round_00000004.rows", "round_00000004.safetensors"]
    assert [path.read_bytes() for path in kept[0]] == [path.read_bytes() for path in kept[1]]
    resumed = federation(2, tmp_path)
    assert restore(MethodFolder(tmp_path / "roomy"), resumed, print) is not None
    for fed in (whole, paged, resumed):
        for _ in range(3):
            fed.step()
    for fed in (paged, resumed):
        assert (
            checks.difference((fed.server, dict(fed.engine.states[0])), (whole.server, dict(whole.engine.states[0])))
            == 0
        )
        assert checks.difference(fed.evaluate().tables, whole.evaluate().tables) == 0


def test_a_checkpoint_of_an_older_form_is_refused(tmp_path):
    fed = federation(1, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    old = {"round": 1, "server": fed.server, "states": {"0": torch.zeros(1)}, "traffic": {}, "logs": {}}
    files.save_tree(tmp_path / "checkpoints" / "round_00000001.safetensors", old)
    with pytest.raises(Problem, match="older perfed"):
        restore(MethodFolder(tmp_path), fed, print)


def test_a_cohort_is_the_beginning_of_a_shuffle():
    for seed in range(20):
        order = shuffle(derive(seed)[None], torch.tensor([50]), 50)[0].tolist()
        assert choose(derive(seed), 7, 50) == sorted(order[:7])
        assert choose(derive(seed), 50, 50) == list(range(50))


LIAR = """
from dataclasses import dataclass
from perfed import Method, Up

@dataclass(frozen=True)
class Liar(Method):
    evaluates = "global"

    def init_server(self, clients):
        return self.model.init(self.context.seed)

    def local(self, client, down, data):
        return client, Up(mean=self.descend(down.shared, data) - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        return down.shared * data.size
"""


def test_a_method_that_only_says_it_has_one_model_fails_its_check(tmp_path):
    (tmp_path / "liar.py").write_text(LIAR)
    with pytest.raises(AssertionError, match="different models"):
        rules.check_evaluates(find(str(tmp_path / "liar.py")))


TINY = {"clients": 4, "rounds": 2, "epochs": 1, "hidden": 8, "engine": "sequential", "baseline": False}


def test_many_clients_have_no_files_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "MANY", 3)
    run = perfed.run("fedavg", "ditto", out=tmp_path / "few", quiet=False, **TINY)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("--save-models all writes every one") == 2
    assert "fedavg: over 3 clients, so the model that all clients share is written" in said
    assert "ditto: over 3 clients, so no model is written" in said
    assert not (tmp_path / "few" / "fedavg" / "clients").exists()
    one = [run.client(f"client_0{id}", "fedavg") for id in range(4)]
    assert {client.path for client in one} == {tmp_path / "few" / "fedavg" / "model.safetensors"}
    with pytest.raises(Problem, match="--save-models"):
        run.client("client_00", "ditto").model()
    every = perfed.run("fedavg", "ditto", out=tmp_path / "all", save_models="all", **TINY)
    for client in one:
        own = every.client(client.name, "fedavg")
        assert own.path.parent.name == client.name
        torch.testing.assert_close(own.model().state_dict(), client.model().state_dict(), rtol=0, atol=0)
    assert every.client("client_00", "ditto").model() is not None
    assert [c.accuracy for c in every.clients("ditto")] == [c.accuracy for c in run.clients("ditto")]


def test_a_run_with_little_memory_for_states_is_the_same(tmp_path):
    """One row of 0.6 MB fits into 1 MB."""
    settings = TINY | {"hidden": 2000, "participation": 0.5, "checkpoint_every": 1}
    one, two = (perfed.run("ditto", out=tmp_path / str(mb), state_memory=mb, **settings) for mb in (0, 1))
    for name in ("metrics.jsonl", "result.json", "clients/client_02/model.safetensors"):
        assert (one.path / "ditto" / name).read_bytes() == (two.path / "ditto" / name).read_bytes()


def measured(*call):
    """What bench/scale.py measures in a process of its own."""
    root = Path(__file__).parents[2]
    words = [sys.executable, str(root / "bench" / "scale.py"), "--in-process", json.dumps(call)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])["peak_rss_mb"]


@pytest.mark.slow
def test_5000_clients_take_hardly_more_memory_than_100():
    """Both with 64 MB for states, of which 100 clients have 25 MB and 5,000 have 1.2 GB."""
    assert measured("memory", 5000, 64) - measured("memory", 100, 64) < 50


@pytest.mark.slow
def test_pgfed_trains_100_000_clients_in_2_gb():
    """Its alpha as a matrix would be 40 GB."""
    assert measured("whole", 100_000, "pgfed") < 2000


def test_a_table_that_grows_to_its_limit_is_not_copied_when_it_is_full():
    states = States(torch.zeros(2), budget=(8 * 1028, None))  # room for 1,028 rows, 64 of them for rows in use
    for id in range(600):
        states[id] = torch.full((2,), float(id))
    assert len(states.shelves[0].table) == 1028 - 64
    assert states.take([0, 599]).tolist() == [[0.0, 0.0], [599.0, 599.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_around_a_round_waits_for_a_gpu():
    """States on the device, the look at uploads, and the mean over a cohort; then paging gives the same rows.

    Of a method whose server reads means alone; one that reads rows waits once in an exchange.
    """
    method = SCAFFOLD(Model(plain_net, device="cuda"))
    fed = Federation(Sequential(Job(method, make_clients((9, 5, 12)).to("cuda"))))
    for _ in range(2):  # the first use of a kernel may wait
        fed.step()
    fed.begin()
    request = next(fed.requests())
    (reply,) = fed.engine.exchange([request])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fed.receive(request, reply)
        fed.end()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fed.look() == []
    states, expected = States(torch.zeros(4, device="cuda"), "cuda", (2 * 16, 3 * 16)), torch.randn(9, 4, device="cuda")
    states.put(range(9), expected)
    assert [len(shelf.slot) for shelf in states.shelves] == [2, 3, 4]
    assert torch.equal(states.take(range(9)), expected)
