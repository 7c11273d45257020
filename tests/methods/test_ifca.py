"""IFCA: K models, each client trains the one that fits."""

from dataclasses import replace

import pytest
import torch
from reference import (
    SEED,
    World,
    average,
    check_no_alias,
    close,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    state_of,
)

from perfed.core.clients import Split
from perfed.methods.fedavg import FedAvg
from perfed.methods.ifca import IFCA

ROUNDS = ((0, 1, 3), (1, 2, 3), (0, 2, 4))


def choose(world, models, i, split="train"):
    losses = [float(world.risk(net, i, split).detach()) for net in models]
    return losses.index(min(losses))


def reference(world, K, rounds=ROUNDS):
    """(models, who chose what in each round)."""
    models, history = [world.net(SEED * K + k) for k in range(K)], []
    for round, cohort in enumerate(rounds, 1):
        chosen = {i: choose(world, models, i) for i in cohort}
        nets = {i: world.train(models[k], world.batches(i, round)) for i, k in chosen.items()}
        for k in set(chosen.values()):
            members = [i for i in cohort if chosen[i] == k]
            models[k] = average([nets[i] for i in members], [world.count(i) for i in members])
        history.append(chosen)
    return models, history


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, K, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(IFCA, ROUNDS, clusters=K)
    models, history = reference(world, K)
    for found, net in zip(fed.server["models"], models, strict=True):
        close(found, flat(net))
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(models[choose(world, models, i)]))
        assert state_of(fed, i) == ()
    last = history[-1]
    samples = [float(sum(world.count(i) for i in last if last[i] == k)) for k in range(K)]
    assert fed.method.notes(fed.server) == {"cluster_samples": samples}
    assert len({k for chosen in history for k in chosen.values()}) > 1  # the case is not FedAvg in disguise


def test_one_cluster_is_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    one, avg = world.run(IFCA, clusters=1), world.run(FedAvg)
    same(one.server["models"][0], avg.server)
    same(personal(one), personal(avg))
    assert per_client(one) == per_client(avg)


def test_initial_models_differ(clients):
    models = World(plain_net, clients).federation(IFCA, clusters=3).server["models"]
    for a in range(3):
        for b in range(a):
            assert (models[a] - models[b]).abs().max() > 0.1


def test_empty_cluster_keeps_its_model(clients):
    """Also when everyone chooses the same one."""
    world = World(norm_net, clients)
    fed = world.federation(IFCA, clusters=3)
    seen = []
    for cohort in ROUNDS:
        before = fed.server["models"].clone()
        fed.step(cohort)
        count = fed.server["samples"]
        seen += [bool(n) for n in count]
        for k in range(3):
            assert torch.equal(fed.server["models"][k], before[k]) == (not count[k])
        assert int(count.sum()) == sum(world.count(i) for i in cohort)
    assert not all(seen)
    assert any(seen)


def poisoned(world, clients, models, split):
    """Labels under which, on this split, the model chosen on training data is the worst for every client."""
    table, labels = clients.split(split), []
    for i in range(len(clients)):
        chosen = models[choose(world, models, i)].eval()
        labels.append(chosen(world.samples(i, split)[0]).argmin(1))
    return replace(clients, **{split: Split(table.x, torch.cat(labels), table.size)})


@pytest.mark.parametrize("split", ["test", "val"])
def test_chooses_on_training_data(split, clients):
    """Public code chooses by the labelled test data; here poisoned labels change a score and nothing else."""
    world = World(plain_net, clients)
    models, _ = reference(world, 2)
    bad = poisoned(world, clients, models, split)
    other = World(plain_net, bad)
    tempted = [choose(other, models, i, split) != choose(world, models, i) for i in range(len(clients))]
    assert sum(tempted) >= 3  # choosing on this split would give other models
    honest, spoiled = world.run(IFCA, ROUNDS), world.run(IFCA, ROUNDS, clients=bad)
    torch.testing.assert_close(spoiled.server, honest.server, rtol=0, atol=0)
    assert torch.equal(personal(spoiled), personal(honest))
    loss = lambda fed: fed.evaluate()["personal"][split]["loss"]
    assert (loss(spoiled) - loss(honest)).abs().max() > 1e-3


def test_chooses_again_every_round(clients):
    """The choice follows the data: with the models swapped, so is the choice."""
    fed = World(plain_net, clients).run(IFCA, ROUNDS)
    before = personal(fed)
    fed.server = {**fed.server, "models": fed.server["models"].flip(0)}
    assert torch.equal(personal(fed), before)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_K_models_down_one_up(K, clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(IFCA, clusters=K)) == (K * size, size)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(IFCA))
