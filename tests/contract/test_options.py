"""What every method may be trained with, together: a schedule, clipping, a server's optimiser, weights of classes."""

import dataclasses

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.rates import Rates
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.federation.optimizers import ServerOptimizer
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods

YOGI = ServerOptimizer("yogi", 0.05)
DO_NOT_ADD = "apple fedamp feddyn fedfomo heurfedamp local pfedmb pfedmt scaffold".split()  # noqa: SIM905
ADD = "apfl ditto fedavg fedbabu fedbn fedper fedprox ifca lgfedavg moon perfedavg pfedme pgfed".split()  # noqa: SIM905
QUICK = ("fedavg", "ifca", "pfedme", "local")  # on engines that differ in how clients come together alone


def cases():
    """Every method on every engine with the network that has more to it; in a small one, options are as soon seen."""
    for name, entry in methods().items():
        first, *_, last = 2 * toy.networks(entry)
        for engine, network in dict.fromkeys([("vectorised", first), *((engine, last) for engine in checks.JOBS)]):
            quick = network == first if engine == "vectorised" else name in QUICK
            marks = [] if quick else [pytest.mark.slow]
            yield pytest.param(name, engine, network, marks=marks, id=f"{engine}-{network}-{name}")


@pytest.mark.parametrize(("name", "engine", "network"), list(cases()))
def test_engines_agree(name, engine, network):
    if engine == "workers" and torch.cuda.is_available():
        pytest.skip("with a GPU, PyTorch does not let a process that has used autograd fork workers")
    entry = methods()[name]
    checks.check_options(entry, engine, YOGI if entry.load().averages else None, network)


def test_who_adds_means():
    kinds = {name: entry.load() for name, entry in methods().items()}
    assert [name for name in (*ADD, *DO_NOT_ADD) if kinds[name].averages] == ADD


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_recorded_steps_of_all_together(name):
    """A factor of lr inside what a method computes, and a pull; weights of classes; clients below a batch."""
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    kind, clients, cohorts = methods()[name].load(), toy.toy_clients((8, 3, 7, 5)), ((0, 1, 2), (1, 2, 3))
    model = Model(toy.plain_net, dtype=torch.float64, class_weights=(0.2, 5.0, 1.5))
    make = lambda: Job(kind(model, epochs=1, batch_size=5, lr=0.05, clip=0.5), clients, 5, rates=Rates("linear", 2))
    expected = checks.play(Sequential(make()), cohorts)
    checks.compare(checks.play(Vectorised(make(), fast=True, notice=pytest.fail), cohorts), expected, "recorded", 1e-12)


@pytest.mark.parametrize("name", list(methods()))
def test_weights_of_classes_hold_for_every_method_with_clipping(name):
    """Clipped steps are all of one length: weights of classes turn them."""
    make = toy.maker(methods()[name])

    def after(weights):
        plain = make(clip=1e-3, epochs=1)
        model = Model(plain.model.build, dtype=torch.float64, class_weights=weights)
        engine = Sequential(Job(dataclasses.replace(plain, model=model), toy.toy_clients(), seed=5))
        federation = Federation(engine)
        for cohort in toy.COHORTS[:2]:  # the first may be a survey
            federation.step(cohort)
        return federation.evaluate().tables["personal"]["test"]["loss"]

    plain = after(None)
    assert checks.difference(after((1.0, 1.0, 1.0)), plain) < 1e-12
    assert checks.difference(after((0.2, 5.0, 1.5)), plain) > 1e-7


@dataclasses.dataclass(frozen=True)
class LooksAtItsRate(FedAvg):
    """It chooses by the number of its rate, which is each client's own in a batch of runs, and under a schedule."""

    def gradient(self, theta, batch, given=(), /):
        g, fresh = Method.gradient(self, theta, batch)
        return (2 * g if self.lr > 0.03 else g), fresh


def test_a_method_that_looks_at_its_rate_is_told(tmp_path):
    job = Job(LooksAtItsRate(Model(toy.plain_net, dtype=torch.float64)), toy.toy_clients(), rates=Rates("linear", 3))
    with pytest.raises(Problem, match=r"LooksAtItsRate \(test_options.py, line \d+\): an `if`, .* over a tensor"):
        Federation(Vectorised(job)).step()
