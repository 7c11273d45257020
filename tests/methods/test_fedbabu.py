"""FedBABU: a body trained under a fixed random head."""

from dataclasses import replace

import pytest
import torch
from parts import assemble, part_of, rest_of, train_part
from reference import (
    NEVER,
    ROUNDS,
    World,
    average,
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
    state_of,
)

from perfed.core.random import PERSONALISE
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedbabu import FedBABU
from perfed.methods.fedrep import FedRep

CASES = [(plain_net, "2."), (norm_net, "3.")]  # network and name of its head


def everything(name):
    return True


def reference(world, head):
    w = world.net()
    for round, cohort in enumerate(ROUNDS, 1):
        nets = [train_part(world, w, world.batches(i, round), rest_of(head)) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
    return assemble(w, world.net(), part_of(head))


def tuned(world, w, i, epochs, lr):
    batches = world.batches(i, len(ROUNDS), epochs, purpose=(PERSONALISE,))
    return train_part(world, w, batches, everything, lr=lr)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("build", "head"), CASES)
def test_equals_the_reference(build, head, momentum, clients):
    """Training of the body, then of the whole on each client's training samples; never chosen ones are tuned too."""
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedBABU, adapt_epochs=3, adapt_lr=0.02)
    w, found = reference(world, head), models(fed)
    same(fed.server, flat(w, rest_of(head)))
    for i in range(len(clients)):
        close(found["global"][i], flat(w))
        close(found["personal"][i], flat(tuned(world, w, i, 3, 0.02)))
    assert differs(found["personal"][NEVER], found["global"][NEVER])


def test_tuning_starts_from_the_initial_random_head(clients):
    """Not from zeros, and not from a decayed one."""
    world = World(plain_net, clients, weight_decay=0.5, momentum=0.9)
    found = models(world.run(FedBABU))
    head = flat(world.net(), part_of("2."))
    assert head.abs().min() > 1e-3
    for i in range(len(clients)):
        assert torch.equal(found["global"][i][6 * 8 + 8 :][: len(head)], head)
    barely = models(world.run(FedBABU, adapt_epochs=1, adapt_lr=1e-9))
    assert not differs(barely["personal"], found["global"])


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_no_tuning_is_fedrep_without_head_epochs(build, clients):
    world = World(build, clients, momentum=0.9)
    babu, rep = world.run(FedBABU, adapt_epochs=0), world.run(FedRep, head_epochs=0)
    same(babu.server, rep.server)
    same(personal(babu), personal(rep))
    assert differs(personal(babu), personal(world.run(FedAvg)))


def test_tuning_is_discarded(clients):
    """Evaluations between rounds leave no trace; nobody keeps anything."""
    world = World(norm_net, clients)
    quiet, watched = world.run(FedBABU), world.federation(FedBABU)
    for cohort in ROUNDS:
        watched.step(cohort)
        watched.evaluate()
    assert torch.equal(quiet.server, watched.server)
    assert state_of(watched, 0) == ()


def test_tuning_uses_training_samples_alone(clients):
    world = World(plain_net, clients)
    fed = world.run(FedBABU)
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    assert torch.equal(personal(fed), personal(world.run(FedBABU, clients=spoiled)))


@pytest.mark.parametrize(("build", "head"), CASES)
def test_only_the_body_travels(build, head, clients):
    world = World(build, clients)
    sent = len(flat(world.net(), rest_of(head)))
    assert per_client(world.run(FedBABU)) == (sent, sent)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedBABU))
