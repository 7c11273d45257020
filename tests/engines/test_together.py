"""Several runs in one batch: what they may differ in, and what is refused. That they equal runs alone: the contract."""

import dataclasses

import pytest
import torch

from perfed.contract import contract
from perfed.core.clients import SPLITS
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.vectorised import Together, Vectorised
from perfed.federation.federation import Federation, evaluate_together, step_together
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods

SIZES = (8, 3, 7, 5)


def engine(seed=0, clients=None, kind=FedAvg, fast=False, **changed):
    settings = {"epochs": 1, "batch_size": 5, "cohort": 2, **changed}
    method = kind(Model(contract.plain_net, dtype=torch.float64), seed=seed, **settings)
    return Vectorised(method, clients or contract.toy_clients(SIZES), seed=seed, fast=fast)


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"epochs": 2}, "epochs"), ({"momentum": 0.5}, "momentum"), ({"cohort": 3}, "cohort"), ({"lam": 2.0}, "lam")],
)
def test_other_settings_may_not_differ(changed, name):
    with pytest.raises(Problem, match=f"may differ in seed and lr only, not in {name}$"):
        Together([engine(0, kind=Ditto), engine(1, kind=Ditto, **changed)])


def test_samples_of_other_shapes_are_refused():
    few = contract.toy_clients(SIZES)
    cut = {name: dataclasses.replace(few.split(name), x=few.split(name).x[:, :5]) for name in SPLITS}
    with pytest.raises(Problem, match=r"need samples of one shape, normalised alike$"):
        Together([engine(0), engine(1, dataclasses.replace(few, **cut))])


def test_another_number_of_clients_is_refused():
    with pytest.raises(Problem, match=r"not in population$"):
        Together([engine(0), engine(1, contract.toy_clients((8, 3, 7)))])


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_runs_with_clients_of_their_own(name):
    """Each seed deals the samples anew; cohorts of all runs are still one batch."""
    settings = {"kind": methods()[name].load(), "lr": 0.05}
    deals = {0: contract.toy_clients(SIZES), 3: contract.toy_clients((2, 9, 4, 6), seed=1)}
    engines = [engine(seed, clients, **settings) for seed, clients in deals.items()]
    federations, together = [Federation(e) for e in engines], Together(engines)
    for _ in range(2):
        step_together(federations, together)
    values = evaluate_together(federations, together)
    for at, (seed, clients) in enumerate(deals.items()):
        alone = Federation(engine(seed, clients, **settings))
        for _ in range(2):
            alone.step()
        assert contract.difference(federations[at].server, alone.server) < 1e-9
        assert contract.difference(values[at], alone.evaluate()) < 1e-9


def test_models_of_every_run_are_saved():
    """Each run's saver gets its own clients' models, in a batch as alone."""
    engines = [engine(seed, kind=Ditto) for seed in (0, 3)]
    federations, together = [Federation(e) for e in engines], Together(engines)
    step_together(federations, together)
    saved = [{}, {}]
    savers = [lambda id, models, at=at: saved[at].update({id: models["personal"]}) for at in range(2)]
    values = evaluate_together(federations, together, savers)
    for at, federation in enumerate(federations):
        alone = {}
        expected = federation.evaluate(lambda id, models, alone=alone: alone.update({id: models["personal"]}))
        assert list(saved[at]) == list(alone) == [0, 1, 2, 3]
        assert contract.difference(saved[at], alone) < 1e-12
        assert contract.difference(values[at], expected) < 1e-12
    assert contract.difference(saved[0], saved[1]) > 1e-3


def test_recorded_runs_together():
    """The same with recorded steps: a learning rate that differs is a number the record reads, not one it holds."""
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    rates = {0: 0.05, 3: 0.02}
    engines = [engine(seed, lr=lr, fast=True) for seed, lr in rates.items()]
    federations, together = [Federation(e) for e in engines], Together(engines)
    for _ in range(2):
        step_together(federations, together)
    for federation, (seed, lr) in zip(federations, rates.items(), strict=True):
        alone = Federation(engine(seed, lr=lr))
        for _ in range(2):
            alone.step()
        assert contract.difference(federation.server, alone.server) < 1e-9


def test_runs_leave_a_batch_one_after_another():
    """Each batch of those that are left goes on with recorded steps, on clients of their own, as each would alone."""
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    deals = {0: (8, 3, 7, 5), 3: (2, 9, 4, 6), 5: (6, 5, 9, 3)}
    clients = {seed: contract.toy_clients(sizes, seed=seed) for seed, sizes in deals.items()}
    engines = [engine(seed, clients[seed], fast=True, lr=0.05) for seed in deals]
    federations, batches = [Federation(e) for e in engines], []  # kept, as experiments keep them
    for left in ([0, 1, 2], [0, 2], [0]):
        batches.append(Together([engines[at] for at in left]))
        step_together([federations[at] for at in left], batches[-1])
    for federation, seed, rounds in zip(federations, deals, (3, 1, 2), strict=True):
        alone = Federation(engine(seed, clients[seed], lr=0.05))
        for _ in range(rounds):
            alone.step()
        assert contract.difference(federation.server, alone.server) < 1e-9
