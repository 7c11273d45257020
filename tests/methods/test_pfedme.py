"""pFedMe: personal models by Moreau envelopes."""

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
    models,
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
from perfed.methods.pfedme import PFedMe

SET = {"lam": 4.0, "inner_lr": 0.08, "inner_steps": 3, "beta": 1.0}


def smooth_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def vector(net):
    return nn.utils.parameters_to_vector(net.parameters())


def train(world, w, batches, lam, inner_lr, inner_steps, fresh=False):
    """(w_i, theta) of one client; the tie's gradient comes from autograd. `fresh`: no warm start between batches."""
    lr, decay = world.settings["lr"], world.settings["weight_decay"]
    own, theta = copy.deepcopy(w), copy.deepcopy(w).train()
    for x, y in batches:
        if fresh:
            theta.load_state_dict(own.state_dict())
        optimiser = torch.optim.SGD(theta.parameters(), inner_lr, weight_decay=decay)
        centre = weights(own)
        for _ in range(inner_steps):
            optimiser.zero_grad()
            tie = lam / 2 * ((vector(theta) - centre) ** 2).sum()
            (nn.functional.cross_entropy(theta(x), y) + tie).backward()
            optimiser.step()
        followed = centre - lr * lam * (centre - weights(theta))
        own.load_state_dict(theta.state_dict())  # statistics
        nn.utils.vector_to_parameters(followed, own.parameters())
    return own, theta


def reference(world, beta=1.0, steps=0, **settings):
    w, own = world.net(), [world.net() for _ in range(5)]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = []
        for i in cohort:
            batches = world.batches(i, round, epochs=steps) if steps else world.batches(i, round)
            net, own[i] = train(world, w, batches[: steps or None], **settings)
            nets.append(net)
        old, w = weights(w), average(nets, [world.count(i) for i in cohort])
        nn.utils.vector_to_parameters((1 - beta) * old + beta * weights(w), w.parameters())
    return w, own


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("beta", [1.0, 1.6])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, beta, steps, clients):
    """Ragged clients; R batches, or all of the epochs; clients with fewer than R batches go round again."""
    world = World(build, clients)
    settings = SET | {"beta": beta, "steps": steps}
    fed = world.run(PFedMe, **settings)
    w, own = reference(world, **settings)
    close(fed.server, flat(w))
    found = models(fed)
    assert sorted(found) == ["global", "personal"]
    for i in range(5):
        close(state_of(fed, i), flat(own[i]))
        close(found["personal"][i], flat(own[i]))
        close(found["global"][i], flat(w))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_personal_model_is_theta_not_w_i(build, clients):
    """One client alone and beta 1: the server's model IS w_i. In the authors' code the two share their memory."""
    world = World(build, clients)
    fed = world.run(PFedMe, [(0,)], **SET)
    net, theta = train(world, world.net(), world.batches(0, 1), 4.0, 0.08, 3)
    close(fed.server, flat(net))
    close(personal(fed)[0], flat(theta))
    assert differs(personal(fed)[0], fed.server)
    P = fed.method.model.P
    same(fed.server[P:], state_of(fed, 0)[P:])  # statistics: theta's


def test_theta_starts_at_the_received_model_and_is_carried_from_batch_to_batch(clients):
    world = World(plain_net, clients)
    fed = world.run(PFedMe, ROUNDS[:1], **SET)
    other = world.run(PFedMe, ROUNDS[:1], **SET)
    other.engine.states[0].update((i, torch.full_like(state, 7.0)) for i, state in list(other.engine.states[0].items()))
    fed.step(ROUNDS[1])
    other.step(ROUNDS[1])
    for i in ROUNDS[1]:
        assert torch.equal(state_of(fed, i), state_of(other, i))
    cold = train(world, world.net(), world.batches(0, 1), 4.0, 0.08, 3, fresh=True)[1]
    assert differs(state_of(world.run(PFedMe, ROUNDS[:1], **SET), 0)[: len(flat(cold))], flat(cold))


def test_one_batch_solved_well_is_the_proximal_point(clients):
    """lam (w - theta) is then the loss's gradient at theta: the tie has a gradient, with coefficient lam / 2."""
    world = World(smooth_net, clients, weight_decay=0, batch_size=50, epochs=1)
    fed = world.run(PFedMe, [(0,)], lam=4.0, inner_lr=0.15, inner_steps=200)
    net, start = world.net(), weights(world.net())
    nn.utils.vector_to_parameters(state_of(fed, 0)[: len(start)].clone(), net.parameters())
    world.risk(net, 0).backward()
    torch.testing.assert_close(4.0 * (start - weights(net)), slope(net), rtol=1e-6, atol=1e-9)
    same(fed.server[: len(start)] - start, -world.settings["lr"] * slope(net))  # w_i: one step along that gradient


def test_eta_lambda_near_1_makes_w_i_theta(clients):
    world = World(plain_net, clients, lr=(1 - 1e-8) / 4)
    fed = world.run(PFedMe, [(0,)], **SET)
    torch.testing.assert_close(fed.server, state_of(fed, 0), rtol=1e-6, atol=1e-7)
    assert differs(fed.server, fed.method.model.init(5))


def test_stronger_tie_is_closer(clients):
    world = World(plain_net, clients, lr=0.01)
    far = []
    for lam in (0.5, 3, 9):
        fed = world.run(PFedMe, [(0,)], **(SET | {"lam": lam, "inner_steps": 20}))
        far.append(float((state_of(fed, 0) - fed.server).norm()))
    assert far[0] > far[1] > far[2] > 0


def test_beta_moves_the_server_in_proportion_and_spares_statistics(clients):
    world = World(norm_net, clients)
    start = world.federation(PFedMe).server
    one, half = (world.run(PFedMe, ROUNDS[:1], **(SET | {"beta": beta})).server for beta in (1.0, 0.5))
    P = len(weights(world.net()))
    same((half - start)[:P], 0.5 * (one - start)[:P])
    same(half[P:], one[P:])
    assert differs(one[P:], start[P:])


@pytest.mark.parametrize("wrong", [{"lr": 0.25}, {"lr": 0.3}, {"inner_lr": 0.25}, {"inner_lr": 1.0}])
def test_refuses_steps_that_overshoot(wrong, clients):
    with pytest.raises(Problem, match=r"lr \* lam below 1"):
        World(plain_net, clients).federation(PFedMe, **({"lam": 4.0, "inner_lr": 0.1} | wrong))


def test_refuses_other_optimisers_and_no_tie(clients):
    world = World(plain_net, clients)
    for wrong in ({"momentum": 0.9}, {"optimizer": "adam"}):
        with pytest.raises(Problem, match="plain gradient steps"):
            world.federation(PFedMe, **wrong)
    with pytest.raises(Problem, match="lam must be above 0"):
        world.federation(PFedMe, lam=0)


def test_only_the_cohort_computes(clients):
    fed = World(plain_net, clients).run(PFedMe)
    before = copy.deepcopy({i: state_of(fed, i) for i in range(5)})
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    same(personal(fed)[3], before[3])
    same(personal(fed)[NEVER], fed.method.model.init(5))
    assert differs(state_of(fed, 0), before[0])
    check_no_alias(fed)


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(PFedMe)
    assert per_client(fed) == (size, size)  # theta stays
    assert fed.traffic.up_own == 0
