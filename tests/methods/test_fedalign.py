"""FedAlign: the last block at two widths."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from reference import (
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    flat,
    per_client,
    personal,
    plain_net,
    same,
)
from torch import nn
from torch.func import vmap

from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.methods.fedalign import FedAlign
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.two_widths import last_block
from perfed.models import make_network
from perfed.models.config import ModelConfig

KEY = torch.tensor(0)


class Net(nn.Module):
    """Images of 2 x 3 pixels, a convolution, a block, the mean over pixels, classes."""

    def __init__(self, block):
        super().__init__()
        self.conv, self.block, self.head = nn.Conv2d(1, 8, 1), block, nn.Linear(12, 3)

    def start(self, x):
        return self.conv(x.reshape(-1, 1, 2, 3)).tanh()

    def end(self, x):
        return self.head(x.mean((2, 3)))

    def forward(self, x):
        return self.end(self.block(self.start(x)))


class Residual(nn.Module):
    """Two convolutions, the second one with a bias, beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.GroupNorm(4, 12)
        self.conv2, self.shortcut = nn.Conv2d(12, 12, 1), nn.Conv2d(8, 12, 1)

    def forward(self, x):
        return (self.conv2(self.norm1(self.conv1(x)).relu()) + self.shortcut(x)).relu()


def conv_net():
    return Net(nn.Conv2d(8, 12, (1, 2)))


def norm_net():
    return Net(nn.Sequential(nn.Conv2d(8, 12, (1, 2)), nn.BatchNorm2d(12), nn.ReLU()))


def group_net():
    return Net(Residual())


# ---------------------------------------------------------------------- the slow reference


def slim_conv(net, s):
    return F.conv2d(s, net.block.weight[:3, :2], net.block.bias[:3])


def slim_norm(net, s):
    conv, norm = net.block[0], net.block[1]
    s = F.conv2d(s, conv.weight[:3, :2], conv.bias[:3])
    return F.batch_norm(s, None, None, norm.weight[:3], norm.bias[:3], training=True).relu()


def slim_group(net, s):
    b = net.block
    y = F.conv2d(s, b.conv1.weight[:3, :2], padding=1)
    y = F.group_norm(y, 1, b.norm1.weight[:3], b.norm1.bias[:3]).relu()  # the first of four groups of three
    y = F.conv2d(y, b.conv2.weight[:3, :3], b.conv2.bias[:3])
    return (y + F.conv2d(s, b.shortcut.weight[:3, :2], b.shortcut.bias[:3])).relu()


def shrink(a, height, width):
    """The mean over windows that cover a picture evenly."""
    out = torch.empty(a.shape[0], height, width, dtype=a.dtype)
    cut = lambda k, n, m: slice(k * n // m, math.ceil((k + 1) * n / m))
    for i in range(height):
        for j in range(width):
            out[:, i, j] = a[:, cut(i, a.shape[1], height), cut(j, a.shape[2], width)].mean((1, 2))
    return out


def constant(a, b):
    """The spectral norm of one sample's matrix, by ten iterations from ones."""
    a = shrink(a, *b.shape[1:])
    pixels = [(i, j) for i in range(b.shape[1]) for j in range(b.shape[2])]
    T = sum(torch.outer(a[:, i, j], b[:, i, j]) for i, j in pixels) / len(pixels)
    v = torch.ones(len(T), dtype=T.dtype)
    for _ in range(10):
        m = T @ (T.T @ v)
        v = m / m.norm()
    return m.norm().sqrt()


def reference(world, slim, mu, clip, rounds=ROUNDS):
    """Two backward passes and one step, as the authors' code does it."""
    w = world.net()
    for round, cohort in enumerate(rounds, 1):
        nets = []
        for i in cohort:
            net = copy.deepcopy(w).train()
            optimiser = world.sgd(net)
            for x, y in world.batches(i, round):
                optimiser.zero_grad()
                before = net.start(x)
                after = net.block(before)
                loss = F.cross_entropy(net.end(after), y)
                ce = loss.item()
                loss.backward()
                before, after = before.detach(), after.detach()
                small = slim(net, before[:, :2])
                pairs = zip(before, after, small, strict=True)
                lip = sum((constant(a[:2], s) - constant(a, b)) ** 2 for a, b, s in pairs) / len(x)
                (mu * ce / lip.item() * lip).backward()
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimiser.step()
            nets.append(net)
        w = average(nets, [world.count(i) for i in cohort])
    return w


@pytest.mark.parametrize(
    ("build", "slim", "momentum"),
    [(conv_net, slim_conv, 0.9), (norm_net, slim_norm, 0.0), (group_net, slim_group, 0.9)],
)
def test_equals_the_reference(build, slim, momentum, clients):
    world = World(build, clients, momentum=momentum, epochs=1)
    fed = world.run(FedAlign, clip=1.0)
    w = reference(world, slim, mu=0.45, clip=1.0)
    close(fed.server, flat(w))
    for theta in personal(fed):
        close(theta, flat(w))
    assert differs(fed.server, world.run(FedAvg).server)


# ---------------------------------------------------------------------- identities and parts


@pytest.mark.parametrize("build", [conv_net, norm_net, group_net])
def test_mu_0_without_a_limit_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9, epochs=1)
    same(world.run(FedAlign, mu=0, clip=0).server, world.run(FedAvg).server)


