"""Networks as people bring them: what trains in a plain loop of PyTorch trains on every engine, with one result."""

import warnings

import pytest
import torch
from zoo import EVEN, ORDER, SETTINGS, WILD, ZOO, clients, expected

from perfed.accel.fast_model import FastModel
from perfed.contract import checks
from perfed.contract.toy import toy_clients
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedper import FedPer
from perfed.models.trial import refuse_other_gradients, refuse_unfit, unbatchable

# Interpreted kernels and long records are slow: of these networks every kind is recorded in the default suite.
QUICK = ("functional-dropout", "transformer-masked", "vit-dropout", "tied", "spectral-norm", "frozen-by-context", "rnn")
# PyTorch's own words about evaluating with masks.
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def play(engine, animal, data, **options):
    method = FedAvg(Model(animal.build, dtype=torch.float64), **SETTINGS)
    return method.model, checks.play(engine(Job(method, data, seed=ORDER), **options), [range(len(data))])


def check(animal, data, engine=Sequential, **options):
    model, outcome = play(engine, animal, data, **options)
    if engine is Sequential and not animal.random:
        server = model.flat(expected(animal, data))
        assert checks.difference(outcome.server, server) < 1e-10
        assert checks.difference(server, model.init(0)) > 1e-4
    if engine is not Sequential:
        _, reference = play(Sequential, animal, data)
        assert checks.difference(outcome.server, reference.server) < 1e-10
        assert checks.difference(outcome.scores, reference.scores) < 1e-10


@NESTED
@pytest.mark.parametrize("name", ZOO)
def test_one_after_another_equals_a_plain_loop(name):
    check(ZOO[name], clients(ZOO[name].shape))


@NESTED
@pytest.mark.parametrize("name", ZOO)
def test_all_at_once_equals_one_after_another(name):
    check(ZOO[name], clients(ZOO[name].shape), Vectorised)


@NESTED
@pytest.mark.parametrize("name", ZOO)
def test_outputs_from_features_and_gradients_of_samples(name):
    data, plain = clients(ZOO[name].shape), Model(ZOO[name].build, dtype=torch.float64)
    for model in (plain, FastModel(plain)):
        theta, batch = model.init(1), Batch(data.train.x[:3].double(), data.train.y[:3], None, derive(0))
        out, z, _ = model.features(theta, batch)
        assert torch.equal(model.classify(theta, z), out)
        assert checks.difference(model.grads(theta, batch).mean(0), model.grad(theta, batch, train=False)[0]) < 1e-12


@NESTED
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_full_batches_alone(name):
    for engine in (Sequential, Vectorised):
        check(ZOO[name], clients(ZOO[name].shape, EVEN), engine)


@NESTED
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_recorded_equals_one_after_another(name):
    """A notice that something could not be recorded would be an error here."""
    pytest.importorskip("triton", reason="recorded steps need Triton")
    check(ZOO[name], clients(ZOO[name].shape), Vectorised, fast=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet-batch", "unet", "gru-dropout", "transformer-dropout", "mobilenet-dropout"])
def test_recorded_full_batches(name):
    pytest.importorskip("triton", reason="recorded steps need Triton")
    check(ZOO[name], clients(ZOO[name].shape, EVEN), Vectorised, fast=True)


@pytest.mark.parametrize("name", ["gru-dropout", pytest.param("transformer-dropout", marks=pytest.mark.slow)])
def test_worker_processes(name):
    check(ZOO[name], clients(ZOO[name].shape), Workers, workers=2)


# ---------------------------------------------------------------------- before a run


@NESTED
@pytest.mark.parametrize("name", ZOO)
def test_nothing_in_the_zoo_is_refused(name):
    animal = ZOO[name]
    few = clients(animal.shape, dtype=torch.float32)
    refuse_unfit(animal.build, name, few)
    refuse_other_gradients(animal.build, name, few)
    assert unbatchable(animal.build, few) == ""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cumulative", "momentum=None averages over batches"),
        ("no-statistics", "without statistics a prediction depends on its neighbours"),
        ("noisy", "draws random numbers of its own in training"),
        ("bfloat16", r"has parameters of bfloat16, but the run computes in float32: perfed has float32 and float64"),
        ("float64", r"has parameters of float64, but the run computes in float32: use --precision float64"),
        ("renormed", "Embedding with max_norm writes over its weights"),
        ("elsewhere", r"trains 'hidden.weight' otherwise than a plain loop of PyTorch would"),
    ],
)
def test_refused_in_a_sentence(name, sentence):
    animal = WILD[name]
    few = clients(animal.shape, dtype=torch.float32)

    def tried():
        refuse_unfit(animal.build, name, few)
        refuse_other_gradients(animal.build, name, few)

    with pytest.raises(Problem, match=sentence):
        tried()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("by-value", "looks at the numbers of a tensor"),
        ("notebook", "broadcast shape"),
        ("mixing", "mixes the samples"),
    ],
)
def test_one_after_another_alone(name, why):
    animal = WILD[name]
    few = clients(animal.shape)
    assert why in unbatchable(animal.build, few)
    refuse_other_gradients(animal.build, name, few)
    check(animal, few)


