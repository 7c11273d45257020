"""HypCluster: IFCA's rounds, and first models that are far from each other."""

import dataclasses

import pytest
import torch
from reference import (
    ORDER,
    World,
    average,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    personal,
    plain_net,
    same,
    state_of,
)

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import SELECT, choose, derive
from perfed.methods.fedavg import FedAvg
from perfed.methods.hypcluster import HypCluster
from perfed.methods.ifca import IFCA

ROUNDS = ((0, 1, 3), (1, 2, 3), (0, 2, 4))
ALL = (0, 1, 2, 3, 4)


def risk(world, net, i):
    return float(world.risk(net, i).detach())


def start(world, K, cohort):
    """Train everybody from one model; draw one of these models, then add that of the client that is served worst."""
    trained = {i: world.train(world.net(), world.batches(i, 1)) for i in cohort}
    first = cohort[choose(derive(ORDER, SELECT), 1, len(cohort))[0]]
    chosen = [first]
    while len(chosen) < K:
        best = {i: min(risk(world, trained[c], i) for c in chosen) for i in cohort}
        chosen.append(max((i for i in cohort if i not in chosen), key=best.__getitem__))
    return [trained[c] for c in chosen], chosen


def reference(world, K, rounds=ROUNDS):
    models, _ = start(world, K, rounds[0])
    for round, cohort in enumerate(rounds[1:], 2):
        k = {i: min(range(K), key=lambda c, i=i: risk(world, models[c], i)) for i in cohort}
        nets = {i: world.train(models[k[i]], world.batches(i, round)) for i in cohort}
        for c in set(k.values()):
            members = [i for i in cohort if k[i] == c]
            models[c] = average([nets[i] for i in members], [world.count(i) for i in members])
    return models


@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, K, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(HypCluster, ROUNDS, clusters=K)
    models = reference(world, K)
    for theta, net in zip(fed.server["models"], models, strict=True):
        close(theta, flat(net))
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(min(models, key=lambda net, i=i: risk(world, net, i))))
        assert state_of(fed, i) == ()


def test_the_first_models_are_those_of_clients_that_are_served_worst(clients):
    """Nobody's is taken twice, though its own model may serve a client worse than any serves the others."""
    world = World(plain_net, clients)
    fed = world.run(HypCluster, (ALL,), clusters=4, cohort=5)
    models, chosen = start(world, 4, ALL)
    assert len(set(chosen)) == 4
    for theta, net in zip(fed.server["models"], models, strict=True):
        close(theta, flat(net))
    best = {i: min(risk(world, net, i) for net in models[:3]) for i in ALL}
    left = [i for i in ALL if i not in chosen]
    same(fed.server["loss"][left], torch.tensor([best[i] for i in left], dtype=torch.float64))
    assert max(best, key=best.__getitem__) in chosen[:3]


@pytest.mark.parametrize("K", [1, 3])
def test_random_models_are_ifca(K, clients):
    world = World(norm_net, clients, momentum=0.9)
    mine, theirs = (world.run(kind, ROUNDS, clusters=K, **more) for kind, more in (
        (HypCluster, {"centres": "random"}), (IFCA, {}),
    ))  # fmt: skip
    same(mine.server, theirs.server)
    same(personal(mine), personal(theirs))
    assert (mine.traffic.down, mine.traffic.up) == (theirs.traffic.down, theirs.traffic.up)


def test_one_cluster_is_fedavg_from_the_model_of_a_client(clients):
    world = World(plain_net, clients, momentum=0.9)
    fed = world.run(HypCluster, ROUNDS, clusters=1)
    models, _ = start(world, 1, ROUNDS[0])
    avg = world.federation(FedAvg)
    avg.server = torch.zeros_like(avg.server)
    avg.server[: len(flat(models[0]))] = flat(models[0])
    avg.round = 1
    for cohort in ROUNDS[1:]:
        avg.step(cohort)
    same(fed.server["models"][0], avg.server)


def test_two_groups_begin_with_a_model_each(clients):
    """Clients 0 and 1 call class y what 2 to 4 call y + 1: whoever is drawn, the furthest is of the other group."""
    table = clients.train
    groups = torch.tensor([0, 0, 1, 1, 1]).repeat_interleave(torch.tensor(table.size))
    x = torch.eye(3, 6, dtype=torch.float64)[table.y] * 3 + 0.1 * table.x
    apart = dataclasses.replace(clients, train=dataclasses.replace(table, x=x, y=(table.y + groups) % 3))
    world = World(plain_net, apart, epochs=20, lr=0.2)
    _, (first, second) = start(world, 2, ALL)
    assert (first < 2) != (second < 2)
    fed = world.run(HypCluster, (ALL, ALL), clusters=2, cohort=5)
    k = [int(torch.equal(theta, fed.server["models"][1])) for theta in personal(fed)]
    assert k in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])


def test_an_abandoned_start_is_done_again(clients):
    fed = World(plain_net, clients).federation(HypCluster, clusters=2)
    before = fed.server
    fed.quorum = 1.0
    fed.begin((0, 1, 3))
    fed._counts = False
    fed.end()
    assert fed.server is before
    assert fed.method.at(round=2).phase(fed.server).name == "start"
    fed.step((1, 2, 3))
    assert fed.method.phase(fed.server).name == ""
    assert differs(*fed.server["models"])


def test_an_empty_cluster_stays(clients):
    fed = World(plain_net, clients).run(HypCluster, ROUNDS[:1], clusters=3)
    empty = 0
    for cohort in ROUNDS[1:] * 2:
        before = fed.server["models"].clone()
        fed.step(cohort)
        for k in range(3):
            assert torch.equal(before[k], fed.server["models"][k]) == (not fed.server["samples"][k])
            empty += not fed.server["samples"][k]
    assert empty


def test_bytes_of_the_start_and_of_rounds(clients):
    """A model down and up, then a model down and a loss up for every further one; then K models down and one up."""
    world = World(norm_net, clients)
    size, K = len(flat(world.net())), 3
    fed = world.run(HypCluster, ROUNDS[:1], clusters=K)
    assert (fed.traffic.down, fed.traffic.up) == (3 * K * size * 8, 3 * (size + K - 1) * 8)
    assert fed.traffic.up_own == fed.traffic.up  # looked at client by client
    fed.step(ROUNDS[1])
    assert (fed.traffic.down, fed.traffic.up) == (6 * K * size * 8, 3 * (2 * size + K - 1) * 8)


def test_a_newcomer_chooses_among_all_models(clients):
    fed = World(plain_net, clients).run(HypCluster, ROUNDS)
    assert torch.equal(fed.method.newcomer(fed.server).shared, fed.server["models"])


def test_bad_settings_are_refused():
    for wrong in ({"clusters": 0}, {"centres": "nearest"}):
        with pytest.raises(Problem, match=rf"hypcluster\.{next(iter(wrong))} must be"):
            HypCluster(Model(plain_net), **wrong)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(HypCluster, ROUNDS))
