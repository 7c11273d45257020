"""FedRoD: a balanced generic model and private heads."""

import copy
from dataclasses import replace

import pytest
import torch
from parts import part_of
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
    models,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    state_of,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.local import ClientData
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedrod import FedRoD


def log_pi(world, i):
    y = world.samples(i)[1]
    return torch.log(torch.stack([(y == c).double().mean() for c in range(3)]) + 1e-12)


def sgd(world, parameters):
    names = ("lr", "momentum", "nesterov", "weight_decay")
    return torch.optim.SGD(parameters, **{name: world.settings[name] for name in names})


def train(world, net, H, i, round, gamma):
    """Two heads on one representation: CE(G(z) + gamma log pi) for body and G, CE(G(z) + H(z)) for H alone."""
    net, H = copy.deepcopy(net).train(), copy.deepcopy(H)
    generic, own = sgd(world, net.parameters()), sgd(world, H.parameters())
    prior = gamma * log_pi(world, i)
    for x, y in world.batches(i, round):
        generic.zero_grad()
        own.zero_grad()
        z = net[:-1](x)  # once: both losses see the body before its step
        logits = net[-1](z)
        personal_loss = nn.functional.cross_entropy(logits.detach() + H(z.detach()), y)
        nn.functional.cross_entropy(logits + prior, y).backward()
        generic.step()
        personal_loss.backward()
        own.step()
    return net, H


def zero_head():
    H = nn.Linear(8, 3).double()
    nn.init.zeros_(H.weight)
    nn.init.zeros_(H.bias)
    return H


def reference(world, gamma):
    w, own = world.net(), [zero_head() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = []
        for i in cohort:
            net, own[i] = train(world, w, own[i], i, round, gamma)
            nets.append(net)
        w = average(nets, [world.count(i) for i in cohort])
    return w, own


def summed(w, H):
    net = copy.deepcopy(w)
    with torch.no_grad():
        net[-1].weight += H.weight
        net[-1].bias += H.bias
    return net


@pytest.mark.parametrize("gamma", [1.0, 0.4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, gamma, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedRoD, gamma=gamma)
    w, own = reference(world, gamma)
    found = models(fed)
    close(fed.server, flat(w))
    for i in range(len(clients)):
        same(state_of(fed, i), flat(own[i]))
        close(found["global"][i], flat(w))
        close(found["personal"][i], flat(summed(w, own[i])))


def test_sum_of_weights_is_sum_of_logits(clients):
    """G(z) + H(z) of the two heads against the one vector that is evaluated."""
    world = World(norm_net, clients)
    fed = world.run(FedRoD)
    w, own = reference(world, 1.0)
    for i, theta in enumerate(personal(fed)):
        x, net = world.samples(i, "test")[0], w.eval()
        expected = net(x) + own[i](net[:-1](x))
        same(fed.method.model.apply(theta, x)[0], expected.detach())


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_gamma_0_trains_the_generic_model_as_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    same(world.run(FedRoD, gamma=0).server, world.run(FedAvg).server)
    assert differs(world.run(FedRoD).server, world.run(FedAvg).server)


def test_the_personal_loss_moves_the_private_head_alone(clients):
    """Whatever the private heads are, the generic model stays the same."""
    world = World(norm_net, clients)
    fed, spoiled = world.run(FedRoD), world.run(FedRoD)
    spoiled.engine.states[0][0] = spoiled.engine.states[0][0] + 1.0
    fed.step((0, 1, 2))
    spoiled.step((0, 1, 2))
    same(spoiled.server, fed.server)
    assert differs(state_of(spoiled, 0), state_of(fed, 0))


def test_classes_equally_often_are_fedavg(clients):
    """log pi is then the same number for all classes, which a softmax does not see."""
    sizes = (21, 9, 42, 3, 9)
    even = replace(clients.train, x=clients.train.x[: sum(sizes)], y=torch.arange(sum(sizes)) % 3, size=sizes)
    world = World(plain_net, replace(clients, train=even))
    same(world.run(FedRoD).server, world.run(FedAvg).server)


def test_absent_classes_stay_finite_and_are_not_pushed_down(clients):
    """A client with one class: its balanced loss is 0 and teaches nothing, the ordinary one would."""
    one = replace(clients, train=replace(clients.train, y=torch.ones_like(clients.train.y)))
    world = World(plain_net, one, weight_decay=0)
    fed = world.run(FedRoD)
    start = world.federation(FedRoD).server
    assert fed.server.isfinite().all()
    assert float((fed.server - start).abs().max()) < 1e-9
    assert differs(world.run(FedAvg).server, start)
    assert differs(state_of(fed, 0), torch.zeros_like(state_of(fed, 0)))  # the private head does learn its class


def test_frequencies_count_all_training_samples(clients):
    """Of every client, the last partial batch included."""
    method = FedRoD(Model(plain_net, dtype=torch.float64), batch_size=5)
    for i, size in enumerate(clients.train.size):
        data = ClientData(clients, i, torch.tensor(1), method)
        y = World(plain_net, clients).samples(i)[1]
        same(data.mean(method.frequencies), torch.bincount(y, minlength=3).double() / size)


def test_private_heads_start_at_0_so_a_new_client_has_the_generic_model(clients):
    found = models(World(plain_net, clients).run(FedRoD))
    assert torch.equal(found["personal"][NEVER], found["global"][NEVER])
    assert differs(found["personal"][0], found["global"][0])


def test_private_heads_change_nothing_but_the_head(clients):
    world = World(norm_net, clients)
    found = models(world.run(FedRoD))
    moved = (found["personal"][0] != found["global"][0]).sum()
    assert moved == len(flat(world.net(), part_of("3."))) == 27


def test_refuses_a_head_that_is_not_linear():
    deep = lambda: nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(Problem, match="'1' is Sequential"):
        FedRoD(Model(deep, head="1"))
    FedRoD(Model(deep))  # its last layer is fine


def test_a_single_layer_is_a_head_too(clients):
    world = World(lambda: nn.Linear(6, 3), clients)
    fed = world.run(FedRoD)
    same(fed.server, world.run(FedRoD).server)
    assert differs(personal(fed)[0], fed.server)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_one_model_each_way(build, clients):
    world = World(build, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(FedRoD)) == (size, size)


def test_non_participants_keep_their_head(clients):
    fed = World(plain_net, clients).run(FedRoD)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0), before[0])


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedRoD))
