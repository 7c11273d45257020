"""Weights of classes in the loss: the formula, on every path that a loss takes, and in a run."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import perfed
from perfed.accel.fast_model import FastModel
from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods
from perfed.training.config import RunConfig
from perfed.training.prepare import class_weights, training_labels

WEIGHTS = (0.2, 5.0, 1.5)
USE_A_LOSS_OF_THEIR_OWN = ("moon", "fedalign", "fedrod", "ifca", "fedfomo", "pgfed", "perfedavg", "apfl", "pfedmb")


def weighted(model):
    return Model(model.build, dtype=model.dtype, class_weights=WEIGHTS)


def batch(n=7, filled=0):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, toy.FEATURES, generator=draw, dtype=torch.float64), torch.arange(n) % 3
    weight = torch.ones(n, dtype=torch.float64) if filled else None
    if filled:
        weight[-filled:] = 0
    return Batch(x, y, weight, torch.tensor(5))


def expected(model, theta, batch):
    """The gradient of the weighted sum over the number of samples, by PyTorch alone."""
    count = len(batch.y) if batch.weight is None else int(batch.weight.sum())
    theta = theta.clone().requires_grad_()
    out, _ = model.apply(theta, batch.x[:count])
    loss = (
        F.cross_entropy(out, batch.y[:count], weight=torch.tensor(WEIGHTS, dtype=model.dtype), reduction="sum") / count
    )
    return torch.autograd.grad(loss, theta)[0], loss.detach()


def residual():
    """A network that is no straight line."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(toy.FEATURES, toy.FEATURES), nn.Linear(toy.FEATURES, toy.CLASSES)

        def forward(self, x):
            return self.last(x + self.first(x).tanh())

    return Residual()


@pytest.mark.parametrize("filled", [0, 2])
@pytest.mark.parametrize("build", [toy.plain_net, residual])
@pytest.mark.parametrize("fast", [False, True])
def test_the_gradient_is_that_of_the_formula(build, fast, filled):
    model = weighted(Model(build, dtype=torch.float64))
    theta, samples = model.init(0), batch(filled=filled)
    g, loss = expected(model, theta, samples)
    used = FastModel(model) if fast else model
    got, _, value = used.grad(theta, samples)
    torch.testing.assert_close(got, g)
    torch.testing.assert_close(value, loss)
    torch.testing.assert_close(used.loss(theta, samples)[0], loss)
    rows = Batch(samples.x[None], samples.y[None], None if filled == 0 else samples.weight[None], samples.key)
    dims = (0, Batch(0, 0, None if filled == 0 else 0, None))
    torch.testing.assert_close(vmap(lambda t, b: used.grad(t, b)[0], dims)(theta[None], rows)[0], g)
    torch.testing.assert_close(model.like(build).by_class(torch.ones(7), samples.y).sum(), torch.tensor(13.6).double())


def test_without_weights_nothing_is_multiplied():
    model = Model(toy.plain_net)
    each = torch.ones(7)
    assert model.class_weights is None
    assert model.by_class(each, batch().y) is each


@pytest.mark.parametrize("name", USE_A_LOSS_OF_THEIR_OWN)
def test_every_loss_is_weighted_alike_on_every_engine(name):
    plain = toy.maker(methods()[name])()
    method = dataclasses.replace(plain, model=weighted(plain.model))
    clients = toy.toy_clients()
    reference = checks.play(Sequential(Job(method, clients, seed=5)), toy.COHORTS[:2])
    checks.compare(checks.play(Vectorised(Job(method, clients, seed=5)), toy.COHORTS[:2]), reference, name)
    checks.compare(checks.play(Workers(Job(method, clients, seed=5), workers=2), toy.COHORTS[:2]), reference, name)
    unweighted = checks.play(Sequential(Job(plain, clients, seed=5)), toy.COHORTS[:2])
    assert checks.difference(reference.models, unweighted.models) > 1e-3


def test_recorded_steps_are_weighted():
    make = lambda: FedAvg(Model(toy.plain_net, class_weights=WEIGHTS), epochs=1, batch_size=4, lr=0.05)
    clients = toy.toy_clients((6, 5))
    reference = checks.play(Sequential(Job(make(), clients)), [(0, 1)])
    recorded = checks.play(Vectorised(Job(make(), clients), fast=True), [(0, 1)])
    moved = (reference.server - make().init_server(2)).norm()
    assert (recorded.server - reference.server).norm() < 1e-4 * moved


def test_runs_of_other_weights_are_no_batch():
    make = lambda weights: Job(FedAvg(Model(toy.plain_net, class_weights=weights)), toy.toy_clients())
    with pytest.raises(Problem, match="need the same weights of classes"):
        Vectorised(make(WEIGHTS), make(None))


def test_balanced_weights():
    clients = toy.toy_clients()
    counts = np.bincount(clients.train.y.numpy(), minlength=3)
    assert training_labels(clients) == counts.tolist()
    assert class_weights(RunConfig(), counts) is None
    weights = np.array(class_weights(RunConfig(class_weights="balanced"), counts.tolist()))
    assert class_weights(RunConfig(class_weights="balanced"), [3, 0, 1]) == (2 / 3, 0, 2)
    np.testing.assert_allclose(weights * counts, counts.sum() / 3)
    np.testing.assert_allclose((weights * counts).sum() / counts.sum(), 1)


def write(folder):
    """Three sites of 200 samples, of which about 3 % are positive, with two features that overlap."""
    folder.mkdir()
    for seed, name in enumerate("abc"):
        draw = np.random.default_rng(seed)
        y = (np.arange(200) % 33 == 0).astype(int)
        np.savez(folder / f"{name}.npz", x=(draw.normal(size=(200, 2)) + y[:, None]).astype("float32"), y=y)
    return folder


def test_a_run_with_balanced_classes_finds_more_of_the_rare_one(tmp_path):
    settings = dict(data="folder", data_dir=str(write(tmp_path / "d")), rounds=5, model="mlr", epochs=2, baseline=False)
    found = {}
    for weights in ("none", "balanced"):
        run = perfed.run("fedavg", out=tmp_path / weights, class_weights=weights, engine="sequential", **settings)
        found[weights] = np.mean(run.scores("fedavg", "macro_f1")), run
    about = json.loads((tmp_path / "balanced" / "clients.json").read_text())
    assert len(about["training_labels"]) == 2
    assert found["none"][0] < 0.5 < found["balanced"][0]
    (tmp_path / "balanced" / "fedavg" / "result.json").unlink()
    again = perfed.api.resume(tmp_path / "balanced", perfed.api.Console(quiet=True))
    assert np.mean(again.scores("fedavg", "macro_f1")) == found["balanced"][0]
