"""FedAlt: a personal part and a shared one, trained in turn."""

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

from perfed.core.errors import Problem
from perfed.methods.fedalt import FedAlt
from perfed.methods.fedrep import HEAD, FedRep
from perfed.methods.fedsim import FedSim

# network, the personal part, and the names that this means
CASES = [
    (plain_net, "head", ("2.",)),
    (plain_net, "0", ("0.",)),  # input layer
    (plain_net, "2.bias", ("2.bias",)),
    (norm_net, "norm", ("1.",)),  # adapters, with their running statistics
]


def reference(world, names, tau, rate):
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = []
        for i in cohort:
            net = assemble(shared, own[i], part_of(*names))
            batches = world.batches(i, round, tau, stream=HEAD)
            net = train_part(world, net, batches, part_of(*names), lr=rate * world.settings["lr"])
            net = train_part(world, net, world.batches(i, round), rest_of(*names))
            nets.append(net)
            own[i] = net
        shared = average(nets, [world.count(i) for i in cohort])
    return shared, own


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize(("build", "part", "names"), CASES)
def test_equals_the_reference(build, part, names, rate, clients):
    """Two optimisers with their own rates; neither knows the other's parameters."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedAlt, personal=part, personal_epochs=3, personal_rate=rate)
    shared, own = reference(world, names, 3, rate)
    same(fed.server, flat(shared, rest_of(*names)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], part_of(*names)))
        close(theta, flat(assemble(shared, own[i], part_of(*names))))
    sent = len(flat(world.net(), rest_of(*names)))
    assert per_client(fed) == (sent, sent)


@pytest.mark.parametrize("build", [plain_net, norm_net])
@pytest.mark.parametrize("epochs", [1, 2])
def test_with_the_head_is_fedrep(build, epochs, clients):
    """The paper's FedRep has tau_u = 1; the library's takes as many epochs for the body."""
    world = World(build, clients, momentum=0.9, epochs=epochs)
    alt, rep = world.run(FedAlt, personal="head", personal_epochs=4), world.run(FedRep, head_epochs=4)
    same(alt.server, rep.server)
    same(personal(alt), personal(rep))
    assert differs(personal(alt), personal(world.run(FedSim, personal="head")))
    assert differs(personal(alt), personal(world.run(FedAlt, personal="head", personal_epochs=1)))


def test_personal_rate_leaves_the_shared_part_alone(clients):
    """Where v takes no epochs its rate has nothing to act on."""
    world = World(plain_net, clients)
    a, b = (world.run(FedAlt, personal_epochs=0, personal_rate=rate) for rate in (1.0, 0.2))
    same(a.server, b.server)
    assert differs(*(state_of(world.run(FedAlt, personal_epochs=1, personal_rate=rate), 0) for rate in (1.0, 0.2)))


def test_non_participants_keep_their_part(clients):
    fed = World(plain_net, clients).run(FedAlt)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])


def test_refuses_a_part_that_is_not_there(clients):
    with pytest.raises(Problem, match="no parameter matches 'tail'"):
        World(plain_net, clients).federation(FedAlt, personal="tail")


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedAlt))
