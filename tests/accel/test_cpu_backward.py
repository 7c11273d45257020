"""Gradients layer by layer: which networks have them, and that they are autograd's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfed.accel.fast_model import FastModel
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.models import make_network
from perfed.models.config import ModelConfig

D = torch.float64


def batch(shape=(6,), n=7, weight=None, dtype=D):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=draw, dtype=dtype)
    return Batch(x, torch.randint(0, 3, (n,), generator=draw), weight, derive(1))


def is_straight(model):
    return model._straight["train"] is not None


def assert_same(build, shape=(6,)):
    plain = Model(build, dtype=D)
    ours = FastModel(plain)
    theta, weight = ours.init(3), torch.linspace(0, 2, 7, dtype=D)
    for b in (batch(shape), batch(shape, weight=weight)):
        x, before = b.x.clone(), theta.clone()
        for train in (True, False):
            for mine, theirs in zip(ours.grad(theta, b, train=train), plain.grad(theta, b, train=train), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
                assert not mine.requires_grad
        assert torch.equal(b.x, x)
        assert torch.equal(theta, before)
    return ours


@pytest.mark.parametrize("name", ["mlr", "mlp", "lenet", "fedavgcnn"])
def test_shipped_networks(name):
    shape = (2, 16, 16)
    assert is_straight(assert_same(make_network(ModelConfig(name=name), shape, 3), shape))


def sequence(*layers):
    return lambda: copy.deepcopy(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("shape", "build"),
    [
        ((6,), sequence(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Identity(), nn.Linear(5, 3))),
        ((2, 3), sequence(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.ReLU(), nn.Linear(5, 3), nn.ReLU())),
        ((2, 8, 8), sequence(nn.Conv2d(2, 3, 3, bias=False), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 3))),
        ((2, 8, 8), sequence(nn.Conv2d(2, 3, 3, 2, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))),
        ((2, 8, 8), sequence(nn.MaxPool2d(2), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.ReLU(), nn.Linear(12, 3))),
    ],
)
def test_straight(shape, build):
    assert is_straight(assert_same(build, shape))


@pytest.mark.parametrize(
    "flatten",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: torch.flatten(x, 1),
        lambda x: x.flatten(1),
    ],
)
def test_ways_to_flatten(flatten):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(27, 3)

        def forward(self, x):
            return self.head(flatten(F.max_pool2d(self.conv(x).relu(), 2)))

    assert is_straight(assert_same(Net, (2, 8, 8)))


def test_other_views_take_autograd():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.fc(x).view(6, -1).relu().view(x.shape[0], -1))

    assert not is_straight(assert_same(Net))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.one(x) + self.two(x))


class Twice(Branch):
    def forward(self, x):
        return self.head(self.two(self.one(self.one(x)).relu()))


class Unused(Branch):
    def forward(self, x):
        return self.head(self.one(x).relu())


class Tied(Branch):
    def __init__(self):
        super().__init__()
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.head(self.two(self.one(x).relu()))


class Function(Branch):
    def forward(self, x):
        return self.head(F.linear(self.two(x), self.one.weight, self.one.bias))


class Hooked(Branch):
    def __init__(self):
        super().__init__()
        self.one.register_forward_hook(lambda *given: 2 * given[-1])

    def forward(self, x):
        return self.head(self.two(self.one(x)))


class OwnForward(Branch):
    def __init__(self):
        super().__init__()
        self.one.forward = lambda input: 2 * input + self.one.bias

    def forward(self, x):
        return self.head(self.two(self.one(x)))


class ByTraining(Branch):
    def forward(self, x):
        return self.head(self.two(self.one(x)).relu() if self.training else self.two(self.one(x)))


@pytest.mark.parametrize("build", [Branch, Twice, Unused, Tied, Function, Hooked])
def test_other_networks_take_autograd(build):
    assert not is_straight(assert_same(build))


@pytest.mark.parametrize(
    "build",
    [
        sequence(nn.ReLU(), nn.Linear(6, 3)),  # in place, it would write into the samples
        sequence(nn.Flatten(), nn.ReLU(), nn.Linear(6, 3)),
        sequence(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        sequence(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    ],
)
def test_other_layers_take_autograd(build):
    assert not is_straight(assert_same(build))


def test_a_network_whose_layers_were_changed_by_hand():
    model = FastModel(Model(lambda: OwnForward(), dtype=D))
    assert not is_straight(model)


def test_a_network_that_differs_in_training():
    assert is_straight(assert_same(ByTraining))


def test_rows_of_more_than_one_dimension_take_autograd():
    def build():
        return nn.Sequential(nn.Linear(6, 3), nn.ReLU(), Mean())

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    assert not is_straight(assert_same(build, (4, 6)))


def test_frozen_parameters_get_no_gradient():
    def build():
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        net[0].requires_grad_(False)
        return net

    model = assert_same(build)
    g, _, _ = model.grad(model.init(0), batch())
    assert not g[model.part("0").mask].any()
    assert g[model.part("2").mask].any()


def test_a_row_of_a_matrix():
    model = FastModel(Model(sequence(nn.Linear(6, 3)), dtype=D))
    rows = torch.stack([model.init(0), model.init(1)], 1)
    torch.testing.assert_close(model.grad(rows[:, 1], batch())[0], model.grad(model.init(1), batch())[0])
