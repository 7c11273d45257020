"""Convolution, ReLU and pooling as one layer: the same numbers as the network that was rewritten."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from perfed.accel.fast_model import FastModel
from perfed.accel.fused_layers import Conv, rewrite
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.models import make_network
from perfed.models.config import ModelConfig

D = torch.float64


def convs(model, mode="train"):
    """(relu, pool) of every fused layer, in order."""
    return [(m.relu, m.pool) for m in model._nets[mode].modules() if isinstance(m, Conv)]


def images(n=5, shape=(2, 14, 13), classes=3, seed=0, weight=None, dtype=D):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=draw, dtype=dtype)
    return Batch(x, torch.randint(0, classes, (n,), generator=draw), weight, derive(7, seed))


def assert_same(build, batch, head="", **near):
    """Values, gradients and statistics in every mode, for one client and for a block of three."""
    near = near or {"rtol": 1e-12, "atol": 1e-12}
    dtype = batch.x.dtype
    plain = Model(build, head=head, dtype=dtype)
    ours = FastModel(plain)
    theta = ours.init(1) + 0.01 * ours.weights.only(torch.linspace(-1, 1, ours.width, dtype=dtype))
    weights = torch.linspace(0, 1, len(batch.y), dtype=dtype)
    for weight, train in ((None, True), (weights, True), (None, False), (weights, False)):
        b = batch._replace(weight=weight)
        wanted = plain.grad(theta, b, train=train)
        for loss in (None, ours.loss):  # layer by layer where the network is straight, and with autograd
            for mine, theirs in zip(ours.grad(theta, b, loss, train=train), wanted, strict=True):
                torch.testing.assert_close(mine, theirs, **near)
    rows = torch.stack([theta, 1.1 * theta, ours.init(2)])
    x = torch.stack([batch.x, -batch.x, batch.x.flip(0)])
    each = [vmap(lambda t, x, m=m: m.grad(t, batch._replace(x=x)))(rows, x) for m in (ours, plain)]
    for mine, theirs in zip(*each, strict=True):
        torch.testing.assert_close(mine, theirs, **near)
    return ours


class Net(nn.Module):
    """A network around two convolutions, used as `forward(net, x)` says."""

    def __init__(self, forward, **options):
        super().__init__()
        self.one = nn.Conv2d(2, 4, 3, **options)
        self.two = nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.fast = nn.ReLU(), nn.ReLU(inplace=True)
        self.max, self.avg = nn.MaxPool2d(2), nn.AvgPool2d((2, 2), stride=2)
        self.code = forward
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.code(self, x).flatten(1))


def net(forward, **options):
    def build():
        made = Net(forward, **options).double()
        made(torch.zeros(1, 2, 14, 13, dtype=D))
        return made

    return build


PATTERNS = {
    "modules": (lambda s, x: s.max(s.relu(s.one(x))), (True, "max")),
    "functions": (lambda s, x: F.max_pool2d(F.relu(s.one(x)), 2), (True, "max")),
    "torch functions": (lambda s, x: torch.max_pool2d(torch.relu(s.one(x)), (2, 2), 2), (True, "max")),
    "method": (lambda s, x: F.max_pool2d(s.one(x).relu(), kernel_size=2, stride=(2, 2)), (True, "max")),
    "in place": (lambda s, x: s.max(s.fast(s.one(x))), (True, "max")),
    "method in place": (lambda s, x: s.max(s.one(x).relu_()), (True, "max")),
    "average": (lambda s, x: s.avg(s.relu(s.one(x))), (True, "avg")),
    "average function": (lambda s, x: F.avg_pool2d(s.one(x).relu(), 2), (True, "avg")),
    "pool first": (lambda s, x: s.relu(s.max(s.one(x))), (True, "max")),
    "average first": (lambda s, x: s.relu(s.avg(s.one(x))), (False, "avg")),
    "ReLU": (lambda s, x: s.relu(s.one(x)), (True, None)),
    "pool": (lambda s, x: s.max(s.one(x)), (False, "max")),
    "alone": (lambda s, x: s.one(x), (False, None)),
    "another activation": (lambda s, x: s.max(torch.tanh(s.one(x))), (False, None)),
    "larger pool": (lambda s, x: F.max_pool2d(s.one(x).relu(), 3), (True, None)),
    "overlapping pool": (lambda s, x: F.max_pool2d(s.one(x).relu(), 2, 1), (True, None)),
    "padded pool": (lambda s, x: F.max_pool2d(s.one(x).relu(), 2, padding=1), (True, None)),
    "ceiling": (lambda s, x: F.max_pool2d(s.one(x).relu(), 2, ceil_mode=True), (True, None)),
    "divisor": (lambda s, x: F.avg_pool2d(s.one(x).relu(), 2, divisor_override=3), (True, None)),
    "indices": (lambda s, x: F.max_pool2d(s.one(x).relu(), 2, return_indices=True)[0], (True, None)),
    "seen twice": (lambda s, x: (lambda y: torch.cat([y, y.relu()], 1))(s.one(x)), (False, None)),
    "written into": (lambda s, x: s.max(s.one(x).relu()).mul_(2), (False, None)),
    "view": (lambda s, x: (lambda y: y.view(y.size(0), -1))(s.one(x).relu()), (True, None)),
    "sizes": (lambda s, x: s.max(s.one(x).relu()).view(x.shape[0], -1, 3), (True, "max")),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    forward, expected = PATTERNS[name]
    model = assert_same(net(forward), images())
    assert convs(model) == [expected]


@pytest.mark.parametrize(
    ("options", "rewritten"),
    [
        ({"stride": 2, "padding": (1, 2), "bias": False}, True),
        ({"padding": "same"}, True),
        ({"padding": "valid"}, True),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
        ({"padding": 1, "padding_mode": "circular"}, False),
    ],
)
def test_kinds_of_convolutions(options, rewritten):
    forward, expected = PATTERNS["modules"]
    model = assert_same(net(forward, **options), images())
    assert convs(model) == ([expected] if rewritten else [])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_uneven_padding_stays():
    def build():
        return nn.Sequential(nn.Conv2d(2, 3, 2, padding="same"), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 14 * 13, 3))

    assert convs(assert_same(build, images())) == []


def test_float32_in_another_layout():
    # Channels last is for float32 alone; sums run in another order there.
    model = assert_same(
        lambda: net(lambda s, x: s.max(s.relu(s.two(s.max(s.one(x).relu())))))().float(),
        images(dtype=torch.float32),
        rtol=1e-4,
        atol=1e-5,
    )
    assert convs(model) == [(True, "max"), (True, "max")]
    batch = images(dtype=torch.float32)
    seen = []
    model._nets["train"].get_submodule("two").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.apply(model.init(0), batch.x, train=True)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    # Views, which need the usual layout, and other people's code in the head.
    viewed = net(lambda s, x: (lambda y: y.view(y.size(0), -1))(s.max(s.one(x).relu())))
    assert_same(lambda: viewed().float(), batch, rtol=1e-4, atol=1e-5)
    assert_same(WithHead, batch, head="head", rtol=1e-4, atol=1e-5)


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4 * 6 * 5, 3)

    def forward(self, x):
        return self.out(x.view(len(x), -1))


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = Views()

    def forward(self, x):
        return self.head(self.body(x))


def test_a_head_of_several_layers_is_still_looked_at():
    plain = Model(WithHead, head="head", dtype=D)
    ours = FastModel(plain)
    assert convs(ours) == [(True, "max")]
    seen = [m.features(m.init(0), images())[1] for m in (ours, plain)]
    assert seen[0].shape == (5, 120)
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize(
    ("name", "norm", "chains"),
    [
        ("fedavgcnn", "batch", [(True, "max")] * 2),
        ("lenet", "batch", [(True, "max")] * 2),
        ("resnet", "batch", [(False, None)] * 9),
        ("resnet", "group", [(False, None)] * 9),
        ("mlp", "batch", []),
    ],
)
def test_shipped_networks(name, norm, chains):
    shape = (3, 16, 16)
    build = make_network(ModelConfig(name=name, norm=norm), shape, 3)
    model = assert_same(build, images(4, shape), rtol=1e-10, atol=1e-11)
    assert convs(model) == chains


def test_dropout_and_norm_in_between():
    def build():
        layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.5)]
        layers += [nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(10, 3)]
        return nn.Sequential(*layers)

    assert convs(assert_same(build, images())) == [(False, None), (True, "max")]


def test_control_flow_stays():
    def branching(s, x):
        y = s.max(s.one(x).relu())
        return y if y.shape[0] > 3 else 2 * y

    assert convs(assert_same(net(branching), images())) == []


def test_what_only_depends_on_training_is_traced_for_each_mode():
    def other_in_training(s, x):
        return (s.max if s.training else s.avg)(s.one(x).relu())

    model = assert_same(net(other_in_training), images())
    assert convs(model, "train") == convs(model, "weighted") == [(True, "max")]
    assert convs(model, "eval") == [(True, "avg")]


def test_tensors_made_in_the_code_stay():
    assert convs(assert_same(net(lambda s, x: s.one(x) * torch.arange(11.0, dtype=D)), images())) == []


def test_code_about_strides_stays():
    assert convs(assert_same(net(lambda s, x: s.one(x) * s.one(x).stride(0)), images())) == []


@pytest.mark.parametrize("alike", [True, False])
def test_a_layer_that_is_used_twice(alike):
    def twice(s, x):
        x = s.one(x).relu()
        return s.two(s.two(x).relu()).relu() if alike else s.two(s.two(x).relu()) - 1

    assert convs(assert_same(net(twice), images())) == [(True, None), (alike, None)]


def test_one_layer_in_two_places():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 2, 3), nn.ModuleList()
            self.two.append(self.one)
            self.head = nn.Linear(2 * 2 * 1, 3)

        def forward(self, x):
            x = F.max_pool2d(self.one(x).relu(), 2)
            return self.head(F.max_pool2d(self.two[0](x).relu(), 2).flatten(1))

    model = assert_same(Tied, images())
    assert convs(model) == [(True, "max")]
    assert model._nets["train"].get_submodule("one") is model._nets["train"].get_submodule("two.0")


def test_a_layer_that_the_head_uses_too_stays():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(2, 2, 3, padding=1)
            self.head = nn.Sequential(self.one, nn.Flatten(), nn.Linear(2 * 14 * 13, 3))

        def forward(self, x):
            return self.head(self.one(x).relu())

    assert convs(assert_same(Shared, images(), head="head")) == []


def test_hooks_are_not_lost():
    seen = []
    made = net(lambda s, x: s.max(s.relu(s.one(x))))()
    made.relu.register_forward_hook(lambda *_: seen.append("relu"))
    names = list(dict(made.named_parameters()))
    x = images().x
    before = made(x)
    rewritten = rewrite(made)
    assert rewritten is made
    assert (made.one.relu, made.one.pool) == (False, None)
    torch.testing.assert_close(made(x), before)
    assert seen == ["relu"] * 2
    assert list(dict(made.named_parameters())) == names

    made = net(lambda s, x: s.max(s.relu(s.one(x))))()
    made.one.register_forward_hook(lambda *_: seen.append("conv"))
    assert type(rewrite(made).one) is nn.Conv2d


def test_the_user_gets_the_network_back():
    model = FastModel(Model(net(PATTERNS["modules"][0]), dtype=D))
    own = model.module(model.init(0))
    assert not any(isinstance(m, Conv) for m in own.modules())
    torch.testing.assert_close(own(images().x), model.apply(model.init(0), images().x)[0])


def test_a_residual_block_is_added_once():
    def residual(s, x):
        y = s.one(x).relu()
        return operator.add(s.two(y), y).relu()

    assert convs(assert_same(net(residual), images())) == [(True, None), (False, None)]
