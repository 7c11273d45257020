"""Learning rates that change from round to round, on every engine."""

import dataclasses

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.rates import Rates
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate, step
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.training.catalog import methods

COSINE = Rates("cosine", rounds=3)


def job(kind=FedAvg, clients=None, seed=5, rates=COSINE, **changed):
    settings = {"epochs": 1, "batch_size": 5, "lr": 0.1, "momentum": 0.5, "fine_tune": 1, **changed}
    return Job(
        kind(Model(toy.plain_net, dtype=torch.float64), **settings), clients or toy.toy_clients(), seed, rates=rates
    )


def alone(job):
    return checks.play(Sequential(job))


def test_every_round_trains_with_its_own_rate():
    """A federation whose method is exchanged by hand before every round, and before the evaluation."""
    scheduled = Federation(Sequential(job()))
    plain = Federation(Sequential(job(rates=Rates())))
    for round, cohort in enumerate(toy.COHORTS, 1):
        engine = plain.engine
        engine.jobs = [dataclasses.replace(engine.jobs[0], method=job(lr=0.1 * COSINE.factor(round)).method)]
        plain.step(cohort)
        scheduled.step(cohort)
    torch.testing.assert_close(scheduled.server, plain.server, rtol=0, atol=1e-15)
    assert (
        checks.difference(scheduled.evaluate().tables, plain.evaluate().tables) < 1e-12
    )  # fine-tuned at the last rate
    assert checks.difference(alone(job(rates=Rates())).server, scheduled.server) > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "make", [lambda job: Workers(job, workers=2), Vectorised, lambda job: Vectorised(job, block=2)]
)
def test_engines_agree(make, optimizer):
    scheduled = job(optimizer=optimizer, momentum=0.0)
    checks.compare(checks.play(make(scheduled)), alone(scheduled), "scheduled", tolerance=1e-12)


def test_steps_are_compiled_once():
    make = lambda: job(clients=toy.toy_clients((5, 5, 5, 5, 5)), fine_tune=0)
    engine = Vectorised(make(), compile="eager", sizes=(3,), notice=pytest.fail)
    checks.compare(checks.play(engine), alone(make()), "compiled", tolerance=1e-12)
    assert len(engine.runner.compiled) == 1


@pytest.mark.parametrize("kind", [FedAvg, Local])
def test_steps_are_recorded_once(kind):
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    make = lambda: job(kind, toy.toy_clients((8, 3, 7, 5)), fine_tune=0)
    engine, cohorts = Vectorised(make(), fast=True, notice=pytest.fail), ((0, 1, 2), (1, 2, 3), (0, 1, 3))
    expected = checks.play(Sequential(make()), cohorts)
    federation, loops = Federation(engine), []
    for cohort in cohorts:
        federation.step(cohort)
        loops.append(len(engine.runner.recorder.loops))
    assert loops == [1, 1, 1]
    assert checks.difference(federation.server, expected.server) < 1e-12
    assert checks.difference(federation.evaluate().tables, expected.scores) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto"])
def test_runs_of_several_rates_in_one_batch(name):
    kind, settings = methods()[name].load(), {"momentum": 0.0, "batch_size": 5}
    jobs = [job(kind, seed=seed, lr=lr, **settings) for seed, lr in {0: 0.1, 3: 0.1, 7: 0.02}.items()]
    engine = Vectorised(*jobs)
    batched = [Federation(engine, run) for run in range(3)]
    for _ in range(3):
        step(batched)
    for federation, each, scores in zip(batched, jobs, evaluate(batched, [None] * 3), strict=True):
        single = Federation(Sequential(each))
        for _ in range(3):
            single.step()
        assert checks.difference(federation.server, single.server) < 1e-12
        assert checks.difference(scores.tables, single.evaluate().tables) < 1e-12


def test_a_method_knows_how_many_rounds_the_run_has():
    three, four = job(seed=1), job(seed=2, rates=Rates(rounds=4))
    assert [Federation(Sequential(each)).method.context.rounds for each in (three, four)] == [3, 4]
    with pytest.raises(Problem, match="as many rounds, not 3 and 4"):
        Vectorised(three, four)