def one_batch(build, clients, **settings):
    world = World(build, clients)
    method = world.federation(FedAlign, **({"clip": 0} | settings)).method
    return method, method.model.init(1), Batch(*world.samples(0), None, KEY)


def test_the_term_is_mu_times_the_cross_entropy(clients):
    method, w, batch = one_batch(norm_net, clients, mu=0.7)
    same(method.loss(w, batch, True)[0], 1.7 * method.model.loss(w, batch, True)[0])


def test_the_term_moves_the_first_channels_of_the_block_alone(clients):
    method, w, batch = one_batch(group_net, clients)
    off, _, _ = one_batch(group_net, clients, mu=0)
    g = method.model.state_dict(method.aligned(w, batch, ())[0] - off.aligned(w, batch, ())[0])
    for name, part in g.items():
        inside = {"conv1": (3, 2), "norm1": (3,), "conv2": (3, 3), "shortcut": (3, 2)}
        cut = inside.get(name.split(".")[1]) if name.startswith("block") else (0,)
        first = part[tuple(slice(n) for n in cut[: part.dim()])]
        assert (first.norm() > 1e-6) == name.startswith("block"), name
        assert part.norm() - first.norm() < 1e-12, name


def test_brings_the_two_constants_together(clients):
    method, w, batch = one_batch(conv_net, clients)
    off, _, _ = one_batch(conv_net, clients, mu=0)

    def apart(theta):
        (_, teacher, student), _ = method.wide.apply(theta, batch.x, True)
        return ((method.spectral(student) - method.spectral(teacher)) ** 2).mean()

    g = method.aligned(w, batch, ())[0] - off.aligned(w, batch, ())[0]
    assert apart(w - 1e-3 * g) < apart(w)


def test_the_constant_is_a_spectral_norm(clients):
    """Of matrices whose largest singular value stands out: ten iterations reach it."""
    method, _, _ = one_batch(conv_net, clients)
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(4, c, 3, 5, generator=draw, dtype=torch.float64) for c in (6, 9))
    T = torch.einsum("nchw,ndhw->ncd", a, b) / 15
    same(method.spectral((a, b)), torch.linalg.matrix_norm(T, ord=2))


def test_statistics_are_those_of_the_wide_pass(clients):
    method, w, batch = one_batch(norm_net, clients)
    _, expected, _ = method.model.grad(w, batch)
    same(method.aligned(w, batch, ())[1], expected)


def test_long_gradients_are_shortened_as_a_whole(clients):
    free, w, batch = one_batch(norm_net, clients)
    g = free.aligned(w, batch, ())[0]
    for clip, length in ((float(g.norm()) / 3, float(g.norm()) / 3), (10 * float(g.norm()), float(g.norm()))):
        found = one_batch(norm_net, clients, clip=clip)[0].clipped(g)
        torch.testing.assert_close(found, g * (length / g.norm()), rtol=1e-5, atol=0)


