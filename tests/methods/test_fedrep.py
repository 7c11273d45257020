"""FedRep: a shared body, a private head, trained in turn."""

import pytest
from parts import assemble, part_of, rest_of, train_part
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
)

from perfed.core.random import PERSONALISE
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedper import FedPer
from perfed.methods.fedrep import HEAD, FedRep

CASES = [(plain_net, "2."), (norm_net, "3.")]  # network and name of its head


def reference(world, head, tau, order="head first"):
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = []
        for i in cohort:
            net = assemble(shared, own[i], part_of(head))
            phases = [
                (world.batches(i, round, tau, stream=HEAD), part_of(head)),
                (world.batches(i, round), rest_of(head)),
            ]
            for batches, part in phases if order == "head first" else phases[::-1]:
                net = train_part(world, net, batches, part)
            nets.append(net)
            own[i] = net
        shared = average(nets, [world.count(i) for i in cohort])
    return shared, own


@pytest.mark.parametrize(("build", "head"), CASES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_the_reference(build, head, momentum, clients):
    """The reference's optimisers do not know the frozen part, so decay or momentum there would show."""
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedRep, head_epochs=3)
    shared, own = reference(world, head, 3)
    same(fed.server, flat(shared, rest_of(head)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], part_of(head)))
        close(theta, flat(assemble(shared, own[i], part_of(head))))  # the LATEST body, for everyone


@pytest.mark.parametrize(("build", "head"), CASES)
def test_last_epochs_train_the_head_for_an_evaluation_alone(build, head, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedRep, head_epochs=1, final_head_epochs=3)
    shared, own = reference(world, head, 1)
    for _ in range(2):  # an evaluation leaves nothing behind
        for i, theta in enumerate(personal(fed)):
            batches = world.batches(i, len(ROUNDS), epochs=3, purpose=(PERSONALISE,), stream=HEAD)
            net = assemble(shared, own[i], part_of(head))
            close(theta, flat(train_part(world, net, batches, part_of(head))))
            same(state_of(fed, i), flat(own[i], part_of(head)))
            assert differs(theta, fed.method.join(state_of(fed, i), fed.server))


def test_the_head_comes_first(clients):
    world = World(plain_net, clients)
    wrong = flat(reference(world, "2.", 3, "body first")[0], rest_of("2."))
    assert differs(world.run(FedRep, head_epochs=3).server, wrong)


def test_frozen_parts_do_not_decay(clients):
    """Heads of a client are moved by tau_h alone: with 0 they are the initial ones, bit for bit, despite the decay."""
    fed = World(norm_net, clients, momentum=0.9, weight_decay=0.5).run(FedRep, head_epochs=0)
    check_kept(fed, [fed.method.init_client()] * len(clients), range(len(clients)))


def test_statistics_move_with_the_body_only(clients):
    """Ten times the head's epochs leave the body's first statistics of a round as they are."""
    world = World(norm_net, clients, lr=1e-12, weight_decay=0)  # parameters as good as fixed
    few, many = (world.run(FedRep, ROUNDS[:1], head_epochs=tau).server for tau in (0, 10))
    same(few, many)
    assert differs(few, world.federation(FedRep).server)


def test_no_head_epochs_train_the_body_of_fedavg_under_a_frozen_head(clients):
    """One round of it, by hand; with head epochs the body sees another head."""
    world = World(plain_net, clients)
    fed = world.run(FedRep, ROUNDS[:1], head_epochs=0)
    nets = [train_part(world, world.net(), world.batches(i, 1), rest_of("2.")) for i in ROUNDS[0]]
    same(fed.server, flat(average(nets, [world.count(i) for i in ROUNDS[0]]), rest_of("2.")))
    assert differs(fed.server, world.run(FedRep, ROUNDS[:1]).server)


def test_is_neither_fedper_nor_fedavg(clients):
    world = World(plain_net, clients)
    found = personal(world.run(FedRep))
    assert differs(found, personal(world.run(FedPer)))
    assert differs(found, personal(world.run(FedAvg)))


@pytest.mark.parametrize(("build", "head"), CASES)
def test_only_the_body_travels(build, head, clients):
    world = World(build, clients)
    sent = len(flat(world.net(), rest_of(head)))
    assert per_client(world.run(FedRep)) == (sent, sent)


def test_non_participants_keep_their_head(clients):
    fed = World(plain_net, clients).run(FedRep)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    same(before[NEVER], fed.method.init_client())
    assert differs(state_of(fed, 0), before[0])


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedRep))
