"""The engines' model: it computes what a plain one does, and no other model in the process knows of it."""

import copy

import pytest
import torch
from conftest import norm_net, plain_net
from torch import nn
from torch.func import vmap

from perfed.accel.fast_model import FastModel
from perfed.contract import checks, toy
from perfed.core.clients import Clients, Split
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised, with_starts
from perfed.federation.federation import Federation
from perfed.methods.fedalign import FedAlign
from perfed.methods.fedavg import FedAvg
from perfed.methods.moon import MOON

D = torch.float64


class Tied(nn.Module):
    """Two layers with a weight between them, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x))).relu())


def batch(weight=None):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, 6, generator=draw, dtype=D)
    return Batch(x, torch.randint(0, 3, (7,), generator=draw), weight, derive(1))


def same(mine, theirs):
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("build", [plain_net, norm_net, Tied])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_it_computes_what_a_plain_model_does(build, weighted, train):
    plain = Model(build, dtype=D)
    fast, theta = FastModel(plain), plain.init(3)
    b = batch(torch.linspace(0, 2, 7, dtype=D) if weighted else None)
    own_loss = lambda model: lambda theta, batch, train: model.loss(theta, batch, train)
    for run in (
        lambda m: m.grad(theta, b, train=train),
        lambda m: m.grad(theta, b, own_loss(m), train),
        lambda m: m.loss(theta, b, train),
        lambda m: m.features(theta, b, train),
        lambda m: vmap(lambda theta: m.grad(theta, b, train=train))(torch.stack([theta, 2 * theta])),
    ):
        same(run(fast), run(plain))


@pytest.mark.parametrize("build", [norm_net, Tied])
def test_its_networks_are_left_as_they_were(build):
    """A call borrows the network's places for tensors and gives them back."""
    fast = FastModel(Model(build, dtype=D))
    before = copy.deepcopy({mode: net.state_dict() for mode, net in fast._nets.items()})
    for loss in (None, fast.loss):
        fast.grad(fast.init(5), batch(), loss)
    fast.features(fast.init(5), batch(), train=True)
    assert not fast._watchers
    for mode, net in fast._nets.items():
        assert all(torch.equal(t, before[mode][name]) for name, t in net.state_dict().items())
        assert all(p.is_leaf for p in net.parameters())


def test_what_is_known_of_theta_is_shared():
    plain = Model(norm_net, dtype=D)
    fast = FastModel(plain)
    assert fast.shapes is plain.shapes
    assert fast.head is plain.head
    assert fast.part("0.*") is plain.part("0.*")
    assert torch.equal(fast.init(1), plain.init(1))


def test_an_engine_gives_its_method_a_fast_model_and_leaves_the_callers_alone():
    plain = Model(plain_net, dtype=D)
    method = FedAvg(plain)
    engine = Sequential(Job(method, toy.toy_clients()))
    assert method.model is plain
    assert type(engine.method.model) is FastModel
    again = Sequential(Job(engine.method, toy.toy_clients()))  # made of another engine's method
    assert again.method.model.plain is plain


def test_a_model_of_somebodys_own_class_stays():
    class Own(Model):
        pass

    own = Own(plain_net)
    assert FastModel.of(own) is own


def test_starts_of_several_runs():
    model = FastModel(Model(norm_net, dtype=D))
    several, seeds = with_starts(model, [4, 0, 7]), [7, 7, 4, 0]
    actual = vmap(several.init)(torch.tensor(seeds))
    assert torch.equal(actual, torch.stack([model.init(seed) for seed in seeds]))
    assert torch.equal(several.init(4), model.init(4))
    same(several.features(model.init(0), batch(), True), model.features(model.init(0), batch(), True))


# ---------------------------------------------------------------------- with kernels


def pictures(sizes=(5, 3)):
    draw = torch.Generator().manual_seed(0)

    def split(counts):
        x = torch.randn(sum(counts), 3, 8, 8, generator=draw)
        return Split(x, torch.arange(sum(counts)) % 3, tuple(counts))

    return Clients(tuple(map(str, range(len(sizes)))), split(sizes), split([1, 1]), split([2, 2]), 3)


def cnn():
    """A layer of every kind that kernels know."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def play(*engines):
    """What each engine ends with, when all take turns: a round of each, another of each, an evaluation of each."""
    federations = [Federation(engine) for engine in engines]
    for _ in range(2):
        for federation in federations:
            federation.step((0, 1))
    return [(federation.server, federation.evaluate().tables) for federation in federations]


@pytest.mark.parametrize("kind", [FedAvg, pytest.param(MOON, marks=pytest.mark.slow)])
def test_engines_with_and_without_kernels_take_turns(kind):
    """Nobody notices that the others are there, though all work with one method and one network: not by a bit."""
    pytest.importorskip("triton", reason="kernels need Triton, which comes for Linux")
    job = Job(kind(Model(cnn), lr=0.1, epochs=1, batch_size=4), pictures(), seed=5)
    engines = [lambda: Sequential(job), lambda: Vectorised(job), lambda: Vectorised(job, fast=True)]
    alone = [play(engine())[0] for engine in engines]
    for place, outcome in zip((2, 1, 0), play(*[engine() for engine in reversed(engines)]), strict=True):
        assert checks.difference(outcome, alone[place]) == 0
    assert checks.difference(alone[1], alone[2]) > 0  # kernels round in another way, so a switch would show


def test_kernels_belong_to_one_model():
    pytest.importorskip("triton", reason="kernels need Triton, which comes for Linux")
    from perfed.accel.cohort_layers import COHORT

    plain = Model(cnn)
    without, kernels = FastModel(plain), FastModel(plain, kernels=True)
    used = lambda net: {type(m) for m in net.modules()} & set(COHORT.values())
    assert used(kernels._nets["train"]) == set(COHORT.values())
    assert not used(without._nets["train"])
    assert not used(plain._net)
    other = kernels.like(cnn)
    assert used(other._nets["train"]) == set(COHORT.values()) - {COHORT[type(without._nets["train"][0])]}  # as written
    assert not used(without.like(cnn)._nets["train"])


def test_a_second_network_of_a_method_has_the_kernels_too():
    """FedAlign's wide network shares layers between two passes: what was put in place of one serves both."""
    pytest.importorskip("triton", reason="kernels need Triton, which comes for Linux")
    make = lambda: FedAlign(Model(two_blocks), lr=0.1, epochs=1, batch_size=4)
    actual, expected = (
        play(engine)[0]
        for engine in (Vectorised(Job(make(), pictures()), fast=True), Sequential(Job(make(), pictures())))
    )
    assert 0 < checks.difference(actual, expected) < 1e-4


def two_blocks():
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU())
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
