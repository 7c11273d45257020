"""Several runs in one engine: what they may differ in, what is refused. That they equal runs alone: the contract."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.clients import SPLITS
from perfed.core.errors import Problem
from perfed.core.messages import Up
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate, step
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods

SIZES = (8, 3, 7, 5)


def job(seed=0, clients=None, kind=FedAvg, cohort=2, **changed):
    settings = {"epochs": 1, "batch_size": 5, **changed}
    method = kind(Model(toy.plain_net, dtype=torch.float64), **settings)
    return Job(method, clients or toy.toy_clients(SIZES), seed, cohort)


def federations(engine):
    return [Federation(engine, run) for run in range(len(engine.jobs))]


def alone(job, rounds):
    federation = Federation(Sequential(job))
    for _ in range(rounds):
        federation.step()
    return federation


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"epochs": 2}, "epochs"), ({"momentum": 0.5}, "momentum"), ({"lam": 2.0}, "lam")],
)
def test_other_settings_may_not_differ(changed, name):
    with pytest.raises(Problem, match=f"may differ in seed and lr only, not in {name}$"):
        Vectorised(job(0, kind=Ditto), job(1, kind=Ditto, **changed))


def test_samples_of_other_shapes_are_refused():
    few = toy.toy_clients(SIZES)
    cut = {name: dataclasses.replace(few.split(name), x=few.split(name).x[:, :5]) for name in SPLITS}
    with pytest.raises(Problem, match=r"need samples of one shape, normalised alike$"):
        Vectorised(job(0), job(1, dataclasses.replace(few, **cut)))


def test_another_number_of_clients_is_refused():
    with pytest.raises(Problem, match=r"need as many clients and public samples, and cohorts of one size$"):
        Vectorised(job(0), job(1, toy.toy_clients((8, 3, 7))))


def test_another_size_of_cohorts_is_refused():
    with pytest.raises(Problem, match=r"need as many clients and public samples, and cohorts of one size$"):
        Vectorised(job(0), job(1, cohort=3))


@pytest.mark.parametrize("kind", [Sequential, Workers, Vectorised])
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_runs_with_clients_of_their_own(name, kind):
    """Each seed deals the samples anew; every engine serves all runs, the vectorised one in one batch."""
    settings = {"kind": methods()[name].load(), "lr": 0.05}
    deals = {0: toy.toy_clients(SIZES), 3: toy.toy_clients((2, 9, 4, 6), seed=1)}
    jobs = [job(seed, clients, **settings) for seed, clients in deals.items()]
    engine = kind(*jobs)
    batched = federations(engine)
    for _ in range(2):
        step(batched)
    scores = evaluate(batched, [None, None])
    engine.close()
    for run, each in enumerate(jobs):
        single = alone(each, 2)
        assert checks.difference(batched[run].server, single.server) < 1e-9
        assert checks.difference(checks.states_of(batched[run]), checks.states_of(single)) < 1e-9
        assert checks.difference(scores[run].tables, single.evaluate().tables) < 1e-9


@dataclass(frozen=True)
class Remembers(FedAvg):
    """Clients keep the last output for each of their samples, in as many rows as the context says."""

    def init_client(self):
        return torch.zeros(self.context.longest, self.model.outputs, dtype=self.model.dtype)

    def outputs(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def local(self, client, down, data):
        kept = data.map(self.outputs, down.shared)
        return kept + 0 * client, Up(mean=self.descend(down.shared, data) - down.shared)


@pytest.mark.parametrize("kind", [Sequential, Workers, Vectorised])
def test_a_table_of_samples_is_as_long_as_the_context_says(kind):
    """In a batch of runs whose largest clients differ it is the longest of all; elsewhere each run has its own."""
    jobs = [job(seed, toy.toy_clients(sizes), kind=Remembers) for seed, sizes in {0: SIZES, 3: (2, 9, 4, 6)}.items()]
    engine = kind(*jobs)
    assert [each.method.context.longest for each in engine.jobs] == ([9, 9] if kind is Vectorised else [8, 9])
    batched = federations(engine)
    step(batched, [range(4), range(4)])
    engine.close()
    for run, federation in enumerate(batched):
        sizes, longest = jobs[run].clients.train.size, engine.jobs[run].method.context.longest
        states = checks.states_of(federation)
        assert [len(states[id]) for id in range(4)] == [longest] * 4
        assert [int(states[id].any(1).sum()) for id in range(4)] == list(sizes)


def test_models_of_every_run_are_saved():
    """Each run's saver gets its own clients' models, in a batch as alone."""
    jobs = [job(seed, kind=Ditto) for seed in (0, 3)]
    batched, saved = federations(Vectorised(*jobs)), [{}, {}]
    step(batched)
    evaluate(batched, [saved[0].__setitem__, saved[1].__setitem__])
    for run, each in enumerate(jobs):
        expected = {}
        alone(each, 1).evaluate(expected.__setitem__)
        assert list(saved[run]) == list(expected) == [0, 1, 2, 3]
        assert checks.difference(saved[run], expected) < 1e-12
    assert checks.difference(saved[0], saved[1]) > 1e-3


def test_recorded_runs_in_one_batch():
    """A learning rate that differs is a number that the record reads, not one that it holds."""
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    jobs = [job(seed, lr=lr) for seed, lr in {0: 0.05, 3: 0.02}.items()]
    batched = federations(Vectorised(*jobs, fast=True))
    for _ in range(2):
        step(batched)
    for federation, each in zip(batched, jobs, strict=True):
        assert checks.difference(federation.server, alone(each, 2).server) < 1e-9


def test_runs_leave_a_batch_before_the_others():
    """Those that are left go on with recorded steps, on clients of their own, as each would alone."""
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    deals = {0: (8, 3, 7, 5), 3: (2, 9, 4, 6), 5: (6, 5, 9, 3)}
    jobs = [job(seed, toy.toy_clients(sizes, seed=seed), lr=0.05) for seed, sizes in deals.items()]
    batched = federations(Vectorised(*jobs, fast=True))
    for left in ([0, 1, 2], [0, 2], [0]):
        step([batched[run] for run in left])
    for federation, each, rounds in zip(batched, jobs, (3, 1, 2), strict=True):
        assert checks.difference(federation.server, alone(each, rounds).server) < 1e-9
