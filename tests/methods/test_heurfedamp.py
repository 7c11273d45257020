"""HeurFedAMP: attention by cosines, with a fixed weight on the own model."""

import math

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

from perfed.methods.fedamp import FedAMP
from perfed.methods.heurfedamp import HeurFedAMP
from perfed.methods.local import Local

N = 5


def attention(nets, i, sigma, own):
    """Row i of xi."""
    w = [weights(net) for net in nets]
    cos = lambda a, b: float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
    e = {h: math.exp(sigma * cos(w[i], w[h])) for h in range(N) if h != i}
    return [own if j == i else (1 - own) * e[j] / sum(e.values()) for j in range(N)]


def reference(world, lam, sigma, own, begin):
    nets = [world.net() for _ in range(N)]
    for round, cohort in enumerate(ROUNDS, 1):
        trained = {}
        for i in cohort:
            xi, states, cloud = attention(nets, i, sigma, own), [net.state_dict() for net in nets], world.net()
            blend = lambda k, xi=xi, states=states: sum(x * s[k] for x, s in zip(xi, states, strict=True))
            cloud.load_state_dict({k: blend(k) if v.is_floating_point() else v for k, v in states[0].items()})
            u = [p.detach().clone() for p in cloud.parameters()]
            penalty = lambda net, u=u: (
                lam / 2 * sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), u, strict=True))
            )
            trained[i] = world.train(cloud if begin == "cloud" else nets[i], world.batches(i, round), penalty)
        for i, net in trained.items():
            nets[i] = net
    return nets


@pytest.mark.parametrize("begin", ["cloud", "own"])
@pytest.mark.parametrize(("sigma", "share"), [(10.0, 0.5), (40.0, 0.9)])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, sigma, share, begin, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(HeurFedAMP, lam=0.8, sigma=sigma, share=share, begin=begin)
    nets = reference(world, 0.8, sigma, 1 - share, begin)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i), flat(nets[i]))
        close(fed.server["models"][i], flat(nets[i]))


def test_share_0_and_lam_0_is_local(clients):
    world = World(norm_net, clients)
    same(personal(world.run(HeurFedAMP, share=0, lam=0)), personal(world.run(Local)))
    assert differs(personal(world.run(HeurFedAMP, share=0.5, lam=0)), personal(world.run(Local)))


def test_sigma_0_weighs_others_alike_as_a_wide_fedamp_does(clients):
    """The two methods meet: uniform weights over the others, all weight on them."""
    world = World(plain_net, clients)
    heuristic, exact = world.run(HeurFedAMP, sigma=0, share=1), world.run(FedAMP, sigma=1e13, share=1)
    same(heuristic.server["models"], exact.server["models"])


def test_sharp_attention_takes_the_most_similar(clients):
    fed = World(plain_net, clients).run(HeurFedAMP, sigma=1e6, share=1.0)
    w = torch.nn.functional.normalize(fed.server["models"], dim=1)
    nearest = (w @ w.T).fill_diagonal_(-1).argmax(1)
    same(fed.method.broadcast(fed.server, torch.arange(N)).own, fed.server["models"][nearest])


def test_own_weight_is_fixed_and_rows_sum_to_1(clients):
    fed = World(plain_net, clients).run(HeurFedAMP, share=0.3)
    xi = fed.method.attention(fed.server, torch.arange(N))
    assert not xi.diagonal().any()
    same(xi.sum(1), torch.full((N,), 0.3, dtype=torch.float64))


def test_cosines_are_of_parameters_only(clients):
    fed = World(norm_net, clients).run(HeurFedAMP)
    moved = fed.server["models"].clone()
    moved[1, fed.method.model.P : fed.method.model.size] += 50
    ids = torch.arange(N)
    assert torch.equal(fed.method.attention({"models": moved}, ids), fed.method.attention(fed.server, ids))


def test_a_single_client_is_its_own_cloud(clients):
    method = World(plain_net, clients).federation(HeurFedAMP).method
    server = method.init_server(1)
    same(method.broadcast(server, torch.tensor([0])).own, server["models"])


def test_non_participants_keep_their_model(clients):
    fed = World(plain_net, clients).run(HeurFedAMP)
    before = {i: state_of(fed, i).clone() for i in range(N)}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])
    check_no_alias(fed)


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(HeurFedAMP)) == (size, size)
