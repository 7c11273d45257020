"""Per-FedAvg: a start from which one gradient step personalises."""

import copy
from dataclasses import replace

import pytest
import torch
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    equal_clients,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    push,
    same,
    slope,
    weights,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.random import TRAIN, derive, shuffle
from perfed.methods.fedavg import FedAvg
from perfed.methods.perfedavg import PerFedAvg

STRONG = {"inner_lr": 0.3, "delta": 0.02}


def smooth_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def draw(world, i, round, number):
    """The batches of one of the independent draws."""
    x, y = world.samples(i)
    key, out = derive(ORDER, TRAIN, round, 0, i, 0, number), []
    for epoch in range(world.settings["epochs"]):
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        out += [(x[rows], y[rows]) for rows in order.split(world.settings["batch_size"])]
    return out


def gradient(net, batch):
    """Of a network in training mode, whose statistics move."""
    net.zero_grad()
    nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    return slope(net).clone()


def moved(net, vector):
    """A copy with a vector added to the parameters."""
    net = copy.deepcopy(net)
    nn.utils.vector_to_parameters(weights(net) + vector, net.parameters())
    return net


def reference(world, inner_lr, variant="hf", delta=0.01, draws=(0, 1, 2), rounds=ROUNDS):
    w = world.net()
    for round, cohort in enumerate(rounds, 1):
        nets = []
        for i in cohort:
            net = copy.deepcopy(w).train()
            optimiser = world.sgd(net)
            for D2, D1, D3 in zip(*(draw(world, i, round, number) for number in draws), strict=True):
                adapted = moved(net, -inner_lr * gradient(copy.deepcopy(net), D1))
                v = gradient(adapted, D2)
                step = v
                if variant == "hf":
                    e = delta / v.norm()
                    H_v = (gradient(moved(net, e * v), D3) - gradient(moved(net, -e * v), D3)) / (2 * e)
                    step = v - inner_lr * H_v
                for mine, fresh in zip(net.buffers(), adapted.buffers(), strict=True):
                    mine.copy_(fresh)
                for p in net.parameters():
                    p.grad = torch.zeros_like(p)
                push(net, step)
                optimiser.step()
            nets.append(net)
        w = average(nets, [1] * len(nets))
    return w


def adapted(world, w, i, inner_lr, split="train"):
    """One step on a split of client i, in eval mode."""
    net = copy.deepcopy(w)
    net.zero_grad()
    world.risk(net, i, split).backward()
    return moved(net, -inner_lr * slope(net))


@pytest.mark.parametrize(
    ("build", "variant", "momentum"),
    [(plain_net, "hf", 0.0), (plain_net, "fo", 0.9), (norm_net, "hf", 0.9), (norm_net, "fo", 0.0)],
)
def test_equals_the_reference(build, variant, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(PerFedAvg, variant=variant, **STRONG)
    w = reference(world, variant=variant, **STRONG)
    close(fed.server, flat(w))
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(adapted(world, w, i, 0.3)))


def test_variants_and_draws_differ(clients):
    """Three draws of batches: with one in place of three the result is another."""
    world, short = World(plain_net, clients), {**STRONG, "rounds": [(0, 2)]}
    full = flat(reference(world, **short))
    assert differs(full, flat(reference(world, draws=(0, 0, 0), **short)))
    assert differs(full, flat(reference(world, draws=(0, 1, 1), **short)))
    assert differs(full, flat(reference(world, variant="fo", **short)))


@pytest.mark.parametrize(("build", "variant"), [(plain_net, "fo"), (norm_net, "hf")])
def test_inner_lr_0_is_fedavg_with_uniform_weights(build, variant, clients):
    world = World(build, equal_clients(clients), momentum=0.9)
    fed, avg = world.run(PerFedAvg, inner_lr=0, variant=variant), world.run(FedAvg)
    same(fed.server, avg.server)
    same(personal(fed), personal(avg))
    ragged = World(build, clients)
    assert differs(ragged.run(PerFedAvg, inner_lr=0).server, ragged.run(FedAvg).server)


