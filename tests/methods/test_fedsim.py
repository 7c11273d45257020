"""FedSim: a personal part and a shared one, trained together."""

import copy

import pytest
import torch
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
from perfed.methods.fedper import FedPer
from perfed.methods.fedsim import FedSim

# network, the personal part, and the names that this means
CASES = [
    (plain_net, "head", ("2.",)),
    (plain_net, "0", ("0.",)),  # input layer
    (norm_net, "norm", ("1.",)),  # with its running statistics
]


def train(world, net, batches, names, rate):
    """One optimiser, two parameter groups."""
    net, s = copy.deepcopy(net).train(), world.settings
    own = [p for name, p in net.named_parameters() if name.startswith(names)]
    rest = [p for name, p in net.named_parameters() if not name.startswith(names)]
    groups = [{"params": rest}, {"params": own, "lr": rate * s["lr"]}]
    optimiser = torch.optim.SGD(groups, lr=s["lr"], momentum=s["momentum"], weight_decay=s["weight_decay"])
    for x, y in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


def reference(world, names, rate):
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        start = [assemble(shared, own[i], part_of(*names)) for i in cohort]
        nets = [train(world, net, world.batches(i, round), names, rate) for i, net in zip(cohort, start, strict=True)]
        shared = average(nets, [world.count(i) for i in cohort])
        for i, net in zip(cohort, nets, strict=True):
            own[i] = net
    return shared, own


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize(("build", "part", "names"), CASES)
def test_equals_the_reference(build, part, names, rate, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedSim, personal=part, personal_rate=rate)
    shared, own = reference(world, names, rate)
    same(fed.server, flat(shared, rest_of(*names)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], part_of(*names)))
        close(theta, flat(assemble(shared, own[i], part_of(*names))))
    sent = len(flat(world.net(), rest_of(*names)))
    assert per_client(fed) == (sent, sent)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_with_one_rate_is_fedper(build, clients):
    world = World(build, clients, momentum=0.9)
    sim, per = world.run(FedSim, personal="head"), world.run(FedPer)
    same(sim.server, per.server)
    same(personal(sim), personal(per))
    assert differs(personal(sim), personal(world.run(FedSim, personal="head", personal_rate=0.5)))


def test_nothing_personal_is_fedavg_at_any_rate(clients):
    world = World(norm_net, clients, momentum=0.9)
    sim = world.run(FedSim, personal="none", personal_rate=0.2)
    same(personal(sim), personal(world.run(FedAvg)))


def test_rate_spares_statistics(clients):
    """Statistics are measured, not learned: a slow personal part has those of its batches all the same."""
    world = World(norm_net, clients, lr=1e-12, weight_decay=0)  # parameters as good as fixed
    slow, fast = (
        state_of(world.run(FedSim, ROUNDS[:1], personal="norm", personal_rate=rate), 0) for rate in (0.01, 5.0)
    )
    same(slow, fast)
    assert differs(slow, world.federation(FedSim, personal="norm").method.init_client())


def test_rate_holds_for_adam_too(clients):
    """Adam's first step is lr for every entry, whatever its gradient: personal ones move rate times as far."""
    world = World(plain_net, clients, weight_decay=0, epochs=1, batch_size=50)  # one full-batch step
    fed = world.run(FedSim, [(0,)], optimizer="adam", personal_rate=0.2)
    start = world.federation(FedSim)
    body = (fed.server - start.server).abs().max()
    head = (state_of(fed, 0) - start.method.init_client()).abs().max()
    torch.testing.assert_close(torch.stack([body, head]), torch.tensor([0.05, 0.01]).double(), rtol=1e-3, atol=0)


def test_non_participants_keep_their_part(clients):
    fed = World(plain_net, clients).run(FedSim)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])


def test_refuses_a_part_that_is_not_there(clients):
    with pytest.raises(Problem, match="no parameter matches 'tail'"):
        World(plain_net, clients).federation(FedSim, personal="tail")


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedSim, personal="norm"))