def test_networks_of_float64():
    animal = WILD["float64"]
    few = clients(animal.shape)
    refuse_unfit(animal.build, "float64", few, torch.float64)
    refuse_other_gradients(animal.build, "float64", few, torch.float64)
    check(animal, few)


def test_a_trial_draws_nothing_for_others():
    torch.manual_seed(0)
    animal = ZOO["functional-dropout"]
    refuse_unfit(animal.build, "functional", clients(animal.shape, dtype=torch.float32))
    first = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(()))


def test_autocast_is_not_lost():
    """Code is rewritten where its meaning is known; what a `with` means is not."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = torch.relu(self.conv(x))
            return self.head(x.float().mean((2, 3)))

    model = Model(Half)
    engine = Sequential(Job(FedAvg(model, **SETTINGS), clients((3, 8, 8), dtype=torch.float32)))
    x, theta = torch.randn(2, 3, 8, 8), model.init(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(engine.method.model.apply(theta, x)[0], model.module(theta)(x))


@pytest.mark.parametrize("name", ["frozen", "frozen-by-flags"])
def test_a_frozen_backbone_is_neither_sent_nor_counted(name):
    animal = ZOO[name]
    data, model = clients(animal.shape), Model(animal.build, dtype=torch.float64)
    assert len(model.moving) == len(model.head) == 4 * 4 + 4
    assert not len(model.body)
    assert len(model.everything) == model.size > 200
    for method in (FedAvg(model, **SETTINGS), FedPer(model, personal="none", **SETTINGS)):
        federation = Federation(Sequential(Job(method, data)))
        federation.step()
        assert federation.traffic.up == federation.traffic.down == len(data) * 20 * 8
    kept = Federation(Sequential(Job(FedPer(model, **SETTINGS), data)))
    kept.step()
    assert kept.traffic.up == kept.traffic.down == 0
    (theta,) = kept.engine.method.models(kept.engine.states[0][0], kept.show([0]), None).values()
    assert torch.equal(model.everything.take(theta)[:-20], model.init(0)[: model.size - 20])


def test_statistics_that_a_network_does_not_measure_are_frozen():
    class Still(torch.nn.Module):
        """A backbone in evaluation mode, whatever the rest is in."""

        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
            self.norm, self.head = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
            self.backbone.requires_grad_(False)

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            return self.head(self.norm(self.backbone(x)))

    model = Model(Still, dtype=torch.float64)
    assert len(model.moving) == 4 * 5 + 18  # its own BatchNorm, which has statistics, and the head
    assert len(model.norm) == 20
    data = toy_clients()
    server = run_rounds(FedAvg(model, epochs=1), data)
    moved = server != model.init(0)
    assert torch.equal(moved, model.moving.mask)


def run_rounds(method, data):
    federation = Federation(Sequential(Job(method, data)))
    federation.step()
    return federation.server
