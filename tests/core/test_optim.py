"""Optimisers against PyTorch's, and the masks that keep a part out of them."""

from dataclasses import replace

import pytest
import torch
from reference import World, norm_net, plain_net, same

from perfed.core.errors import Problem
from perfed.core.optim import adam, adam_start, sgd
from perfed.engines.local import ClientData
from perfed.methods.fedavg import FedAvg

STEPS = 10
SGD = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]


def pull(theta):
    """A gradient that depends on where it is taken, so that an error in a step is carried on."""
    return torch.sin(3 * theta) + 0.3 * theta**2


def with_torch(optimiser, parameter, gradient=pull, clip=None):
    for _ in range(STEPS):
        parameter.grad = gradient(parameter.detach())
        if clip:
            torch.nn.utils.clip_grad_norm_(parameter, clip)
        optimiser.step()
    return parameter.detach()


def start(n):
    return torch.linspace(-2, 2, n, dtype=torch.float64)


@pytest.mark.parametrize("settings", [s for s in SGD if "weight_decay" not in s])
def test_sgd(settings):
    theta, velocity = start(20), torch.zeros(20, dtype=torch.float64)
    parameter = torch.nn.Parameter(theta.clone())
    for _ in range(STEPS):
        theta, velocity = sgd(theta, velocity, pull(theta), 0.1, **settings)
    same(theta, with_torch(torch.optim.SGD([parameter], lr=0.1, **settings), parameter))


@pytest.mark.parametrize("settings", [{}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_adam(settings):
    theta = start(20)
    state, parameter = adam_start(theta), torch.nn.Parameter(theta.clone())
    for _ in range(STEPS):
        theta, state = adam(theta, state, pull(theta), 0.1, **settings)
    same(theta, with_torch(torch.optim.Adam([parameter], lr=0.1, **settings), parameter))
    assert float(state[2]) == STEPS


def test_optimisers_write_into_nothing():
    theta, g = start(8), torch.ones(8, dtype=torch.float64)
    velocity, state = torch.full_like(theta, 0.5), adam_start(theta)
    sgd(theta, velocity, g, 0.1, 0.9, True)
    adam(theta, state, g, 0.1)
    assert torch.equal(theta, start(8))
    assert velocity.eq(0.5).all()
    assert g.eq(1).all()
    assert not any(t.any() for t in state)


def descend(method, theta, only=None):
    """Ten updates of a Method; gradients are 0 beyond the parameters, as Model.grad's are."""
    state = method.start(theta)
    for _ in range(STEPS):
        theta, state = method.update(theta, state, method.model.weights.only(pull(theta)), only)
    return theta, state


def a_method(clients, build=plain_net, **settings):
    return World(build, clients, lr=0.1, **({"weight_decay": 0.0} | settings)).federation(FedAvg).method


def torch_optimiser(parameter, optimizer="sgd", clip=None, **settings):
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    return kind([parameter], lr=0.1, **settings)


UPDATES = [*SGD, {"optimizer": "adam"}, {"optimizer": "adam", "weight_decay": 0.1}]
CLIPPED = [{"momentum": 0.9, "weight_decay": 0.1, "clip": 0.4}, {"optimizer": "adam", "weight_decay": 0.1, "clip": 0.4}]


@pytest.mark.parametrize("settings", [*UPDATES, *CLIPPED])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_update(build, settings, clients):
    """Buffers get no step and no decay."""
    method = a_method(clients, build, **settings)
    theta, P = start(method.model.width), method.model.P
    parameter = torch.nn.Parameter(theta[:P].clone())
    actual, _ = descend(method, theta)
    same(actual[:P], with_torch(torch_optimiser(parameter, **settings), parameter, clip=settings.get("clip")))
    end = method.model.size
    assert torch.equal(actual[P:end], theta[P:end])


@pytest.mark.parametrize("only", ["head", "body", "0.bias", "!head"])
@pytest.mark.parametrize("settings", [*UPDATES, *CLIPPED])
def test_update_of_a_part(settings, only, clients):
    """Outside: not one bit of theta or of the optimiser's state; inside: as if the rest did not exist, nor its norm."""
    method = a_method(clients, norm_net, **settings)
    theta = start(method.model.width)
    part = method.model.part(only)
    inside = part.mask & method.model.weights.mask
    parameter = torch.nn.Parameter(theta[inside].clone())
    actual, state = descend(method, theta, only)
    same(actual[inside], with_torch(torch_optimiser(parameter, **settings), parameter, clip=settings.get("clip")))
    assert torch.equal(actual[~inside], theta[~inside])
    for tensor in (state,) if settings.get("optimizer", "sgd") == "sgd" else state[:2]:
        assert not len(tensor) or not tensor[~inside].any()  # without momentum there is no state


def test_part_of_a_network_in_training(clients):
    """`descend` on the head: the body keeps its weights AND its statistics; on the body both move, the head stays."""
    world = World(norm_net, clients, momentum=0.9)
    method = replace(world.federation(FedAvg).method, batch_size=7, epochs=2)
    data = ClientData(clients, 0, torch.tensor(1), method)
    for only, frozen in (("head", "body"), ("body", "head")):
        before = method.model.init(0)
        moved = method.descend(before, data, only=only) != before
        assert not moved[method.model.part(frozen).mask].any()
        assert moved[method.model.part(only).mask].all()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"nesterov": True}, "nesterov needs momentum"), ({"optimizer": "adam", "momentum": 0.9}, "belongs to sgd")],
)
def test_settings_that_contradict_each_other(wrong, why, clients):
    with pytest.raises(Problem, match=why):
        a_method(clients, **wrong)


def frozen_net():
    """A network whose first layer is not learned."""
    net = norm_net()
    net[0].requires_grad_(False)
    return net


def test_short_gradients_are_not_touched(clients):
    method, g = a_method(clients, clip=3.0), torch.ones(4, dtype=torch.float64)
    assert torch.equal(method.clipped(g), g)
    assert torch.equal(method.clipped(0 * g), 0 * g)
    assert a_method(clients).clipped(g) is g
    torch.testing.assert_close(method.clipped(9 * g).norm(), torch.tensor(3.0).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("build", [norm_net, frozen_net])
def test_a_clients_step_is_that_of_clip_grad_norm(build, clients):
    """One full batch through a whole method: statistics, frozen layers and padding are no part of the norm."""
    world = World(build, clients, lr=0.1, momentum=0.0, weight_decay=0.1, clip=0.05)
    method = replace(world.federation(FedAvg).method, batch_size=100, epochs=1)
    data = ClientData(clients, 0, torch.tensor(1), method)
    theta, count = method.model.init(0), clients.train.size[0]
    net = method.model.module(theta).train()
    if build is frozen_net:
        net[0].requires_grad_(False)
    learned = [p for p in net.parameters() if p.requires_grad]
    loss = torch.nn.functional.cross_entropy(net(clients.train.x[:count].double()), clients.train.y[:count])
    loss.backward()
    assert torch.nn.utils.clip_grad_norm_(learned, 0.05) > 0.1
    torch.optim.SGD(learned, lr=0.1, weight_decay=0.1).step()
    expected = method.model.flat(net.state_dict())
    torch.testing.assert_close(method.descend(theta, data), expected, rtol=1e-9, atol=1e-12)
