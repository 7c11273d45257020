"""FedBN: private normalisation layers."""

import pytest
from parts import assemble, part_of, rest_of
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
from torch import nn

from perfed.core.errors import Problem
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedbn import FedBN
from perfed.methods.fedper import FedPer


def group_net():
    """Normalisation without running statistics."""
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def odd_net():
    """A linear layer that is called 'bn' and a normalisation that is not."""
    net = nn.Sequential()
    net.add_module("bn", nn.Linear(6, 8))
    net.add_module("scale", nn.BatchNorm1d(8))
    net.add_module("relu", nn.ReLU())
    net.add_module("out", nn.Linear(8, 3))
    return net


def statistics(name):
    return "running" in name


CASES = [  # network, what stays at the client, and the names that this means
    (norm_net, "norm", part_of("1.")),
    (group_net, "norm", part_of("1.", "3.")),
    (odd_net, "norm", part_of("scale.")),
    (norm_net, "*.running_*", statistics),  # SiloBN
]


def reference(world, kept):
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = [world.train(assemble(shared, own[i], kept), world.batches(i, round)) for i in cohort]
        shared = average(nets, [world.count(i) for i in cohort])
        for i, net in zip(cohort, nets, strict=True):
            own[i] = net
    return shared, own


@pytest.mark.parametrize(("build", "part", "kept"), CASES)
def test_equals_the_reference(build, part, kept, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedBN, personal=part)
    shared, own = reference(world, kept)
    same(fed.server, flat(shared, lambda name: not kept(name)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], kept))
        close(theta, flat(assemble(shared, own[i], kept)))


def test_statistics_stay_with_the_client(clients):
    """Parameters and running statistics: 4 numbers of 8 channels are private, none of them travels."""
    world = World(norm_net, clients)
    fed, size = world.run(FedBN), len(flat(world.net()))
    assert per_client(fed) == (size - 32, size - 32)
    assert len(state_of(fed, 0)) == 32
    assert differs(state_of(fed, 0)[16:], state_of(fed, 1)[16:])  # each has its own


def test_is_fedper_with_the_norm_part(clients):
    world = World(norm_net, clients)
    same(personal(world.run(FedBN)), personal(world.run(FedPer, personal="norm")))
    assert differs(personal(world.run(FedBN)), personal(world.run(FedAvg)))


def test_goes_by_type_not_by_name(clients):
    """The linear layer called 'bn' is shared."""
    fed = World(odd_net, clients).run(FedBN)
    shared = {name.partition(".")[0] for name in fed.method.model.shapes} - {"scale"}
    assert shared == {"bn", "out"}
    assert len(fed.server) == 6 * 8 + 8 + 8 * 3 + 3


def test_refuses_a_model_without_normalisation(clients):
    with pytest.raises(Problem, match="normalisation layers"):
        World(plain_net, clients).federation(FedBN)


@pytest.mark.parametrize("part", ["head", "body", "none", "*"])
def test_refuses_other_parts(part, clients):
    with pytest.raises(Problem, match="fedper keeps any part"):
        World(norm_net, clients).federation(FedBN, personal=part)


def test_never_chosen_client_has_the_initial_statistics_and_the_latest_rest(clients):
    world = World(norm_net, clients)
    fed = world.run(FedBN)
    same(state_of(fed, NEVER), flat(world.net(), part_of("1.")))
    net = personal(fed)[NEVER]
    same(net[: 6 * 8 + 8], fed.server[: 6 * 8 + 8])
    tuned = personal(world.run(FedBN, fine_tune=1))[NEVER]
    assert differs(tuned[-16 - 1 : -1], net[-16 - 1 : -1])  # measured on its own samples


def test_non_participants_keep_their_layers(clients):
    fed = World(norm_net, clients).run(FedBN)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedBN))


def test_nothing_of_the_norm_layers_is_in_the_server(clients):
    """Spoiling one client's layers reaches the others only through what that client then trains."""
    world = World(norm_net, clients)
    fed, spoiled = world.run(FedBN), world.run(FedBN)
    spoiled.engine.states[0][0] = spoiled.engine.states[0][0] + 1.0
    fed.step((1, 2))
    spoiled.step((1, 2))
    same(spoiled.server, fed.server)
    same(personal(spoiled)[1:], personal(fed)[1:])


def test_rest_of_is_what_is_shared(clients):
    world = World(group_net, clients)
    sent = len(flat(world.net(), rest_of("1.", "3.")))
    assert per_client(world.run(FedBN)) == (sent, sent)
