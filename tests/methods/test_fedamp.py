"""FedAMP: cloud models by attention to near models."""

import math
import statistics

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    World,
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

from perfed.core.errors import Problem
from perfed.core.model import Batch
from perfed.methods.fedamp import FedAMP
from perfed.methods.local import Local

N = 5


def squared(a, b):
    return sum(float(((p - q) ** 2).sum().detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def mixed(world, nets, xi):
    """A network that is the mixture of others, with statistics."""
    out, states = world.net(), [net.state_dict() for net in nets]
    blend = lambda name: sum(x * state[name] for x, state in zip(xi, states, strict=True))
    out.load_state_dict({k: blend(k) if v.is_floating_point() else v for k, v in states[0].items()})
    return out


def towards(centre, strength):
    fixed = [p.detach().clone() for p in centre.parameters()]
    return lambda net: strength / 2 * sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), fixed, strict=True))


def attention(nets, i, sigma, share):
    """Row i of xi."""
    alpha = share * sigma / (N - 1)
    xi = [alpha / sigma * math.exp(-squared(nets[i], other) / sigma) for other in nets]
    xi[i] = 1 - sum(x for j, x in enumerate(xi) if j != i)
    return xi


def reference(world, lam, sigma=0.0, share=1.0, begin="cloud"):
    nets, width = [world.net() for _ in range(N)], sigma
    for round, cohort in enumerate(ROUNDS, 1):
        clouds = {i: mixed(world, nets, attention(nets, i, width or 1.0, share)) for i in cohort}
        trained = {
            i: world.train(clouds[i] if begin == "cloud" else nets[i], world.batches(i, round), towards(clouds[i], lam))
            for i in cohort
        }
        for i, net in trained.items():
            nets[i] = net
        if not sigma:
            apart = [squared(nets[i], other) for i in cohort for other in nets]
            width = statistics.median_low([d for d in apart if d > 0])
    return nets, width


