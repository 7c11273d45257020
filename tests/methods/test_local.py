"""Local: every client alone."""

import pytest
from reference import (
    NEVER,
    ROUNDS,
    World,
    check_kept,
    check_no_alias,
    close,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    state_of,
)

from perfed.methods.local import Local


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_centralised_sgd_of_each_client(build, clients):
    world = World(build, clients, momentum=0.9, nesterov=True)
    nets = [world.net() for _ in range(len(clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        for i in cohort:
            nets[i] = world.train(nets[i], world.batches(i, round))

    fed = world.run(Local)
    assert fed.server == ()
    assert set(fed.engine.states[0]) == {0, 1, 2, 3}
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i), flat(nets[i]))


def test_one_optimiser_over_all_rounds_is_the_same_without_momentum(clients):
    """Rounds leave no trace: three rounds are one run of plain SGD over the batches of all three."""
    world = World(plain_net, clients)
    alone = world.train(world.net(), [b for round in (1, 2, 3) for b in world.batches(2, round)])
    close(state_of(world.run(Local, [(2,)] * 3), 2), flat(alone))


def test_others_do_not_matter(clients):
    world = World(plain_net, clients)
    beside, alone = world.run(Local), world.run(Local, [(3,)] * 3)
    close(state_of(beside, 3), state_of(alone, 3))


def test_only_participants_train(clients):
    fed = World(plain_net, clients).run(Local)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert not state_of(fed, 0).equal(before[0])


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(Local))


def test_nothing_is_sent(clients):
    assert per_client(World(norm_net, clients).run(Local)) == (0, 0)
