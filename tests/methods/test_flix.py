"""FLIX: one model that is trained to be mixed with every client's own optimum."""

import copy

import pytest
import torch
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    SEED,
    World,
    average,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    personal,
    plain_net,
    same,
    state_of,
    weights,
)
from torch import nn
from torch.func import functional_call

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import TRAIN, derive, shuffle
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import FIRST, Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.flix import FLIX
from perfed.methods.local import Local
from perfed.training.newcomers import visited

HALF = {"mix": 0.3, "alone": 4}


def first_batches(world, i, round, epochs):
    """The library's batches of client i in its first exchange."""
    x, y = world.samples(i)
    key, out = derive(ORDER, TRAIN, round, FIRST, i, 0, 0), []
    for epoch in range(epochs):
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        out += [(x[rows], y[rows]) for rows in order.split(world.settings["batch_size"])]
    return out


def combined(x, optimum, share):
    """Named tensors share x + (1 - share) optimum, with a path to x for autograd."""
    return {name: share * p + (1 - share) * optimum[name] for name, p in x}


def reference(world, mix, alone, rounds=ROUNDS):
    """The loss of the mixture, with x's gradient from autograd; decay is a part of that loss, so SGD has none."""
    x, optima = world.net(), {}
    decay = world.settings["weight_decay"]
    for round, cohort in enumerate(rounds, 1):
        nets = []
        for i in cohort:
            if i not in optima:
                optima[i] = world.train(world.net(), first_batches(world, i, round, alone))
            own, mine = dict(optima[i].named_parameters()), copy.deepcopy(x).train()
            step = torch.optim.SGD(mine.parameters(), world.settings["lr"], world.settings["momentum"])
            for inputs, y in world.batches(i, round):
                t = combined(mine.named_parameters(), {n: p.detach() for n, p in own.items()}, mix)
                step.zero_grad()
                loss = nn.functional.cross_entropy(functional_call(mine, t, (inputs,)), y)
                (loss + decay / 2 * sum((p**2).sum() for p in t.values())).backward()
                step.step()
            nets.append(mine)
        x = average(nets, [world.count(i) for i in cohort])
    return x, {i: optima.get(i, world.net()) for i in range(len(world.clients))}


def deployed(x, optimum, mix):
    """Parameters and running statistics, both mixed."""
    return mix * flat(x) + (1 - mix) * flat(optimum)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(FLIX, **HALF)
    x, optima = reference(world, **HALF)
    close(fed.server, flat(x))
    for i, theta in enumerate(personal(fed)):
        close(state_of(fed, i), flat(optima[i]))
        close(theta, deployed(x, optima[i], HALF["mix"]))
    assert differs(fed.server[: len(flat(x))], flat(world.net()))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_a_share_of_1_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    whole, avg = world.run(FLIX, mix=1.0, alone=3), world.run(FedAvg)
    same(whole.server, avg.server)
    same(personal(whole), personal(avg))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_a_share_of_0_is_local_and_x_never_moves(build, clients):
    """Each has the optimum that it trained alone; the weights of x stay to the bit."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FLIX, mix=0.0, alone=4)
    start = fed.method.model.init(SEED)
    assert torch.equal(*(fed.method.model.weights.take(theta) for theta in (fed.server, start)))
    for round, cohort in enumerate(ROUNDS, 1):
        for i in set(cohort) - {i for before in ROUNDS[: round - 1] for i in before}:
            close(personal(fed)[i], flat(world.train(world.net(), first_batches(world, i, round, 4))))
    alone = World(build, clients, momentum=0.9, epochs=4).run(Local, ROUNDS[:1])
    assert torch.equal(personal(fed)[NEVER], personal(alone)[NEVER])  # the initial model


def one_step(clients, mix):
    """x's change in a round of one step over all samples of client 2, and the gradient of the loss at the mixture."""
    world = World(plain_net, clients, epochs=1, batch_size=1000, weight_decay=0.0)
    fed = world.federation(FLIX, mix=mix, alone=5)
    before = fed.server
    fed.step((2,))
    optimum, x = state_of(fed, 2), flat(world.net())
    net = world.net()
    torch.nn.utils.vector_to_parameters(mix * x + (1 - mix) * optimum[: len(x)], net.parameters())
    g = torch.autograd.grad(world.risk(net, 2), list(net.parameters()))
    return (fed.server - before)[: len(x)], torch.cat([part.reshape(-1) for part in g]), world.settings["lr"]