def test_dead_features_and_equal_constants_have_finite_gradients(clients):
    method, w, batch = one_batch(group_net, clients, mu=1.0)
    g, _ = method.aligned(torch.zeros_like(w), batch, ())
    assert g.isfinite().all()


# ---------------------------------------------------------------------- networks


SHIPPED = [
    ("lenet", "batch", (3, 16, 16), "conv2"),
    ("fedavgcnn", "batch", (1, 16, 16), "conv2"),
    ("resnet", "batch", (1, 8, 8), "block3"),
    ("resnet", "group", (1, 8, 8), "block3"),
]


@pytest.mark.parametrize(("name", "norm", "shape", "block"), SHIPPED)
def test_networks_that_we_ship(name, norm, shape, block):
    """The default block; clients as rows, and filling that counts for nothing, change no gradient."""
    make = make_network(ModelConfig(name=name, norm=norm), shape, 10)
    assert last_block(make(), "head") == block
    method = FedAlign(Model(make, dtype=torch.float64))
    rows = torch.stack([method.model.init(seed) for seed in (0, 1)])
    x, y = torch.randn(2, 6, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(6)
    expected = [method.aligned(w, Batch(some, y, None, KEY), ()) for w, some in zip(rows, x, strict=True)]
    together = vmap(lambda w, some: method.aligned(w, Batch(some, y, None, KEY), ()))(rows, x)
    filling = torch.tensor([1.0] * 6 + [0.0], dtype=torch.float64)
    full, more = torch.cat([x, x[:, :1]], 1), torch.cat([y, y[:1]])
    filled = vmap(lambda w, some: method.aligned(w, Batch(some, more, filling, KEY), ()))(rows, full)
    for row in range(2):
        same((together[0][row], together[1][row]), expected[row])
        same((filled[0][row], filled[1][row]), expected[row])


def test_default_block_of_nested_networks():
    conv = lambda: nn.Conv2d(4, 4, 1)
    features = nn.Sequential(conv(), nn.ReLU(), conv(), nn.ReLU())
    assert last_block(nn.Sequential(features, nn.Flatten(), nn.Linear(4, 2)), "2") == "0.2"
    assert last_block(nn.Sequential(conv(), features, nn.Linear(4, 2)), "2") == "1"
    assert last_block(nn.Sequential(conv(), features, conv()), "2") == "1"  # a head that is a convolution
    assert last_block(nn.Sequential(nn.Linear(4, 2)), "0") == ""


def test_another_block(clients):
    world = World(group_net, clients, epochs=1)
    usual, named, other = (world.run(FedAlign, ROUNDS[:1], module=m).server for m in ("", "block", "block.shortcut"))
    same(named, usual)
    assert differs(other, usual)


class Odd(nn.Module):
    """A block with a layer that cannot be cut."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(1)).view(-1, 12, 1, 1) if isinstance(self.layer, nn.Linear) else self.layer(x)


@pytest.mark.parametrize(
    ("build", "settings", "said"),
    [
        (plain_net, {}, "needs a network with convolutions"),
        (conv_net, {"module": "blok"}, "no module 'blok'; did you mean 'block'"),
        (conv_net, {"module": "head"}, "block 'head' holds a Linear"),
        (lambda: Net(nn.Conv2d(8, 12, 1, groups=2)), {}, "a Conv2d with groups"),
        (lambda: Net(Odd(nn.Linear(48, 12))), {"module": "block"}, "block 'block' holds a Linear"),
        (group_net, {"omega": 0.3}, "a width of 0.3 cuts a group of 3 of 12"),
        (conv_net, {"omega": 1.0}, "omega must be below 1"),
    ],
)
def test_refusals(build, settings, said, clients):
    with pytest.raises(Problem, match=said):
        World(build, clients).federation(FedAlign, **settings)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedAlign))


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedAlign)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
