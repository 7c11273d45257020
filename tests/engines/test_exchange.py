"""What passes through an engine's door: states that are kept or not, workers that die, messages out of one engine."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Up
from perfed.core.model import Model
from perfed.engines.base import EvaluationRequest, Job, Request
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, step
from perfed.methods.ditto import Ditto
from perfed.training.catalog import methods

SIZES = (8, 7, 5, 9, 6)
FULL = {"balanced_accuracy", "macro_f1", "auc", "macro_auc"}
BAD = 7  # the number of training samples by which a method knows its bad client
ENGINES = {"sequential": Sequential, "workers": Workers, "vectorised": Vectorised}


def job(kind=Ditto, seed=0):
    method = kind(Model(toy.plain_net, dtype=torch.float64), lr=0.05, epochs=1, batch_size=5)
    return Job(method, toy.toy_clients(SIZES), seed=seed)


def request(engine, ids, round=1):
    method = engine.method
    down = method.broadcast(method.init_server(len(SIZES)), torch.tensor(ids))
    return Request(0, round, 0, ids, down)


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chosen", [[], [2], [0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("form", ["list", "mask", "all"])
def test_states_are_kept_of_those_whose_uploads_are_used(engine, form, chosen):
    """Of nobody before `settle` is called, which takes rows, or a mask, or None for all."""
    used = torch.tensor([row in chosen for row in range(3)]) if form == "mask" else chosen
    if form == "all":
        used, chosen = None, [0, 1, 2]
    engine = ENGINES[engine](job())
    ids, states = [0, 2, 3], engine.states[0]
    engine.exchange([request(engine, [3])])[0].settle(None)
    before = states.take(ids)
    (reply,) = engine.exchange([request(engine, ids, round=2)])
    assert checks.difference(states.take(ids), before) == 0
    reply.settle(used)
    engine.close()
    changed = (states.take(ids) != before).any(1)
    assert changed.tolist() == [row in chosen for row in range(3)]


@dataclass(frozen=True)
class LaterBad(Ditto):
    """Ditto whose client with 7 samples spoils what it sends, from its second round on."""

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        bad = (data.size == BAD) & (client != self.model.init(self.context.seed)).any()
        return state, Up(torch.where(bad, torch.nan, up.mean))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_refused_client_keeps_the_state_of_its_last_good_round(engine, lazy):
    fed = Federation(ENGINES[engine](job(LaterBad)), lazy=lazy)
    fed.step(range(5))
    before = fed.engine.states[0].take([1])
    for _ in range(2):
        fed.step(range(5))
        assert torch.equal(fed.engine.states[0].take([1]), before)
    fed.engine.close()
    assert [(each.round, each.client) for each in fed.look()] == [(2, 1), (3, 1)]
    expected = Federation(Sequential(job()))
    for cohort in (range(5), (0, 2, 3, 4), (0, 2, 3, 4)):
        expected.step(cohort)
    ends = [(each.server, each.engine.states[0].take(range(5))) for each in (fed, expected)]
    assert checks.difference(*ends) < 1e-12


def test_a_refused_client_keeps_its_state_in_a_batch_of_runs():
    engine = Vectorised(job(LaterBad, 0), job(LaterBad, 3))
    both = [Federation(engine, run) for run in range(2)]
    step(both, [range(5), (0, 1)])
    before = [engine.states[run].take([1]) for run in range(2)]
    step(both, [(0, 1, 2), (0, 2)])
    step(both, [(0, 2), (0, 1, 2)])
    assert all(torch.equal(engine.states[run].take([1]), before[run]) for run in range(2))
    assert [[(each.round, each.client) for each in fed.look()] for fed in both] == [[(2, 1)], [(3, 1)]]


# ---------------------------------------------------------------------- workers that die


@dataclass(frozen=True)
class DiesThrice(Ditto):
    """Ditto whose client with 7 samples kills its process three times, which a folder of files counts."""

    def local(self, client, down, data):
        deaths = len(list(Path(os.environ["DEATHS"]).iterdir()))
        if int(data.size) == BAD and deaths < 3:
            (Path(os.environ["DEATHS"]) / str(deaths)).touch()
            os._exit(1)
        return super().local(client, down, data)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_client_whose_process_dies_may_answer_in_the_next_round(workers, tmp_path, monkeypatch):
    monkeypatch.setenv("DEATHS", str(tmp_path))
    fed = Federation(Workers(job(DiesThrice), workers=workers))
    outcome = checks.play(fed.engine, [range(5), range(5), (1, 2)], fed)
    expected = checks.play(Sequential(job()), [(0, 2, 3, 4), range(5), (1, 2)])
    expected.traffic["down_shared"] += fed.method.model.size * 8  # it was sent the model before it died
    checks.compare(outcome, expected, "workers", tolerance=0)
    (refusal,) = fed.look()
    assert (refusal.round, refusal.client) == (1, 1)
    assert refusal.reason == "its worker process died 3 times (out of memory?)"


def test_a_worker_that_dies_between_two_rounds_costs_nobody_a_turn():
    """As where the system kills a process that is not busy."""
    engine = Workers(job(), workers=2)
    fed = Federation(engine)
    fed.step(range(5))
    killed = engine.workers[0].process
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    outcome = checks.play(engine, [range(5)], fed)
    checks.compare(outcome, checks.play(Sequential(job()), [range(5)] * 2), "workers", tolerance=0)
    assert fed.look() == []


@dataclass(frozen=True)
class Refuses(Ditto):
    """Ditto whose client with 7 samples finds its settings wrong."""

    def local(self, client, down, data):
        if int(data.size) == BAD:
            raise Problem("ditto does not like 7 samples")
        return super().local(client, down, data)


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_a_problem_is_the_users_and_ends_the_run(engine):
    engine = ENGINES[engine](job(Refuses))
    with pytest.raises(Problem, match="ditto does not like 7 samples"):
        Federation(engine).step(range(5))
    engine.close()


@dataclass(frozen=True)
class Unscored(Ditto):
    """Ditto whose client with 7 samples cannot predict."""

    def personalise(self, client, down, data):
        if int(data.size) == BAD:
            raise ValueError("a broken disk")
        return super().personalise(client, down, data)


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_every_client_has_to_be_scored(engine):
    engine = ENGINES[engine](job(Unscored))
    with pytest.raises((ValueError, RuntimeError), match="a broken disk"):
        Federation(engine).evaluate()
    engine.close()


@dataclass(frozen=True)
class Uneven(Ditto):
    """Ditto whose client with 7 samples has a model more than the others."""

    def personalise(self, client, down, data):
        return {"personal": client} | ({"global": down.shared} if int(data.size) == BAD else {})


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_every_client_has_the_same_models(engine):
    """Or scores would be those of others."""
    engine = ENGINES[engine](job(Uneven))
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"client_1.*another form|mismatch"):
        Federation(engine).evaluate()
    engine.close()


@dataclass(frozen=True)
class Shuffled(Ditto):
    """Ditto whose clients send two tensors, the order of whose names differs."""

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        parts = {"a": up.mean, "b": 2 * up.mean}
        return state, Up(dict(reversed(parts.items())) if int(data.size) == BAD else parts)

    def aggregate(self, server, cohort):
        return server + cohort.mean["b"] - cohort.mean["a"]


def test_the_order_of_names_is_no_form():
    fed, expected = Federation(Sequential(job(Shuffled))), Federation(Sequential(job()))
    for each in (fed, expected):
        each.step(range(5))
    assert fed.look() == []
    assert checks.difference(fed.server, expected.server) < 1e-12


# ---------------------------------------------------------------------- evaluations


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_an_evaluation_gives_what_it_is_asked_for(engine, name):
    """Models, scores, all scores, or not; of a model that all share and of models of each client's own."""
    engine = ENGINES[engine](job(methods()[name].load()))
    method, ids, shared = engine.method, [1, 3, 4], name == "fedavg"
    ids = list(range(5)) if shared else ids
    down = method.show(method.init_server(5), torch.tensor(ids))
    replies = {}
    for keep in (False, True):
        for full in (False, True):
            (replies[keep, full],) = engine.evaluate([EvaluationRequest(0, 1, ids, down, keep, full)])
    (models,) = engine.evaluate([EvaluationRequest(0, 1, ids, down, keep=True, full=True, score=False)])
    engine.close()
    width = method.model.width
    for (keep, full), reply in replies.items():
        assert {name: tuple(theta.shape) for name, theta in reply.models.items()} == (
            {"personal": (1 if shared else len(ids), width)} if keep else {}
        )
        metrics = {"loss", "accuracy"} | (FULL if full else set())
        scores = reply.scores["personal"]
        assert set(scores) == {"val", "test"}
        assert all(set(table) == metrics for table in scores.values())
        assert all(len(numbers) == len(ids) for table in scores.values() for numbers in table.values())
        for split, table in replies[False, False].scores["personal"].items():
            assert checks.difference({metric: scores[split][metric] for metric in table}, table) == 0
    assert checks.difference(models.models, replies[True, True].models) == 0
    assert not any(models.scores.tables.values())