def meta_gradient(world, i, alpha):
    """The gradient of f(w - alpha grad f(w)) through both derivatives, on all samples of client i."""
    net, (x, y) = world.net(), world.samples(i)
    params = dict(net.named_parameters())
    inner = nn.functional.cross_entropy(net(x), y)
    g = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    there = {name: p - alpha * d for (name, p), d in zip(params.items(), g, strict=True)}
    nn.functional.cross_entropy(torch.func.functional_call(net, there, (x,)), y).backward()
    return slope(net)


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_hessian_free_is_the_gradient_of_the_meta_function(alpha, clients):
    """One full-batch step, so that the three batches are the same samples; the error falls as delta squared."""
    world = World(smooth_net, clients, weight_decay=0, epochs=1, batch_size=50, lr=1.0)
    start = world.federation(PerFedAvg).server
    exact = meta_gradient(world, 2, alpha)
    step = lambda **more: (start - world.run(PerFedAvg, [(2,)], inner_lr=alpha, **more).server)[: len(exact)]
    error = {delta: float((step(delta=delta) - exact).norm() / exact.norm()) for delta in (0.1, 0.05, 0.01)}
    assert error[0.01] < 1e-5
    assert 3.5 < error[0.1] / error[0.05] < 4.5
    assert float((step(variant="fo") - exact).norm() / exact.norm()) > 100 * error[0.01]  # the Hessian does something


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_finite_difference_has_the_same_length_for_any_gradient(size, clients):
    """A gradient of any size, in float32: a fixed delta would drown in rounding, or leave the neighbourhood."""
    world = World(smooth_net, clients)
    model = Model(smooth_net, dtype=torch.float32)
    method, seen, grad = PerFedAvg(model), [], model.grad

    def scaled(theta, batch, loss=None, train=True):
        seen.append(theta)
        g, fresh, value = grad(theta, batch, loss, train)
        return size * g, fresh, value

    model.grad = scaled
    x, y = world.samples(2)
    batch, w = Batch(x.float(), y, None, torch.tensor(0)), model.init(0)
    method.step((w, method.start(w)), (batch, batch, batch), ())
    assert len(seen) == 4
    for theta in seen[2:]:
        assert float((theta - w).norm()) == pytest.approx(0.01, rel=1e-2)
    assert float((seen[2] - seen[3]).norm()) == pytest.approx(0.02, rel=1e-2)  # central: one to either side


def test_float32_finite_difference_is_accurate(clients):
    world = World(smooth_net, clients)
    x, y = world.samples(2)
    out = []
    for dtype in (torch.float32, torch.float64):
        method = PerFedAvg(Model(smooth_net, dtype=dtype), inner_lr=0.5, lr=1.0)
        batch, w = Batch(x.to(dtype), y, None, torch.tensor(0)), method.model.init(0)
        out.append((method.step((w, method.start(w)), (batch, batch, batch), ())[0] - w).double())
    assert float((out[0] - out[1]).norm() / out[1].norm()) < 1e-4


def test_a_zero_gradient_stays_zero():
    """No division by the norm of nothing."""
    method = PerFedAvg(Model(smooth_net, dtype=torch.float64))
    w = torch.zeros_like(method.model.init(0))
    batch = Batch(torch.zeros(3, 6, dtype=torch.float64), torch.arange(3), None, torch.tensor(0))
    assert torch.equal(method.step((w, method.start(w)), (batch, batch, batch), ())[0], w)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_adapts_with_alpha_on_training_data_only(build, clients):
    """Never on test data, never with beta, and not only those that took part."""
    world = World(build, clients)
    fed = world.run(PerFedAvg, inner_lr=0.3)
    net = world.net()
    state = fed.method.model.state_dict(fed.server)
    net.load_state_dict(net.state_dict() | state)
    found = personal(fed)
    for i in (0, 1, NEVER):
        close(found[i], flat(adapted(world, net, i, 0.3)))
        assert differs(found[i][: len(flat(net))], flat(adapted(world, net, i, 0.3, split="test")))
        assert differs(found[i][: len(flat(net))], flat(adapted(world, net, i, world.settings["lr"])))
    assert differs(found[0], fed.server)
    assert torch.equal(found[0][fed.method.model.P :], fed.server[fed.method.model.P :])  # statistics stay


def test_no_look_at_test_data(clients):
    world = World(plain_net, clients)
    spoil = lambda split: replace(split, x=-3 * split.x, y=(split.y + 1) % 3)
    spoiled = replace(clients, test=spoil(clients.test), val=spoil(clients.val))
    honest, other = (world.run(PerFedAvg, clients=c) for c in (clients, spoiled))
    assert torch.equal(personal(other), personal(honest))
    trained = world.run(PerFedAvg, clients=replace(clients, train=spoil(clients.train)))
    assert differs(personal(trained), personal(honest))


def test_adaptation_is_thrown_away(clients):
    fed = World(plain_net, clients).run(PerFedAvg)
    server = fed.server.clone()
    first = personal(fed)
    assert torch.equal(personal(fed), first)
    assert torch.equal(fed.server, server)
    check_no_alias(fed)


def test_refusals(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="delta must be above 0"):
        world.federation(PerFedAvg, delta=0)
    with pytest.raises(Problem, match="one of hf, fo"):
        world.federation(PerFedAvg, variant="exact")


@pytest.mark.parametrize("variant", ["hf", "fo"])
def test_one_model_each_way(variant, clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(PerFedAvg, variant=variant)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
