"""FedPer: a shared body, a private head."""

import copy

import pytest
import torch
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
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedper import FedPer

# network, what stays at the client, and the names that this means
CASES = [
    (plain_net, "head", ("2.",)),
    (plain_net, "body", ("0.",)),
    (plain_net, "2.bias", ("2.bias",)),
    (norm_net, "head", ("3.",)),
    (norm_net, "norm", ("1.",)),  # with its running statistics
]


def assemble(shared, own, kept):
    net = copy.deepcopy(shared)
    net.load_state_dict({name: (own if kept(name) else shared).state_dict()[name] for name in net.state_dict()})
    return net


def reference(world, kept):
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = [world.train(assemble(shared, own[i], kept), world.batches(i, round)) for i in cohort]
        shared = average(nets, [world.count(i) for i in cohort])  # its private entries are never looked at
        for i, net in zip(cohort, nets, strict=True):
            own[i] = net
    return shared, own


@pytest.mark.parametrize(("build", "part", "names"), CASES)
def test_equals_the_reference(build, part, names, clients):
    world = World(build, clients, momentum=0.9)
    kept = lambda name: name.startswith(names)
    fed = world.run(FedPer, personal=part)
    shared, own = reference(world, kept)
    same(fed.server, flat(shared, lambda name: not kept(name)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], kept))
        close(theta, flat(assemble(shared, own[i], kept)))  # the LATEST shared part, for everyone


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_nothing_personal_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    per, avg = world.run(FedPer, personal="none"), world.run(FedAvg)
    same(personal(per), personal(avg))
    assert per_client(per) == per_client(avg)
    assert differs(personal(world.run(FedPer)), personal(avg))


@pytest.mark.parametrize(("build", "part", "names"), CASES)
def test_only_the_shared_part_travels(build, part, names, clients):
    """Exactly its size: not one number of the private part goes up. With BatchNorm, the body's statistics do."""
    world = World(build, clients)
    fed = world.run(FedPer, personal=part)
    sent = len(flat(world.net(), lambda name: not name.startswith(names)))
    assert per_client(fed) == (sent, sent)
    if build is norm_net and part == "head":
        parameters = sum(p.numel() for name, p in world.net().named_parameters() if not name.startswith(names))
        assert sent == parameters + 16  # running mean and variance of 8 channels
        before = flat(world.net(), lambda name: "running" in name)
        assert (fed.server[parameters:] - before).abs().min() > 1e-4  # and they move


def test_head_of_one_client_is_unknown_to_the_others(clients):
    """A client's head has no way into what the others receive but through the body it trained."""
    world = World(plain_net, clients)
    fed, spoiled = world.run(FedPer), world.run(FedPer)
    spoiled.engine.states[0][0] = spoiled.engine.states[0][0] + 1.0
    fed.step((1, 2))
    spoiled.step((1, 2))
    same(spoiled.server, fed.server)
    same(personal(spoiled)[1:], personal(fed)[1:])
    assert differs(personal(spoiled)[0], personal(fed)[0])


def test_never_chosen_client_has_the_latest_body_and_the_initial_head(clients):
    world = World(plain_net, clients)
    fed = world.run(FedPer)
    theta, body = personal(fed)[NEVER], 6 * 8 + 8
    same(theta[:body], fed.server)
    close(theta[body:], flat(world.net(), lambda name: name.startswith("2.")))


def test_non_participants_keep_their_head(clients):
    fed = World(plain_net, clients).run(FedPer)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert not torch.equal(state_of(fed, 0), before[0])


def test_refuses_a_part_that_is_not_there(clients):
    with pytest.raises(Problem, match="no parameter matches 'tail'"):
        World(plain_net, clients).federation(FedPer, personal="tail")


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedPer))
