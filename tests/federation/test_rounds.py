"""What a method decides about rounds: phases, who takes part, first exchanges, and where in a run it is."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Down, Up
from perfed.core.model import Model
from perfed.core.rounds import Phase, Selection
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation, evaluate, step
from perfed.methods.fedavg import FedAvg

SIZES = (8, 3, 7, 5, 6)
ENGINES = {
    "sequential": Sequential,
    "workers": lambda *jobs: Workers(*jobs, workers=2),
    "vectorised": Vectorised,
    "in blocks": lambda *jobs: Vectorised(*jobs, block=2),
}


def job(kind, seed=5, cohort=2, sizes=SIZES, **settings):
    method = kind(Model(toy.plain_net, dtype=torch.float64), **{"lr": 0.05, "epochs": 2, "batch_size": 4} | settings)
    return Job(method, toy.toy_clients(sizes), seed, cohort)


@dataclass(frozen=True)
class Whole(FedAvg):
    """All that rounds can be: a survey of everybody, two exchanges of different clients, a number of steps."""

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "loss": self.model.zeros().new_zeros(clients), "joined": 0}

    def init_client(self):
        return self.model.zeros()[:1]

    def phase(self, server):
        kinds = [
            Phase("survey", everybody=True),
            Phase("pair", exchanges=2, first="join"),
            Phase(steps=3, first="join"),
        ]
        return kinds[(self.context.round - 1) % 3]

    def cohort_of(self, server, info):
        largest = info.loss.argsort(descending=True).tolist()
        if self.context.phase == "pair":
            return [largest[:3], [largest[0], *largest[3:4]]]
        return Selection(largest[:3], [1, 2, 1])

    def broadcast(self, server, ids):
        return Down(shared=server["w"], own={"loss": server["loss"][ids]})

    def show(self, server, ids):
        return Down(shared=server["w"])

    def local_join(self, client, down, data):
        return client + 1, Up(mean=0 * down.shared)

    def local_survey(self, client, down, data):
        risk = data.mean(self.risk, down.shared)
        return client, Up(mean=0 * down.shared, own=risk, loss=risk)

    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        scale = 1 / (self.context.round + self.context.exchange)
        return client, Up(mean=scale * (w - down.shared), own=data.mean(self.risk, w), loss=data.mean(self.risk, w))

    def risk(self, batch, w):
        return self.model.loss(w, batch)[0]

    def aggregate(self, server, cohort):
        if self.context.phase == "join":
            return server | {"joined": server["joined"] + len(cohort.ids)}
        return server | {"w": server["w"] + cohort.mean, "loss": server["loss"].index_copy(0, cohort.ids, cohort.own)}


def played(engine, rounds=7, faults=None):
    fed = Federation(engine, faults=faults or Faults())
    cohorts = [fed.step() for _ in range(rounds)]
    return fed, cohorts, checks.play(engine, (), fed)


@pytest.mark.parametrize("faults", [Faults(), Faults(dropout=0.3, stragglers=0.5)])
@pytest.mark.parametrize("engine", list(ENGINES)[1:])
def test_engines_agree_whatever_rounds_are(engine, faults):
    fed, cohorts, expected = played(Sequential(job(Whole)), faults=faults)
    other, others, found = played(ENGINES[engine](job(Whole)), faults=faults)
    assert others == cohorts
    checks.compare(found, expected, engine, tolerance=1e-12)
    assert checks.difference(other.known.save(), fed.known.save()) < 1e-12
    assert checks.difference(fed.server["w"], fed.method.init_server(5)["w"]) > 1e-3


def test_recorded_steps_agree_whatever_rounds_are():
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    expected, found = (played(engine, 4)[2] for engine in (Sequential(job(Whole)), Vectorised(job(Whole), fast=True)))
    checks.compare(found, expected, "recorded", tolerance=1e-9)


def test_who_is_asked_when():
    fed = Federation(Sequential(job(Whole)))
    assert fed.step() == [0, 1, 2, 3, 4]  # everybody, whatever the cohort
    largest = fed.known.loss.argsort(descending=True).tolist()
    fed.begin()
    requests = []
    for request in fed.requests():
        (reply,) = fed.engine.exchange([request])
        fed.receive(request, reply)
        requests.append((request.exchange, request.phase, list(request.ids), request.steps))
    fed.end()
    first, second = sorted(largest[:3]), sorted([largest[0], largest[3]])
    joining = (-1, "join", sorted({*first, *second}), None)
    assert requests == [joining, (0, "pair", first, None), (1, "pair", second, None)]
    ids = fed.step()
    assert len(ids) == 3
    assert fed.known.asked.tolist() == [3 if id in ids else 2 if id in {*first, *second} else 1 for id in range(5)]
    assert fed.known.answered.tolist() == fed.known.asked.tolist()
    assert fed.known.failed.tolist() == [0] * 5


@dataclass(frozen=True)
class Joining(FedAvg):
    """FedAvg whose clients greet at their first round: who greeted remembers it."""

    def init_client(self):
        return self.model.zeros()[:1]

    def phase(self, server):
        return Phase(first="greet")

    def local_greet(self, client, down, data):
        return client + 1, Up(mean=0 * down.shared)

    def local(self, client, down, data):
        client_state, up = super().local(client, down, data)
        return 10 * client_state, up


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_has_one_first_exchange(engine):
    engine = ENGINES[engine](job(Joining))
    fed = Federation(engine)
    for cohort in [(0, 1), (1, 2), (2, 0)]:
        fed.step(cohort)
    assert [float(fed.engine.states[0][id]) for id in range(3)] == [100, 100, 100]
    size = fed.method.model.size * 8
    assert fed.traffic.up == (6 + 3) * size  # an exchange more for each of three
    engine.close()


def test_runs_in_one_batch_may_be_in_other_phases():
    jobs = [job(Whole, seed) for seed in (0, 3)]
    batched, alone = Vectorised(*jobs), [Federation(Vectorised(each)) for each in jobs]
    both = [Federation(batched, run) for run in range(2)]
    both[1].step()  # one round ahead
    for _ in range(4):
        step(both)
    for each, rounds in zip(alone, (4, 5), strict=True):
        for _ in range(rounds):
            each.step()
    for one, other, scores in zip(both, alone, evaluate(both, [None, None]), strict=True):
        assert checks.difference(one.server, other.server) < 1e-12
        assert checks.difference(checks.states_of(one), checks.states_of(other)) < 1e-12
        assert checks.difference(scores.tables, other.evaluate().tables) < 1e-12


@pytest.mark.parametrize("done", range(1, 6))
def test_a_run_goes_on_in_any_phase(done):
    """With what the server keeps, what clients keep, and what is known of the clients."""
    whole, _, expected = played(Sequential(job(Whole)), 6, Faults(dropout=0.3))
    half = Federation(Sequential(job(Whole)), faults=Faults(dropout=0.3))
    for _ in range(done):
        half.step()
    rest = Federation(Sequential(job(Whole)), server=half.server, round=done, faults=half.faults, traffic=half.traffic)
    rest.engine.states[0].update(half.engine.states[0])
    rest.known.restore(copy.deepcopy(half.known.save()))
    for _ in range(6 - done):
        rest.step()
    checks.compare(checks.play(rest.engine, (), rest), expected, "resumed", tolerance=0)
    assert checks.difference(rest.known.save(), whole.known.save()) == 0


def test_verdicts_that_stay_on_the_device_are_known_when_asked_for():
    @dataclass(frozen=True)
    class Reporting(FedAvg):
        def local(self, client, down, data):
            client, up = super().local(client, down, data)
            spoilt = torch.where(data.size == 3, torch.nan, 0.0)
            return client, Up(mean=up.mean + spoilt, loss=data.size.double())

    feds = [Federation(Sequential(job(Reporting)), lazy=lazy) for lazy in (False, True)]
    for fed in feds:
        fed.step((0, 1, 2))
        fed.step((0, 3))
    for fed in feds:
        assert fed.known.answered.tolist() == [2, 0, 1, 2, 0]
        assert fed.known.failed.tolist() == [0, 1, 0, 0, 0]
        assert fed.known.loss.nan_to_num(-1).tolist() == [8, -1, 7, 5, -1]


@dataclass(frozen=True)
class Patient(FedAvg):
    """FedAvg whose server counts rounds, and who was asked in vain."""

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "vain": torch.zeros(clients, dtype=torch.int64), "rounds": 0}

    def before_round(self, server, info):
        last = self.context.round - 1
        vain = (info.asked == last) & (info.answered < last) & (last > 0)
        return server | {"vain": server["vain"] + vain, "rounds": server["rounds"] + 1}

    def cohort_of(self, server, info):
        return server["vain"].argsort(stable=True)[:3].tolist()  # whoever has failed most waits

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def aggregate(self, server, cohort):
        return server | {"w": server["w"] + cohort.mean}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_server_learns_at_the_beginning_of_a_round_who_failed_in_the_last_one(engine):
    fed = Federation(ENGINES[engine](job(Patient)), faults=Faults(dropout=0.5))
    lost = torch.zeros(5, dtype=torch.int64)
    for _ in range(8):
        assert {*fed.step(), *fed.answers.lost} == {*lost.argsort(stable=True)[:3].tolist()}
        assert torch.equal(fed.server["vain"], lost)
        lost[fed.answers.lost] += 1
    assert lost.sum() > 8


def test_a_server_learns_of_rounds_that_nobody_answered():
    fed = Federation(Sequential(job(Patient, cohort=3)), faults=Faults(dropout=0.999))
    before = fed.server["w"].clone()
    for _ in range(4):
        assert fed.step() == []
    assert fed.server["vain"].sum() == 3 * 3  # of three rounds, and the fourth is not yet known
    assert torch.equal(fed.server["w"], before)


def test_what_a_server_learns_stays_where_the_round_is_abandoned():
    @dataclass(frozen=True)
    class Hopeless(Patient):
        def phase(self, server):
            return Phase(exchanges=2)

        def local(self, client, down, data):
            return client, Up(mean=(down.shared if self.context.exchange == 0 else down.shared * torch.nan))

    fed = Federation(Sequential(job(Hopeless)), patience=9)
    before = fed.server["w"].clone()
    for _ in range(3):
        fed.step()
    assert fed.strikes == 3
    assert torch.equal(fed.server["w"], before)
    assert fed.server["rounds"] == 3


# ---------------------------------------------------------------------- what is wrong gets a sentence


def choosing(choice):
    @dataclass(frozen=True)
    class Choosing(FedAvg):
        def cohort_of(self, server, info):
            return choice

    return Choosing


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ([0, 5], "Choosing.cohort_of returns client 5; there are clients 0 to 4"),
        ([0.5], "must return clients as a list of whole numbers"),
        (torch.tensor([True, False]), "must return clients as a list of whole numbers"),
        ([[0], [1]], "returns clients for 2 exchanges, but the round has 1"),
        (Selection([0, 1], [1]), "selects 2 clients with 1 epochs"),
    ],
)
def test_a_choice_that_is_none(choice, sentence):
    with pytest.raises(Problem, match=sentence):
        Federation(Sequential(job(choosing(choice)))).step()


@pytest.mark.parametrize("choice", [[3, 1, 3], torch.tensor([1, 3]), (1, 3), Selection([3, 1], [2, 1])])
def test_a_choice_in_any_form(choice):
    assert Federation(Sequential(job(choosing(choice)))).step() == [1, 3]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_step_does_not_know_the_round(engine):
    @dataclass(frozen=True)
    class Curious(FedAvg):
        def gradient(self, theta, batch, given=()):
            g, theta = super().gradient(theta, batch)
            return g / self.context.round, theta

    with pytest.raises(RuntimeError, match=r"a step reads context.round, .* through `given`"):
        Federation(ENGINES[engine](job(Curious))).step()


@pytest.mark.parametrize(
    ("name", "instead"), [("select", "`cohort_of\\(self, server, info\\)`"), ("exchanges", "`phase\\(self, server\\)`")]
)
def test_what_methods_defined_before_is_not_passed_over(name, instead):
    old = dataclass(frozen=True)(type("Old", (FedAvg,), {name: lambda *_: None, "__annotations__": {}}))
    with pytest.raises(Problem, match=f"Old defines '{name}', .* define {instead}"):
        job(old)


def test_the_context_says_where_a_run_is():
    method = job(FedAvg).method
    there = method.at(round=3, seed=7)
    assert (there.context.round, there.context.seed, method.context.round) == (3, 7, 0)
    assert replace(there, lr=0.5).context == method.context
    with pytest.raises(Problem, match=r"FedAvg reads self.seed: what the run decides is in self.context.seed"):
        _ = method.seed


@dataclass(frozen=True)
class Faulty(Joining):
    """Joining, but for the client of 3 samples, which spoils its first greeting: it does so where `client` is 0."""

    def local_greet(self, client, down, data):
        spoilt = torch.where(data.size == 3, torch.nan, 0.0)
        return client + 1, Up(mean=0 * down.shared + spoilt)


def test_who_fails_in_its_first_exchange_has_another_one():
    fed = Federation(Sequential(job(Faulty)))
    for cohort in [(0, 1, 2), (0, 1, 2)]:
        fed.begin(cohort)
        asked = []
        for request in fed.requests():
            (reply,) = fed.engine.exchange([request])
            fed.receive(request, reply)
            asked.append((request.phase, list(request.ids)))
        fed.end()
        assert asked[-1] == ("", [0, 2])  # client 1 has not joined, so it does not train
    assert asked[0] == ("greet", [1])
    assert 1 not in fed.engine.states[0]


def test_a_first_exchange_of_an_abandoned_round_is_done_again():
    @dataclass(frozen=True)
    class Hopeless(Joining):
        def local(self, client, down, data):
            return client, Up(mean=down.shared * torch.nan)

    fed = Federation(Sequential(job(Hopeless)), patience=5)
    for _ in range(2):
        fed.begin((0, 1))
        phases = []
        for request in fed.requests():
            (reply,) = fed.engine.exchange([request])
            fed.receive(request, reply)
            phases.append(request.phase)
        fed.end()
        assert phases == ["greet", ""]
    assert fed.strikes == 2


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_read_at_once_does_not_override_what_was_left_unread(lazy):
    """Of two exchanges the first is abandoned, which sends means alone; the second sends rows, too."""

    @dataclass(frozen=True)
    class Mixed(FedAvg):
        def phase(self, server):
            return Phase(exchanges=2)

        def local(self, client, down, data):
            client, up = super().local(client, down, data)
            bad = self.context.exchange == 0
            return client, Up(mean=up.mean * torch.nan) if bad else Up(mean=up.mean, own=data.size)

    fed = Federation(Sequential(job(Mixed)), lazy=lazy, patience=5)
    before = fed.server.clone()
    fed.step((0, 1, 2))
    fed.look()
    assert torch.equal(fed.server, before)
    assert fed.strikes == 1
