"""HierFAVG: clients, edges and a cloud."""

import copy

import pytest
import torch
from reference import (
    ROUNDS,
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
)

from perfed.core.errors import Problem
from perfed.methods.fedavg import FedAvg
from perfed.methods.hierfavg import HierFAVG

TWO = {"edges": 2, "k1": 3, "k2": 3}
EDGE = (0, 0, 0, 1, 1)  # i * 2 // 5
ALL = ((0, 1, 2, 3, 4),) * 2
WHOLE = {"batch_size": 1000, "epochs": 1}  # every step takes all samples, so that orders are no matter


def reference(world, k1, k2, edges=2, rounds=ROUNDS, of=EDGE):
    """The cloud's model, and those of the edges that took part in the last round."""
    cloud, last = world.net(), {}
    for round, cohort in enumerate(rounds, 1):
        last = {j: copy.deepcopy(cloud) for j in sorted({of[i] for i in cohort})}
        for exchange in range(k2):
            for j in last:
                members = [i for i in cohort if of[i] == j]
                steps = {i: k1 or len(world.batches(i, 1)) for i in members}
                nets = [world.train(last[j], world.steps(i, round, steps[i], exchange)) for i in members]
                last[j] = average(nets, [world.count(i) for i in members])
        everybody = [sum(world.count(i) for i in range(len(of)) if of[i] == j) for j in last]
        cloud = average(list(last.values()), everybody)
    return cloud, last


@pytest.mark.parametrize("steps", [{"k1": 3, "k2": 3}, {"k1": 0, "k2": 2}, {"k1": 1, "k2": 1}], ids=str)
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, steps, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(HierFAVG, edges=2, **steps)
    cloud, edges = reference(world, **steps)
    close(fed.server["x"], flat(cloud))
    for j, net in edges.items():
        close(fed.server["w"][j], flat(net))
    for theta in personal(fed):
        close(theta, flat(cloud))
    assert differs(*fed.server["w"])


@pytest.mark.parametrize("edges", [1, 2, 5])
def test_one_exchange_is_fedavg(edges, clients):
    world = World(norm_net, clients, momentum=0.9)
    same(world.run(HierFAVG, ALL, edges=edges, k2=1).server["x"], world.run(FedAvg, ALL).server)


def test_one_edge_is_fedavg_with_as_many_rounds_as_exchanges(clients):
    world = World(norm_net, clients, momentum=0.9, **WHOLE)
    one, avg = world.run(HierFAVG, ALL[:1] * 2, edges=1, k2=3), world.run(FedAvg, ALL[:1] * 6)
    same(one.server["x"], avg.server)


def test_one_client_at_each_edge_is_fedavg_with_all_steps_at_once(clients):
    """Also where some take part: each edge has the weight of its client."""
    world = World(norm_net, clients, **WHOLE)
    alone = world.run(HierFAVG, edges=5, k1=2, k2=3)
    same(alone.server["x"], world.run(FedAvg, batch_size=1000, epochs=6).server)


def test_the_cloud_weights_an_edge_by_all_its_samples(clients):
    """Though some of its clients took part; public code draws clients by size, too."""
    world, cohort = World(plain_net, clients), (1, 3, 4)  # 7 of 71 samples at the first edge, 15 of 15 at the second
    fed = world.run(HierFAVG, (cohort,), **TWO)
    shares = torch.tensor([71.0, 15.0], dtype=torch.float64) / 86
    same(fed.server["n"], 86 * shares)
    same(fed.server["x"], shares @ fed.server["w"])
    assert differs(fed.server["x"], torch.tensor([7.0, 15.0], dtype=torch.float64) / 22 @ fed.server["w"])


def test_an_edge_without_participants_has_no_weight(clients):
    world = World(plain_net, clients)
    fed = world.run(HierFAVG, ((0, 2),), **TWO)
    same(fed.server["x"], fed.server["w"][0])
    assert fed.server["here"].tolist() == [True, False]
    fed.step((3, 4))
    same(fed.server["x"], fed.server["w"][1])


def test_every_round_starts_from_the_cloud_and_every_exchange_from_the_edge(clients):
    world = World(plain_net, clients)
    fed = world.run(HierFAVG, **TWO)
    ids = torch.tensor([0, 3])
    rows = lambda exchange: fed.method.at(exchange=exchange).broadcast(fed.server, ids).own["w"]
    assert torch.equal(rows(0), fed.server["x"].expand(2, -1))
    assert torch.equal(rows(1), fed.server["w"])
    assert differs(*rows(1))


def test_edges_are_blocks_of_clients(clients):
    assert World(plain_net, clients).federation(HierFAVG, edges=2).server["edge"].tolist() == list(EDGE)


def test_bytes_of_edges_and_of_the_cloud_are_apart(clients):
    world = World(norm_net, clients)
    size = 8 * len(flat(world.net()))
    fed = world.run(HierFAVG, (*ROUNDS, (0, 1)), **TWO)
    messages = 3 * (3 + 3 + 3 + 2)
    assert (fed.traffic.up, fed.traffic.down) == (messages * size, messages * (size + 8))  # and the number of the edge
    assert fed.traffic.extra == {"cloud_down": (2 + 2 + 2 + 1) * size, "cloud_up": (2 + 2 + 2 + 1) * size}


def test_a_newcomer_gets_the_clouds_model(clients):
    fed = World(plain_net, clients).run(HierFAVG, **TWO)
    down = fed.method.newcomer(fed.server)
    assert torch.equal(down.shared, fed.server["x"])
    assert torch.equal(down.own["w"], fed.server["x"])
    assert torch.equal(fed.method.global_model(fed.server), fed.server["x"])


def test_more_edges_than_clients_are_refused(clients):
    with pytest.raises(Problem, match="hierfavg cannot make 6 edges of 5 clients"):
        World(plain_net, clients).federation(HierFAVG, edges=6)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(HierFAVG, **TWO))
