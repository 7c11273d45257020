"""ARUBA: rates that follow from how far clients have moved, and along which gradients."""

import copy
from dataclasses import replace

import pytest
import torch
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
    plain_net,
    same,
    state_of,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.messages import Cohort
from perfed.core.model import Model
from perfed.core.random import PERSONALISE
from perfed.core.rates import Rates
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.aruba import ARUBA
from perfed.methods.fedavg import FedAvg

PLAIN = {"lr": 0.05, "zeta0": 0.7, "p": 0.8}


def descend(world, w, batches, eta):
    """Plain steps with rates for each parameter, which may follow from the squared gradients so far; and these."""
    net, decay = copy.deepcopy(w).train(), world.settings["weight_decay"]
    squared = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in batches:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p, rate, q in zip(net.parameters(), eta(squared), squared, strict=True):
                d = p.grad + decay * p
                p.sub_(rate * d)
                q.add_(d**2)
    return net, squared


def rates(b, g, isotropic):
    """sqrt(b / g), or one rate out of the sums."""
    if isotropic:
        one = (sum(float(each.sum()) for each in b) / sum(float(each.sum()) for each in g)) ** 0.5
        return [torch.full_like(each, one) for each in b]
    return [(x / y).sqrt() for x, y in zip(b, g, strict=True)]


def reference(world, lr, zeta0, p, isotropic=False):
    """The authors' server: it takes the clients of a round one after another, and counts them."""
    w, eps0, t = world.net(), lr * zeta0, 1
    b, g = ([torch.full_like(each, square) for each in w.parameters()] for square in (eps0**2, zeta0**2))
    for round, cohort in enumerate(ROUNDS, 1):
        eta = rates(b, g, isotropic)
        nets = []
        for i in cohort:
            net, squared = descend(world, w, world.batches(i, round), lambda _, e=eta: e)
            for x, y, new, old, q in zip(b, g, net.parameters(), w.parameters(), squared, strict=True):
                x += 0.5 * (new.detach() - old.detach()) ** 2 + eps0**2 / (t + 1) ** p
                y += q + zeta0**2 / (t + 1) ** p
            t += 1
            nets.append(net)
        w = average(nets, [world.count(i) for i in cohort])
    return w, b, g


def vector(parts):
    return torch.cat([each.reshape(-1) for each in parts])


def check_squares(fed, b, g, isotropic):
    for name, parts in (("b", b), ("g", g)):
        expected = vector(parts)
        same(
            fed.server[name] if isotropic else fed.server[name][: len(expected)],
            expected.sum() if isotropic else expected,
        )


@pytest.mark.parametrize(
    ("build", "isotropic", "compact"),
    [(plain_net, False, False), (norm_net, False, False), (norm_net, False, True), (norm_net, True, False)],
)
def test_equals_the_reference(build, isotropic, compact, clients):
    world = World(build, clients)
    fed = world.run(ARUBA, isotropic=isotropic, compact=compact, adapt_epochs=2, **PLAIN)
    w, b, g = reference(world, isotropic=isotropic, **PLAIN)
    check_squares(fed, b, g, isotropic)
    eta, found = rates(b, g, isotropic), models(fed)
    for i in range(len(clients)):
        close(found["global"][i], flat(w))
        batches = world.batches(i, len(ROUNDS), 2, purpose=(PERSONALISE,))
        close(found["personal"][i], flat(descend(world, w, batches, lambda _: eta)[0]))
    assert differs(found["personal"][NEVER], found["global"][NEVER])
    assert differs(vector(eta), torch.full_like(vector(eta), PLAIN["lr"]))  # the rates have moved


@pytest.mark.parametrize("isotropic", [False, True])
def test_an_adapting_client_steps_first_and_adds_its_squares_to_g_afterwards(isotropic, clients):
    """ARUBA++: b stays as it is, and so does what the server knows."""
    world = World(norm_net, clients)
    fed = world.run(ARUBA, isotropic=isotropic, c=50.0, adapt_epochs=2, **PLAIN)
    w, b, g = reference(world, isotropic=isotropic, **PLAIN)
    check_squares(fed, b, g, isotropic)
    falling = lambda squared: rates(b, [y + 50.0 * q for y, q in zip(g, squared, strict=True)], isotropic)
    found, plain = models(fed)["personal"], models(world.run(ARUBA, isotropic=isotropic, adapt_epochs=2, **PLAIN))
    for i in range(len(clients)):
        batches = world.batches(i, len(ROUNDS), 2, purpose=(PERSONALISE,))
        close(found[i], flat(descend(world, w, batches, falling)[0]))
    assert differs(found, plain["personal"])


def test_a_single_number_by_hand():
    """One weight that moves by -2 along squared gradients of 3: b = 1 + 2 + 1/2, g = 1 + 3 + 1/2, eta = 0.8819."""
    method = ARUBA(Model(Scale, dtype=torch.float64), lr=1.0).at(round=1)
    server = method.init_server(1)
    w = method.model.zeros()
    one = torch.ones_like(w)
    mean, weight = {"w": -2 * one, "b": 2 * one, "g": 3 * one}, {name: torch.tensor(1.0) for name in "wbg"}
    after = method.aggregate(server, Cohort(torch.tensor([0]), mean, (), weight, 1))
    assert (float(after["b"][0]), float(after["g"][0]), float(after["t"])) == (3.5, 4.5, 2.0)
    eta = method.lr * method.broadcast(after, torch.tensor([0])).shared["eta"]
    assert float(eta[0]) == pytest.approx(0.8819, abs=5e-5)
    assert float(after["w"][0]) == float(server["w"][0]) - 2