@pytest.mark.parametrize("begin", ["cloud", "own"])
@pytest.mark.parametrize(("sigma", "share"), [(0.0, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, sigma, share, begin, clients):
    """The reference takes the penalty's gradient from autograd, so a penalty without a gradient would show."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedAMP, lam=0.8, sigma=sigma, share=share, begin=begin)
    nets, width = reference(world, 0.8, sigma, share, begin)
    same(float(fed.server["sigma"]), width)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i), flat(nets[i]))
        close(fed.server["models"][i], flat(nets[i]))


def test_share_0_and_lam_0_is_local(clients):
    world = World(norm_net, clients, momentum=0.9)
    alone = personal(world.run(Local))
    same(personal(world.run(FedAMP, share=0, lam=0)), alone)
    same(personal(world.run(FedAMP, share=1, lam=0, begin="own")), alone)  # u_i is sent but without effect
    assert differs(personal(world.run(FedAMP, share=1, lam=0)), alone)


def test_huge_sigma_is_the_uniform_mean_of_the_others(clients):
    fed = World(plain_net, clients).run(FedAMP, sigma=1e12)
    models, down = fed.server["models"], fed.method.broadcast(fed.server, torch.arange(N))
    for i in range(N):
        same(down.own[i], (models.sum(0) - models[i]) / (N - 1))


def test_own_weight_is_never_negative_and_rows_sum_to_1(clients):
    fed = World(plain_net, clients).run(FedAMP)
    ids = torch.arange(N)
    xi = fed.method.attention(fed.server, ids).masked_fill(torch.eye(N, dtype=torch.bool), 0)
    assert xi.min() >= 0
    assert xi.sum(1).max() <= 1
    flags = fed.server | {"models": torch.ones_like(fed.server["models"])}
    same(fed.method.broadcast(flags, ids).own, flags["models"])
    with pytest.raises(Problem, match="at most 1"):
        World(plain_net, clients).federation(FedAMP, share=1.1)


def test_automatic_sigma_keeps_clients_together(clients):
    """A fixed, small width lets exp() vanish: u_i is then w_i and every client is alone."""
    world = World(plain_net, clients)
    fed, lonely = world.run(FedAMP), world.run(FedAMP, sigma=1e-4)
    ids = torch.arange(4)
    assert not differs(lonely.method.broadcast(lonely.server, ids).own, lonely.server["models"][:4])
    weight = fed.method.attention(fed.server, ids)
    assert (weight.sum(1) > 0.3).all()
    assert differs(fed.method.broadcast(fed.server, ids).own, fed.server["models"][:4])


def test_sigma_follows_the_models(clients):
    """Models move apart: the median of round 1 would soon be as lonely as any small number."""
    fed = World(plain_net, clients).federation(FedAMP)
    assert fed.server["sigma"] == 0
    widths = []
    for cohort in ROUNDS:
        fed.step(cohort)
        widths.append(float(fed.server["sigma"]))
        assert widths[-1] == fed.method.notes(fed.server)["sigma"]
    assert 0 < widths[0] < widths[1] < widths[2]
    fixed = World(plain_net, clients).run(FedAMP, sigma=0.3)
    assert float(fixed.server["sigma"]) == 0.3
    assert World(plain_net, clients).run(FedAMP, [(2,)]).server["sigma"] > 0  # one client: its way from the start


def test_distances_are_of_parameters_only(clients):
    fed = World(norm_net, clients).run(FedAMP)
    P, size = fed.method.model.P, fed.method.model.size
    moved = fed.server["models"].clone()
    moved[1, P:size] += 50
    ids = torch.arange(N)
    assert torch.equal(fed.method.attention(fed.server | {"models": moved}, ids), fed.method.attention(fed.server, ids))
    assert differs(
        fed.method.broadcast(fed.server | {"models": moved}, ids).own[0, P:size], fed.server["models"][0, P:size]
    )


def test_pull_has_a_gradient_and_spares_statistics(clients):
    """The public copy's penalty is detached: with it lam would change nothing."""
    world = World(norm_net, clients, lr=0.1, weight_decay=0)
    free, pulled = (world.federation(FedAMP, lam=lam).method for lam in (0.0, 3.0))
    w, u = (free.model.init(seed) for seed in (1, 2))
    u[free.model.P : free.model.size] += 1
    batch = Batch(*world.samples(0), None, torch.tensor(0))
    steps = [m.update(m.pulled(w, batch, u)[1], m.start(w), m.pulled(w, batch, u)[0])[0] for m in (free, pulled)]
    expected = torch.zeros_like(w)
    expected[: free.model.P] = -0.1 * 3.0 * (w - u)[: free.model.P]
    same(steps[1] - steps[0], expected)


def test_stronger_pull_stays_nearer_to_the_cloud(clients):
    world = World(plain_net, clients)
    far = []
    for lam in (0, 1, 10):
        fed = world.run(FedAMP, ROUNDS[:2], lam=lam, sigma=1.0)
        u = fed.method.broadcast(fed.server, torch.tensor([0])).own[0]
        fed.step(ROUNDS[2])
        far.append(float((state_of(fed, 0) - u).norm()))
    assert far[0] > far[1] > far[2] > 0


def test_mixes_clients_that_sit_out_and_leaves_them_alone(clients):
    fed = World(plain_net, clients).run(FedAMP)
    before = {i: state_of(fed, i).clone() for i in range(N)}
    table = fed.server["models"].clone()
    fed.step((0, 1))
    check_kept(fed, before, (2, 3, NEVER))
    assert torch.equal(fed.server["models"][2:], table[2:])
    assert differs(state_of(fed, 0), before[0])
    without = fed.server | {"models": fed.server["models"].index_fill(0, torch.tensor([3]), 0.0)}
    ids = torch.tensor([0])
    assert differs(fed.method.broadcast(without, ids).own, fed.method.broadcast(fed.server, ids).own)


def test_refuses_a_pull_that_diverges(clients):
    world = World(plain_net, clients)
    for momentum in (0.0, 0.9):
        edge = 2 * (1 + momentum) / 0.05
        with pytest.raises(Problem, match="steps along the pull grow"):
            world.federation(FedAMP, lam=1.01 * edge, momentum=momentum)
        world.federation(FedAMP, lam=0.9 * edge, momentum=momentum)


def test_newcomer_gets_the_mean(clients):
    fed = World(plain_net, clients).run(FedAMP)
    same(fed.method.newcomer(fed.server).own, fed.server["models"].mean(0))


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedAMP))


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedAMP)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_mean == 0  # read client by client


def test_lam_matters_where_the_public_copy_is_local(clients):
    """Starting at w_i with a pull is not Local."""
    world = World(plain_net, clients)
    assert differs(personal(world.run(FedAMP, begin="own", lam=1.0)), personal(world.run(Local)))
    assert len(weights(world.net())) == world.federation(FedAMP).method.model.P