@pytest.mark.parametrize("mix", [0.25, 0.5, 1.0])
def test_the_gradient_carries_the_share_once_and_the_clients_rate(mix, clients):
    """Public code exchanges the rates of client and server; the server adds the mean change as it is."""
    change, g, lr = one_step(clients, mix)
    same(change, -lr * mix * g)


def test_the_optimum_is_trained_once_and_stays(clients):
    world = World(plain_net, clients)
    fed = world.federation(FLIX, **HALF)
    fed.step((0, 1))
    before = {i: state_of(fed, i).clone() for i in range(5)}
    fed.step((0, 1, 2))
    fed.step((0, 2))
    check_kept(fed, before, (0, 1, 3, 4))
    assert differs(state_of(fed, 2), before[2])


def test_training_alone_sends_nothing_and_rounds_what_fedavg_sends(clients):
    world = World(norm_net, clients)
    flix, avg = world.run(FLIX, **HALF), world.run(FedAvg)
    assert (flix.traffic.down, flix.traffic.up) == (avg.traffic.down, avg.traffic.up)
    assert flix.traffic.up == 9 * 8 * len(flat(world.net()))


def test_weights_of_the_server_are_samples(clients):
    world = World(plain_net, clients, weight_decay=0.0)
    fed = world.federation(FLIX, **HALF)
    single = []
    for i in (0, 2):
        alone = world.federation(FLIX, **HALF)
        alone.step((i,))
        single.append((world.count(i), alone.server))
    fed.step((0, 2))
    same(fed.server, sum(n * theta for n, theta in single) / sum(n for n, _ in single))


def test_a_client_that_never_took_part_mixes_with_the_initial_model(clients):
    fed = World(plain_net, clients).run(FLIX, **HALF)
    start = fed.method.model.init(SEED)
    same(personal(fed)[NEVER], start + HALF["mix"] * (fed.server - start))


def test_a_newcomer_trains_alone_before_it_mixes(clients):
    """Its first exchange comes before its first round, though it came late; x is the run's."""
    fed = World(plain_net, clients).run(FLIX, **HALF)
    late = visited(fed.method, fed.server)
    guest = Federation(Sequential(Job(late, clients, ORDER, 5)), round=fed.round)
    guest.step(range(5))
    world = World(plain_net, clients)
    expected = world.train(world.net(), first_batches(world, 1, fed.round + 1, HALF["alone"]))
    close(state_of(guest, 1), flat(expected))
    same(guest.server, fed.server)
    same(personal(guest)[1], state_of(guest, 1) + HALF["mix"] * (fed.server - state_of(guest, 1)))


def test_decay_is_of_the_mixture(clients):
    """A decay of x alone would move it even where no share of it is used."""
    world = World(plain_net, clients, weight_decay=0.5)
    fed = world.run(FLIX, mix=0.0, alone=2)
    assert torch.equal(fed.server, fed.method.model.init(SEED))
    some = world.run(FLIX, **HALF)
    close(some.server, flat(reference(world, **HALF)[0]))
    assert differs(some.server[: len(weights(world.net()))], weights(world.net()))


@pytest.mark.parametrize("setting", [{"mix": 1.1}, {"mix": -0.1}, {"alone": 0}])
def test_bad_settings_are_refused(setting):
    with pytest.raises(Problem, match=rf"flix\.{next(iter(setting))} must be at"):
        FLIX(Model(plain_net), **setting)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(FLIX, **HALF))
