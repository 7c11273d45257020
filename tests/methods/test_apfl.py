"""APFL: a learned mixture of own and global parameters."""

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
    state_of,
    weights,
)
from torch import nn
from torch.func import functional_call

from perfed.core.errors import Problem
from perfed.core.model import Batch
from perfed.methods.apfl import APFL
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local

FAST = {"mix": 0.4, "alpha_lr": 2.0}


def mixture(v, w, alpha):
    """Named parameters of the mixture, with a path to v and to alpha for autograd."""
    pairs = zip(v.named_parameters(), w.parameters(), strict=True)
    return {name: alpha * p + (1 - alpha) * q.detach() for (name, p), q in pairs}


def reference(world, mix, alpha_lr, order="old", rounds=ROUNDS):
    """`order`: gradients at the old point, or v's with the w that has already moved (the authors' code)."""
    w, own, alphas = world.net(), [world.net() for _ in range(5)], [mix] * 5
    for round, cohort in enumerate(rounds, 1):
        nets = []
        for i in cohort:
            local, v = copy.deepcopy(w).train(), own[i]
            alpha = torch.tensor(alphas[i], dtype=torch.float64, requires_grad=True)
            x, y = world.samples(i)
            risk = nn.functional.cross_entropy(functional_call(v.eval(), mixture(v, w, alpha), (x,)), y)
            (g,) = torch.autograd.grad(risk, alpha)  # that of the mixture with respect to alpha
            alphas[i] = a = min(max(alphas[i] - alpha_lr * float(g), 0.0), 1.0)
            v.train()
            first, second = world.sgd(local), world.sgd(v)
            for x, y in world.batches(i, round):
                first.zero_grad()
                second.zero_grad()
                nn.functional.cross_entropy(local(x), y).backward()
                if order == "new":
                    first.step()
                nn.functional.cross_entropy(functional_call(v, mixture(v, local, a), (x,)), y).backward()
                if order == "old":
                    first.step()
                second.step()
            nets.append(local)
        w = average(nets, [world.count(i) for i in cohort])
    return w, own, alphas


def mixed(v, w, alpha):
    """The mixture as a vector: parameters mixed, statistics of v."""
    return torch.cat([alpha * weights(v) + (1 - alpha) * weights(w), flat(v)[len(weights(v)) :]])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    """The reference has v's and alpha's gradients from autograd through the mixture."""
    world = World(build, clients, momentum=momentum)
    fed = world.run(APFL, **FAST)
    w, own, alphas = reference(world, **FAST)
    close(fed.server, flat(w))
    for i, theta in enumerate(personal(fed)):
        same(float(state_of(fed, i)["alpha"]), alphas[i])
        close(state_of(fed, i)["v"], flat(own[i]))
        close(theta, mixed(own[i], w, alphas[i]))
    assert min(abs(a - 0.4) for a in alphas[:4]) > 1e-3  # it adapts


def test_both_gradients_are_at_the_old_point(clients):
    world = World(plain_net, clients)
    wrong = flat(reference(world, order="new", **FAST)[1][3])
    assert differs(state_of(world.run(APFL, **FAST), 3)["v"][: len(wrong)], wrong)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_fixed_mixtures_of_0_and_1_are_fedavg_and_local(build, clients):
    world = World(build, clients, momentum=0.9)
    avg, alone = world.run(FedAvg), world.run(Local)
    none, all_of_it = (world.run(APFL, mix=mix, alpha_lr=0) for mix in (0.0, 1.0))
    same(personal(all_of_it), personal(alone))
    P = avg.method.model.P
    same(personal(none)[:, :P], personal(avg)[:, :P])  # statistics are the client's own
    for fed in (none, all_of_it, world.run(APFL, **FAST)):
        same(fed.server, avg.server)  # the global model is FedAvg's whatever the mixture


def test_the_default_is_neither_local_nor_fedavg(clients):
    world = World(plain_net, clients)
    fed = world.run(APFL)
    found = personal(fed)
    for other in (Local, FedAvg):
        apart = (found - personal(world.run(other))).abs().amax(dim=1)
        assert apart[:4].min() > 1e-3
    moved = [float(state_of(fed, i)["alpha"]) for i in range(4)]
    assert all(0 < a < 1 for a in moved)
    assert max(abs(a - 0.5) for a in moved) > 1e-4


def test_alpha_lr_0_keeps_alpha(clients):
    fed = World(plain_net, clients).run(APFL, mix=0.3, alpha_lr=0)
    assert all(float(state_of(fed, i)["alpha"]) == 0.3 for i in range(5))


def test_alpha_moves_once_per_round_before_the_steps(clients):
    """v and w are equal in round 1, so nothing moves; later it takes ONE step, however many batches there are."""
    world = World(plain_net, clients)
    fed = world.run(APFL, ROUNDS[:1], **FAST)
    assert all(float(state_of(fed, i)["alpha"]) == 0.4 for i in range(5))
    states, server = dict(fed.engine.states[0]), fed.server
    fed.step(ROUNDS[1])
    for i in ROUNDS[1]:
        v = states[i]["v"] if i in states else fed.method.model.init(5)
        x, y = world.samples(i)
        alpha = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        risk, _ = fed.method.model.loss(alpha * v + (1 - alpha) * server, Batch(x, y, None, torch.tensor(0)))
        (g,) = torch.autograd.grad(risk, alpha)
        same(float(state_of(fed, i)["alpha"]), 0.4 - 2.0 * float(g))
        assert abs(float(g)) > 1e-5


def test_alpha_stays_between_0_and_1(clients):
    fed = World(plain_net, clients).run(APFL, mix=0.5, alpha_lr=1e3)
    found = {float(state_of(fed, i)["alpha"]) for i in range(4)}
    assert found & {0.0, 1.0}
    assert all(0 <= a <= 1 for a in found)


def test_parameters_are_mixed_with_the_latest_global_model(clients):
    """A client that sat out keeps v and alpha, and yet predicts with another model once w has moved."""
    fed = World(plain_net, clients).run(APFL, **FAST)
    before, kept = personal(fed), copy.deepcopy({i: state_of(fed, i) for i in range(5)})
    fed.step((0, 1, 2))
    check_kept(fed, kept, (3, NEVER))
    after = personal(fed)
    for i in (3, NEVER):
        alpha = kept[i]["alpha"]
        same(after[i], alpha * kept[i]["v"] + (1 - alpha) * fed.server)
        assert differs(after[i], before[i])
    check_no_alias(fed)


def test_v_is_not_overwritten_by_the_mixture(clients):
    fed = World(plain_net, clients).run(APFL, **FAST)
    for i in range(4):
        assert differs(state_of(fed, i)["v"], personal(fed)[i])
        assert differs(state_of(fed, i)["v"], fed.server)


def test_refuses_a_mixture_outside_0_and_1(clients):
    for wrong in (-0.1, 1.1):
        with pytest.raises(Problem, match="mix must be at"):
            World(plain_net, clients).federation(APFL, mix=wrong)


def test_one_model_each_way_and_no_alpha(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(APFL)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
