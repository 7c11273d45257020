"""FedAvg, and its fine-tuned evaluation."""

from dataclasses import replace

import pytest
import torch
from reference import (
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    flat,
    models,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    state_of,
)

from perfed.core.clients import Split
from perfed.core.method import FINE_TUNING
from perfed.core.random import PERSONALISE
from perfed.methods.fedavg import FedAvg


def reference(world, rounds=ROUNDS):
    w = world.net()
    for round, cohort in enumerate(rounds, 1):
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
    return w


@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    """With BatchNorm: the running statistics are averaged as the parameters are."""
    world = World(build, clients, **momentum)
    fed, w = world.run(FedAvg), reference(world)
    close(fed.server, flat(w))
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(w))  # evaluated as the global model, by those who never took part too
        assert state_of(fed, i) == ()


def test_statistics_move(clients):
    """So that averaged buffers above mean something."""
    world = World(norm_net, clients)
    before, after = flat(world.net()), world.run(FedAvg).server
    P = sum(p.numel() for p in world.net().parameters())
    assert (after[P : len(before)] - before[P:]).abs().min() > 1e-4


def test_weights_are_sample_counts_of_the_participants(clients):
    """One sample-weighted mean worked out by hand, from the clients' own models."""
    world = World(plain_net, clients)
    alone = {i: world.run(FedAvg, [(i,)]).server for i in (0, 2, 3)}
    total = 23 + 41 + 3  # of the tests' clients 0, 2 and 3
    same(world.run(FedAvg, [(0, 2, 3)]).server, (23 * alone[0] + 41 * alone[2] + 3 * alone[3]) / total)


def test_all_data_at_one_client_is_centralised_sgd(clients):
    n = len(clients.train.y)
    merge = lambda s: Split(s.x, s.y, (len(s.y),))
    one = replace(clients, names=("all",), **{name: merge(clients.split(name)) for name in ("train", "val", "test")})
    world = World(plain_net, one)
    assert world.count(0) == n
    central = world.train(world.net(), [b for round in (1, 2) for b in world.batches(0, round)])
    close(world.run(FedAvg, [(0,), (0,)], cohort=1).server, flat(central))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_fine_tuning(build, clients):
    world = World(build, clients, momentum=0.9)
    fed, w = world.run(FedAvg, fine_tune=3), reference(world)
    found = models(fed)
    for i in range(len(clients)):
        tuned = world.train(w, world.batches(i, len(ROUNDS), epochs=3, purpose=(PERSONALISE,), stream=FINE_TUNING))
        close(found["before"][i], flat(w))
        close(found["personal"][i], flat(tuned))


def test_fine_tuning_is_discarded(clients):
    world = World(plain_net, clients)
    fed = world.federation(FedAvg, fine_tune=2)
    for cohort in ROUNDS:
        fed.step(cohort)
        fed.evaluate()
    same(fed.server, world.run(FedAvg).server)


@pytest.mark.parametrize("split", ["test", "val"])
def test_fine_tuning_sees_training_data_only(split, clients):
    world = World(norm_net, clients)
    table = clients.split(split)
    spoiled = replace(clients, **{split: replace(table, x=-3 * table.x, y=(table.y + 1) % 3)})
    honest, other = (world.run(FedAvg, clients=c, fine_tune=2) for c in (clients, spoiled))
    torch.testing.assert_close(models(honest), models(other), rtol=0, atol=0)
    loss = lambda fed: fed.evaluate()["personal"][split]["loss"]
    assert not loss(honest).equal(loss(other))


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedAvg, fine_tune=1))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_one_model_each_way(build, clients):
    world = World(build, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(FedAvg)) == (size, size)