class Scale(nn.Module):
    """A network with a single parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.scale * x[:, :3]


def test_with_a_single_weight_one_rate_for_all_is_that_of_each(clients):
    world = World(Scale, clients)
    each, all_alike = (world.run(ARUBA, isotropic=isotropic, c=3.0, **PLAIN) for isotropic in (False, True))
    same(each.server["w"], all_alike.server["w"])
    for name in "bg":
        same(each.server[name][0], all_alike.server[name])
    same(models(each), models(all_alike))
    assert differs(each.server["w"][:1], world.net().scale.detach()[None])


@pytest.mark.parametrize("isotropic", [False, True])
def test_a_huge_start_keeps_the_rate_at_lr_which_is_fedavg(isotropic, clients):
    world = World(norm_net, clients)
    fed = world.run(ARUBA, zeta0=1e6, isotropic=isotropic)
    torch.testing.assert_close(fed.server["w"], world.run(FedAvg).server, rtol=1e-8, atol=1e-9)
    assert differs(world.run(ARUBA, isotropic=isotropic).server["w"], world.run(FedAvg).server)


@pytest.mark.parametrize("isotropic", [False, True])
def test_b_and_g_only_grow_and_count_every_client(isotropic, clients):
    fed = World(norm_net, clients).federation(ARUBA, isotropic=isotropic)
    for round, cohort in enumerate(ROUNDS, 1):
        before = fed.server
        fed.step(cohort)
        assert (fed.server["b"] > before["b"]).all()
        assert (fed.server["g"] > before["g"]).all()
        assert float(fed.server["t"]) == 1 + 3 * round


def test_compact_is_the_same_with_two_models_up(clients):
    """And the number of samples, which weights what is read one by one."""
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    full, compact, one = (world.run(ARUBA, **more) for more in ({}, {"compact": True}, {"isotropic": True}))
    same(compact.server, full.server)
    assert per_client(full) == (2 * size, 3 * size)
    assert per_client(compact) == (2 * size, 2 * size + 1)
    assert per_client(one) == (size + 1, size + 2)
    assert full.traffic.up_own == one.traffic.up_own == 0
    assert compact.traffic.up_mean == 0  # read client by client: secure sums do not cover it


def test_a_schedule_multiplies_the_rates_of_clients(clients):
    """Half the rate in the second round of a step: half the way of a single step, while b and g begin as ever."""
    world = World(plain_net, clients, epochs=1, batch_size=50, weight_decay=0)
    moved = []
    for rates in (Rates(), Rates("step", every=1, decay=0.5)):
        method = ARUBA(Model(plain_net, dtype=torch.float64), **world.settings)
        fed = Federation(Sequential(Job(method, clients, 5, 3, rates=rates)))
        fed.step((0,))
        before = fed.server["w"]
        fed.step((2,))
        moved.append(fed.server["w"] - before)
    same(moved[1], moved[0] / 2)


def test_distances_are_of_weights_alone(clients):
    """Running statistics move too, and are no part of b."""
    fed = World(norm_net, clients).run(ARUBA)
    P, size = fed.method.model.P, fed.method.model.size
    regularised = fed.server["g"][P:size]  # no gradients either
    same(fed.server["b"][P:size], fed.method.lr**2 * regularised)
    assert differs(fed.server["w"][P:size], flat(World(norm_net, clients).net())[P:])


def test_adaptation_leaves_no_trace_and_never_sees_test_samples(clients):
    world = World(norm_net, clients)
    quiet, watched = world.run(ARUBA, c=1.0), world.federation(ARUBA, c=1.0)
    for cohort in ROUNDS:
        watched.step(cohort)
        watched.evaluate()
    same(watched.server, quiet.server)
    assert state_of(watched, 0) == ()
    none = models(world.run(ARUBA, adapt_epochs=0))
    assert torch.equal(none["personal"], none["global"])
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    assert torch.equal(models(quiet)["personal"], models(world.run(ARUBA, c=1.0, clients=spoiled))["personal"])


def test_a_newcomer_gets_the_model_and_what_it_needs_to_adapt(clients):
    fed = World(plain_net, clients).run(ARUBA)
    down = fed.method.newcomer(fed.server)
    torch.testing.assert_close(down.shared, fed.show([NEVER]).shared)
    assert down.own == ()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"momentum": 0.9}, "plain SGD"),
        ({"optimizer": "adam"}, "plain SGD"),
        ({"compact": True, "isotropic": True}, "nothing to make compact"),
        ({"zeta0": 0}, "zeta0 must be above 0"),
        ({"c": -1}, "c must be at least 0"),
    ],
)
def test_refusals(wrong, match, clients):
    with pytest.raises(Problem, match=match):
        World(plain_net, clients).federation(ARUBA, **wrong)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(ARUBA))
