"""FedDyn: dynamic regularisation."""

import copy

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    World,
    average,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    slope,
    state_of,
    weights,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.methods.fedavg import FedAvg
from perfed.methods.feddyn import FedDyn
from perfed.methods.fedprox import FedProx


def vector(net):
    return nn.utils.parameters_to_vector(net.parameters())


def reference(world, a, rounds=ROUNDS):
    """The paper's objective through autograd; statistics are averaged and get no correction."""
    w, N = world.net(), len(world.clients)
    h = torch.zeros_like(weights(w))
    own = [torch.zeros_like(h) for _ in range(N)]
    for round, cohort in enumerate(rounds, 1):
        nets, old = [], weights(w)
        for i in cohort:
            penalty = lambda net, i=i, old=old: -own[i] @ vector(net) + a / 2 * ((vector(net) - old) ** 2).sum()
            nets.append(world.train(w, world.batches(i, round), penalty))
        for i, net in zip(cohort, nets, strict=True):
            own[i] = own[i] - a * (weights(net) - old)
        h = h - a / N * sum(weights(net) - old for net in nets)
        w = average(nets, [1] * len(nets))
        nn.utils.vector_to_parameters(weights(w) - h / a, w.parameters())
    return w, h, own


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedDyn, a=0.3)
    w, h, own = reference(world, 0.3)
    close(fed.server["w"], flat(w))
    close(fed.server["h"], h)  # and 0 at buffers
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(w))
        close(state_of(fed, i), own[i])


@pytest.mark.parametrize("a", [0.01, 0.5])
def test_first_round_is_fedprox_with_a_longer_step(a, clients):
    """h is 0, so clients train as FedProx does; the server goes 1 + m / N times as far, for any a."""
    world = World(norm_net, clients)
    nets = []
    start = weights(world.net())
    for i in (0, 2, 3):
        penalty = lambda net: a / 2 * ((vector(net) - start) ** 2).sum()
        nets.append(world.train(world.net(), world.batches(i, 1), penalty))
    mean = average(nets, [1, 1, 1])
    fed = world.run(FedDyn, [(0, 2, 3)], a=a)
    P = len(start)
    same(fed.server["w"][:P] - start, (1 + 3 / 5) * (weights(mean) - start))
    close(fed.server["w"][P:], flat(mean)[P:])  # statistics are averaged only
    everybody = world.run(FedDyn, [range(5)], a=a).server["w"]
    alone = [world.run(FedProx, [(i,)], mu=a).server for i in range(5)]  # each client's own change
    moved = sum(one - world.federation(FedProx).server for one in alone) / 5
    same((everybody - fed.method.model.init(5))[:P], 2 * moved[:P])


def test_small_a_with_h_switched_off_is_fedavg_with_uniform_weights(clients):
    """And with h it is not: the server's correction does not shrink with a."""
    world, tiny = World(plain_net, clients), 1e-13
    fed = world.federation(FedDyn, a=tiny)
    w = world.net()
    for round, cohort in enumerate(ROUNDS, 1):
        fed.step(cohort)
        fed.engine.states[0].clear()
        with_h = fed.server["w"]
        off = with_h + fed.server["h"] / tiny
        fed.server = {**fed.server, "w": off, "h": torch.zeros_like(off)}
        w = average([world.train(w, world.batches(i, round)) for i in cohort], [1, 1, 1])
        close(off, flat(w))
        assert differs(with_h, off)
    assert differs(world.run(FedDyn, a=tiny).server["w"], world.run(FedAvg).server)


def test_the_server_holds_the_mean_of_all_h(clients):
    fed = World(norm_net, clients).federation(FedDyn, a=0.3)
    for cohort in ROUNDS:
        fed.step(cohort)
        same(fed.server["h"], sum(state_of(fed, i) for i in range(5)) / 5)
        assert fed.server["h"].norm() > 1e-2


def linear_net():
    return nn.Linear(6, 3)


def slopes(world, theta):
    """Each client's gradient at theta, decay included."""
    out = []
    for i in range(5):
        net = world.net()
        nn.utils.vector_to_parameters(theta[:21].clone(), net.parameters())
        (world.risk(net, i) + world.settings["weight_decay"] / 2 * (vector(net) ** 2).sum()).backward()
        out.append(slope(net))
    return torch.stack(out)


def test_reaches_the_optimum_of_the_plain_mean(clients):
    """Convex clients that disagree, nearly exact local training, three of five at a time: the signs must be right."""
    world = World(linear_net, clients, lr=0.3, weight_decay=0.5, epochs=10, batch_size=50)
    fed = world.federation(FedDyn, a=0.5)
    start = slopes(world, fed.server["w"]).mean(0).norm()
    for round in range(24):
        fed.step(ROUNDS[round % 3] if round % 2 else (1, 3, 4))
    each = slopes(world, fed.server["w"])
    assert each.mean(0).norm() < 5e-3 * start
    assert each.norm(dim=1).min() > 0.1  # nobody stands at an optimum of its own
    for i in range(5):  # h_i is the client's gradient there: they cancel out
        torch.testing.assert_close(state_of(fed, i)[:21], each[i], rtol=0, atol=2e-2)


def test_quadratic_term_has_a_gradient(clients):
    world = World(plain_net, clients)
    start = world.federation(FedDyn).server["w"]
    far = []
    for a in (0.01, 1, 10):
        fed = world.run(FedDyn, [(0,)], a=a)
        far.append(float((fed.server["w"] - start).norm()))
    assert far[0] > far[1] > far[2] > 0


def test_refusals(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match=r"feddyn\.a must be above 0"):
        world.federation(FedDyn, a=0)
    with pytest.raises(Problem, match=r"lr \* a"):
        world.federation(FedDyn, a=50.0)  # lr 0.05


def test_evaluates_the_model_that_is_sent(clients):
    fed = World(plain_net, clients).run(FedDyn)
    for theta in personal(fed):
        assert torch.equal(theta, fed.method.broadcast(fed.server, torch.arange(5)).shared)


def test_non_participants_keep_h(clients):
    fed = World(plain_net, clients).run(FedDyn)
    before = copy.deepcopy({i: state_of(fed, i) for i in range(5)})
    assert not before[NEVER].any()
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])
    check_no_alias(fed)


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedDyn)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
