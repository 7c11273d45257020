"""D-Distillation: neighbours agree on outputs for public samples, and no models travel."""

import copy
import dataclasses

import pytest
import torch
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    Mixed,
    World,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    personal,
    plain_net,
    same,
    state_of,
    step_keys,
)
from torch.nn import functional as F

from perfed.core.errors import Problem
from perfed.core.messages import Cohort
from perfed.core.model import Model
from perfed.core.random import TRAIN, derive, uniform
from perfed.core.task import Binary
from perfed.federation.traffic import PUBLIC_DATA
from perfed.methods.ddistill import DDistill
from perfed.methods.local import Local
from perfed.training.newcomers import visited

N, STRONG = 5, {"rho": 3.0, "public_batch": 4}
LINKS = {
    "ring": {(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)},
    "line": {(0, 1), (1, 2), (2, 3), (3, 4)},
    "star": {(0, 1), (0, 2), (0, 3), (0, 4)},
    "complete": {(i, j) for i in range(N) for j in range(i)},
}


def metropolis(links, count=N):
    """A, entry by entry."""
    degree = [sum(i in link for link in links) for i in range(count)]
    A = torch.zeros(count, count, dtype=torch.float64)
    for i, j in links:
        A[i, j] = A[j, i] = 1 / (1 + max(degree[i], degree[j]))
    for i in range(count):
        A[i, i] = 1 - A[i].sum()
    return A


def soft(net, x):
    with torch.no_grad():
        return net.eval()(x).softmax(1)


def trained(world, net, i, round, p, rho, public_batch):
    """One device's steps: public samples pass first, in evaluation mode, as its own move the statistics."""
    net, x = copy.deepcopy(net), world.clients.public.x
    optimiser, batches = world.sgd(net), world.batches(i, round)
    for (own, y), key in zip(batches, step_keys(derive(ORDER, TRAIN, round, 0, i), len(batches)), strict=True):
        rows = (uniform(derive(key, 1), (public_batch,), torch.float64) * len(x)).long()
        away = (net.eval()(x[rows]).softmax(1) - p[rows]).square().sum(1).mean()
        optimiser.zero_grad()
        (rho * away).backward()  # before its own samples move the statistics in place
        F.cross_entropy(net.train()(own), y).backward()
        optimiser.step()
    return net


def reference(world, topology="ring", rounds=ROUNDS, **about):
    A, x, nets = metropolis(LINKS[topology]), world.clients.public.x, [world.net_of(i) for i in range(N)]
    s = [soft(net, x) for net in nets]
    p = list(s)
    for round, cohort in enumerate(rounds, 1):
        for i in cohort:
            nets[i] = trained(world, nets[i], i, round, p[i], **about)
        fresh = [soft(net, x) if i in cohort else s[i] for i, net in enumerate(nets)]
        p = [sum(A[k, j] * p[j] for j in range(N)) + fresh[k] - s[k] for k in range(N)]
        s = fresh
    return nets, torch.stack(p), torch.stack(s)


def check_equal(fed, nets, p, s):
    same(fed.server["p"], p)
    same(fed.server["s"], s)
    for theta, net in zip(personal(fed), nets, strict=True):
        close(theta, flat(net))


@pytest.mark.parametrize("topology", LINKS)
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, topology, clients):
    world = World(build, clients, momentum=0.9)
    check_equal(world.run(DDistill, topology=topology, **STRONG), *reference(world, topology, **STRONG))


def test_networks_that_differ_equal_the_reference(clients):
    world = Mixed([plain_net, norm_net], clients)
    fed = world.run(DDistill, **STRONG)
    check_equal(fed, *reference(world, **STRONG))
    assert differs(fed.server["s"][NEVER], fed.server["s"][1])


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_rho_0_is_local(build, clients):
    world = World(build, clients, momentum=0.9)
    alone = personal(world.run(Local))
    same(personal(world.run(DDistill, rho=0)), alone)
    assert differs(personal(world.run(DDistill, **STRONG)), alone)


# ---------------------------------------------------------------------- how p moves


def method_of(clients, kind=DDistill, **more):
    return World(plain_net, clients).federation(kind, **more).method


@pytest.mark.parametrize("topology", LINKS)
def test_weights_are_metropolis_s(topology, clients):
    A = method_of(clients, topology=topology).mixing(N)
    same(A, metropolis(LINKS[topology]))
    assert torch.equal(A, A.T)
    same(A.sum(1), torch.ones(N, dtype=torch.float64))
    assert A.min() >= 0


def test_weights_in_numbers(clients):
    numbers = lambda topology, count: method_of(clients, topology=topology).mixing(count).tolist()
    assert numbers("complete", 4) == [[0.25] * 4] * 4
    star = [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0, 0], [0.25, 0, 0.75, 0], [0.25, 0, 0, 0.75]]
    assert numbers("star", 4) == star
    assert numbers("ring", 2) == numbers("line", 2) == [[0.5, 0.5], [0.5, 0.5]]
    for topology in LINKS:
        assert numbers(topology, 1) == [[1]]


def random_soft(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(count, 6, 3, generator=draw, dtype=torch.float64)).softmax(-1)


