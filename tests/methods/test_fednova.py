"""FedNova: changes divided by the steps behind them."""

from dataclasses import replace

import pytest
import torch
from reference import (
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    equal_clients,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    weights,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.fednova import FedNova
from perfed.methods.fedprox import FedProx

LR = 0.05


def counted(tau, r=0.0, mu=0.0):
    """The paper's closed forms, for momentum or a proximal term."""
    if r:
        return (tau - r * (1 - r**tau) / (1 - r)) / (1 - r)
    return (1 - (1 - LR * mu) ** tau) / (LR * mu) if mu else tau


def impulses(tau, r, mu, nesterov):
    """The same number from the steps themselves: what each gradient alone, being 1, would move in all."""
    total = 0.0
    for place in range(tau):
        x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.SGD([x], LR, momentum=r, nesterov=nesterov)
        for step in range(tau):
            x.grad = mu * x.detach() + (1.0 if step == place else 0.0)
            optimiser.step()
        total -= float(x.detach()) / LR
    return total


def nova(w, nets, shares, a):
    """`w` after the server's step; statistics are averaged."""
    shares = [share / sum(shares) for share in shares]
    tau_eff, out = sum(p * each for p, each in zip(shares, a, strict=True)), average(nets, shares)
    d = sum(p * (weights(w) - weights(net)) / (LR * each) for p, net, each in zip(shares, nets, a, strict=True))
    nn.utils.vector_to_parameters(weights(w) - LR * tau_eff * d, out.parameters())
    return out


def reference(world, count, mu=0.0, rounds=ROUNDS):
    w = world.net()
    for round, cohort in enumerate(rounds, 1):
        centre = weights(w)
        pull = lambda net, c=centre: mu / 2 * ((nn.utils.parameters_to_vector(net.parameters()) - c) ** 2).sum()
        batches = {i: world.batches(i, round) for i in cohort}
        nets = [world.train(w, batches[i], pull) for i in cohort]
        w = nova(w, nets, [world.count(i) for i in cohort], [count(len(batches[i])) for i in cohort])
    return w


@pytest.mark.parametrize(
    ("build", "momentum", "mu"),
    [(plain_net, 0, 0), (norm_net, 0, 0), (norm_net, 0.8, 0), (norm_net, 0, 2.0)],
)
def test_equals_the_reference(build, momentum, mu, clients):
    """Clients take 2 to 12 steps; the numbers come from the paper's closed forms."""
    world = World(build, clients, momentum=float(momentum))
    fed = world.run(FedNova, mu=mu)
    w = reference(world, lambda tau: counted(tau, momentum, mu), mu)
    close(fed.server, flat(w))
    for theta in personal(fed):
        close(theta, flat(w))
    assert differs(fed.server, world.run(FedProx, mu=mu).server)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_and_proximal_term_together_count_every_gradient(nesterov, clients):
    world = World(norm_net, clients, momentum=0.6, nesterov=nesterov)
    fed = world.run(FedNova, mu=2.0)
    close(fed.server, flat(reference(world, lambda tau: impulses(tau, 0.6, 2.0, nesterov), 2.0)))


class AdamWorld(World):
    def sgd(self, net):
        return torch.optim.Adam(net.parameters(), self.settings["lr"], weight_decay=self.settings["weight_decay"])


def test_steps_of_adam_are_counted(clients):
    world = AdamWorld(norm_net, clients, optimizer="adam", lr=LR)
    close(world.run(FedNova).server, flat(reference(world, lambda tau: tau)))
    assert differs(world.run(FedNova).server, world.run(FedAvg).server)


@pytest.mark.parametrize(("tau", "r", "mu"), [(1, 0.9, 0.0), (2, 0.9, 0.0), (7, 0.5, 0.0), (7, 0.0, 3.0)])
def test_closed_forms_are_what_the_steps_add_up_to(tau, r, mu):
    """Two steps with momentum r count 2 + r, with a proximal term 2 - lr mu."""
    assert counted(tau, r, mu) == pytest.approx(impulses(tau, r, mu, nesterov=False), rel=1e-12)
    if tau == 2:
        assert counted(tau, r, mu) == pytest.approx(2 + r)


@pytest.mark.parametrize(("mu", "momentum", "other"), [(0.0, 0.0, FedAvg), (0.0, 0.9, FedAvg), (1.5, 0.9, FedProx)])
def test_equal_steps_are_fedavg_and_fedprox(mu, momentum, other, clients):
    """The weights stay sample counts, here of clients with as many batches but not as many samples."""
    sizes = (14, 13, 12, 14)
    cut = lambda split: replace(split, x=split.x[: sum(sizes)], y=split.y[: sum(sizes)], size=sizes)
    few = equal_clients(clients)
    world = World(norm_net, replace(few, train=cut(clients.train)), momentum=momentum)
    more = {"mu": mu} if mu else {}
    same(world.run(FedNova, **more).server, world.run(other, **more).server)
    uniform = average([world.train(world.net(), world.batches(i, 1)) for i in (0, 2)], [1, 1])
    assert differs(world.run(FedNova, [(0, 2)], mu=0).server[: len(flat(uniform))], flat(uniform))


def test_counts_the_steps_that_stragglers_have_taken(clients):
    """Not those that were planned, nor the filling of a block: each client ends after epochs of its own."""
    world = World(plain_net, equal_clients(clients), epochs=4)
    method = FedNova(Model(plain_net, dtype=torch.float64), **world.settings)
    fed = Federation(Sequential(Job(method, world.clients, 5, 4)), faults=Faults(stragglers=1.0))
    fed.step((0, 1, 2, 3))
    done = [int(epochs) for epochs in fed.answers.done]
    assert len(set(done)) > 1
    nets = [world.train(world.net(), world.batches(i, 1, epochs)) for i, epochs in enumerate(done)]
    close(fed.server, flat(nova(world.net(), nets, [14] * 4, [2 * epochs for epochs in done])))


def single_net():
    return nn.Linear(6, 3)


def test_ends_where_the_mean_loss_is_smallest_though_steps_differ(clients):
    """FedAvg ends elsewhere: there, whoever takes more steps counts more than its samples."""
    world = World(single_net, clients, lr=0.03, weight_decay=0.2, batch_size=5, epochs=1)
    slopes = {}
    for kind in (FedNova, FedAvg):
        fed = world.run(kind, [(0, 1, 2)] * 60)
        net = world.net()
        net.load_state_dict(fed.method.model.state_dict(fed.server))
        net.zero_grad()
        total = sum(world.count(i) for i in (0, 1, 2))
        loss = sum(world.count(i) / total * world.risk(net, i) for i in (0, 1, 2))
        (loss + 0.1 * sum((p**2).sum() for p in net.parameters())).backward()
        slopes[kind] = float(nn.utils.parameters_to_vector([p.grad for p in net.parameters()]).norm())
    assert slopes[FedNova] < slopes[FedAvg] / 3


def test_statistics_are_plain_means(clients):
    """Divided by steps and multiplied by others', they would be no mean: only the parameters are normalised."""
    world = World(norm_net, clients)
    cohort, P = (0, 2, 3), sum(p.numel() for p in world.net().parameters())
    nets = [world.train(world.net(), world.batches(i, 1)) for i in cohort]
    found = world.run(FedNova, [cohort]).server
    close(found[P:], flat(average(nets, [world.count(i) for i in cohort]))[P:])
    assert differs(found[:P], world.run(FedAvg, [cohort]).server[:P])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"mu": 20.0}, "lr \\* mu below 1, not 0.05 \\* 20"),
        ({"mu": -1.0}, "mu must be at least 0"),
    ],
)
def test_refusals(wrong, match, clients):
    with pytest.raises(Problem, match=match):
        World(plain_net, clients).federation(FedNova, **wrong)


def test_a_newcomer_gets_the_shared_model(clients):
    fed = World(plain_net, clients).run(FedNova)
    assert torch.equal(fed.method.newcomer(fed.server).shared, fed.server)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedNova))


def test_one_model_each_way_and_a_number_up(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedNova)
    assert per_client(fed) == (size, size + 1)
    assert fed.traffic.up_own == 0