def spoken(method, server, ids, own):
    return method.aggregate(server, Cohort(torch.tensor(ids), (), own, torch.tensor(1.0), len(ids)))


@pytest.mark.parametrize("topology", LINKS)
def test_the_mean_of_p_is_that_of_s_whoever_sits_out(topology, clients):
    method, start = method_of(clients, topology=topology), random_soft(0, N)
    server = {"p": start, "s": start}
    for round, ids in enumerate([(0, 1, 2, 3, 4), (1, 3), (0,), (2, 3, 4), (0, 4)], 1):
        server = spoken(method, server, ids, random_soft(round, len(ids)))
        same(server["p"].sum(0), server["s"].sum(0))
        same(server["p"].sum(-1), torch.ones(N, 6, dtype=torch.float64))
    assert server["p"].min() < 0  # no probabilities any more
    assert differs(server["p"], server["s"])


def left_over(p, s):
    return float((p - s.mean(0)).abs().max())


@pytest.mark.parametrize("topology", LINKS)
def test_where_s_rests_every_p_comes_to_its_mean(topology, clients):
    method, s = method_of(clients, topology=topology), random_soft(1, 8)
    server = {"p": s, "s": s}
    for _ in range(400):
        server = spoken(method, server, range(8), s)
    assert left_over(server["p"], s) < 1e-6


def test_with_everybody_as_neighbour_it_is_there_after_one_round(clients):
    method, s = method_of(clients, topology="complete"), random_soft(1, N)
    assert left_over(spoken(method, {"p": s, "s": s}, range(N), s)["p"], s) < 1e-12


@pytest.mark.parametrize("strength", [0.1, 0.5])
def test_a_pull_of_constant_strength_never_comes_there(strength, clients):
    A, s = method_of(clients).mixing(8), random_soft(1, 8)
    p = s
    for _ in range(300):
        p = torch.tensordot(A, p, 1) + strength * (s - p)
    assert left_over(p, s) > 0.05


def test_parts_of_a_network_without_a_path_between_them_have_means_of_their_own(clients):
    @dataclasses.dataclass(frozen=True)
    class Parted(DDistill):
        def mixing(self, clients):
            return metropolis({(0, 1), (1, 2), (3, 4)})

    method, s = method_of(clients, Parted), random_soft(1, N)
    server = {"p": s, "s": s}
    for _ in range(100):
        server = spoken(method, server, range(N), s)
    assert left_over(server["p"][:3], s[:3]) < 1e-6
    assert left_over(server["p"][3:], s[3:]) < 1e-6
    assert left_over(server["p"], s) > 0.05


def test_before_round_1_p_is_what_the_initial_models_say(clients):
    world = World(plain_net, clients)
    fed = world.federation(DDistill)
    fed.begin((0, 1, 2))
    for k in range(N):
        same(fed.server["p"][k], soft(world.net(), clients.public.x))
        same(fed.server["s"][k], fed.server["p"][k])


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize(("topology", "edges"), [("ring", 10), ("line", 8), ("star", 8), ("complete", 20)])
def test_bytes_over_edges_are_counted_in_both_directions(topology, edges, clients):
    fed = World(plain_net, clients).run(DDistill, topology=topology, **STRONG)
    numbers = len(clients.public.y) * clients.classes
    assert fed.traffic.extra["neighbours"] == 3 * edges * numbers * 8
    assert (fed.traffic.down, fed.traffic.up) == (9 * numbers * 8, 9 * numbers * 8)  # what the server stands for
    assert fed.traffic.up_mean == 0
    assert fed.traffic.extra[PUBLIC_DATA] == 4 * clients.public.x.numel() * 8  # without labels


def test_devices_that_sit_out_keep_their_model_while_p_goes_on(clients):
    fed = World(norm_net, clients).run(DDistill, **STRONG)
    before, server = {i: copy.deepcopy(state_of(fed, i)) for i in range(N)}, copy.deepcopy(fed.server)
    fed.step((0, 1))
    check_kept(fed, before, (2, 3, NEVER))
    assert torch.equal(fed.server["s"][2:], server["s"][2:])
    assert differs(fed.server["p"][2], server["p"][2])
    check_no_alias(fed)


def test_a_newcomer_learns_from_the_mean_of_all(clients):
    world = World(plain_net, clients)
    fed = world.run(DDistill, **STRONG)
    mean = fed.server["p"].mean(0)
    same(fed.method.newcomer(fed.server).own, mean)
    guest = world.federation(lambda model, **_: dataclasses.replace(visited(fed.method, fed.server), model=model))
    guest.step((NEVER,))
    close(state_of(guest, NEVER), flat(trained(world, world.net(), NEVER, 1, mean, **STRONG)))


def test_refuses_what_it_cannot_use(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="ddistill compares probabilities of classes, and this task is binary"):
        DDistill(Model(lambda: torch.nn.Linear(6, 1), task=Binary()))
    with pytest.raises(Problem, match="topology must be one of ring, line, star, complete"):
        world.federation(DDistill, topology="grid")
    with pytest.raises(Problem, match="rho must be at least 0"):
        world.federation(DDistill, rho=-1.0)
    with pytest.raises(Problem, match="DDistill needs public samples, and there are none"):
        world.federation(DDistill, dataclasses.replace(clients, public=None))
