"""SCAFFOLD: control variates."""

from dataclasses import replace

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
    equal_clients,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    slope,
    state_of,
    weights,
)

from perfed.core.errors import Problem
from perfed.methods.fedavg import FedAvg
from perfed.methods.scaffold import SCAFFOLD


def reference(world, server_lr=1.0):
    """Option II of the paper. Statistics are averaged, whatever the server's learning rate is."""
    w, N = world.net(), len(world.clients)
    c = torch.zeros_like(weights(w))
    own = [torch.zeros_like(c) for _ in range(N)]
    for round, cohort in enumerate(ROUNDS, 1):
        nets, change = [], torch.zeros_like(c)
        for i in cohort:
            batches = world.batches(i, round)
            y = world.train(w, batches, shift=c - own[i])
            new = own[i] - c + (weights(w) - weights(y)) / (len(batches) * world.settings["lr"])
            change = change + (new - own[i])
            own[i] = new
            nets.append(y)
        old, w = w, average(nets, [1] * len(nets))
        with torch.no_grad():
            for p, q in zip(w.parameters(), old.parameters(), strict=True):
                p.copy_(q + server_lr * (p - q))
        c = c + change / N
    return w, c, own


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("server_lr", [1.0, 1.5])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, server_lr, compact, clients):
    """Ragged clients take different numbers of steps; each divides by its own."""
    world = World(build, clients)
    fed = world.run(SCAFFOLD, server_lr=server_lr, compact=compact)
    w, c, own = reference(world, server_lr)
    close(fed.server["w"], flat(w))
    close(fed.server["c"], c)  # and 0 at buffers
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(w))
        close(state_of(fed, i), own[i])


@pytest.mark.parametrize("compact", [False, True])
def test_c_is_the_mean_over_all_clients(compact, clients):
    """After every round, though only three of five took part."""
    fed = World(norm_net, clients).federation(SCAFFOLD, compact=compact, server_lr=1.3)
    for cohort in ROUNDS:
        fed.step(cohort)
        mean = sum(state_of(fed, i) for i in range(len(clients))) / len(clients)
        same(fed.server["c"], mean)
        assert fed.server["c"].norm() > 1e-2


def test_compact_is_the_same_with_one_number_more_than_the_model(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    full, compact = world.run(SCAFFOLD), world.run(SCAFFOLD, compact=True)
    same(compact.server, full.server)
    same(dict(compact.engine.states[0]), dict(full.engine.states[0]))
    assert per_client(full) == (2 * size, 2 * size)
    assert per_client(compact) == (2 * size, size + 1)
    assert compact.traffic.up_mean == 0  # read client by client: secure sums do not cover it
    assert full.traffic.up_own == 0


def test_frozen_at_0_is_fedavg_with_uniform_weights(clients):
    world = World(plain_net, equal_clients(clients))
    fed = world.federation(SCAFFOLD)
    for cohort in ROUNDS:
        fed.step(cohort)
        fed.server = {**fed.server, "c": torch.zeros_like(fed.server["c"])}
        fed.engine.states[0].clear()
    same(fed.server["w"], world.run(FedAvg).server)
    assert differs(world.run(SCAFFOLD).server["w"], fed.server["w"])  # control variates do something


def test_first_round_is_the_uniform_mean(clients):
    world = World(plain_net, clients)
    nets = [world.train(world.net(), world.batches(i, 1)) for i in (0, 2, 3)]
    fed = world.run(SCAFFOLD, [(0, 2, 3)])
    close(fed.server["w"], flat(average(nets, [1, 1, 1])))
    assert differs(fed.server["w"], world.run(FedAvg, [(0, 2, 3)]).server)  # ragged: not weighted by samples


def test_control_variate_of_one_step_is_the_gradient(clients):
    world = World(plain_net, clients, weight_decay=0, epochs=1, batch_size=50)  # one full-batch step each
    fed = world.run(SCAFFOLD, [(0, 2, 3)])
    for i in (0, 2, 3):
        net = world.net()
        world.risk(net, i).backward()
        close(state_of(fed, i), slope(net))


def test_counts_real_steps(clients):
    """Batches times epochs of this very client; epochs, or another client's count, would be off by a factor."""
    world = World(plain_net, clients)
    fed = world.run(SCAFFOLD, [(0, 2, 3)])
    for i, steps in ((0, 8), (2, 12), (3, 2)):
        y = world.train(world.net(), world.batches(i, 1))
        close(state_of(fed, i), (weights(world.net()) - weights(y)) / (steps * 0.05))


@pytest.mark.parametrize("compact", [False, True])
def test_server_rate_spares_statistics(compact, clients):
    """Stretched by a rate above 1, the falling running variance of small inputs would turn negative."""
    small = replace(clients, train=replace(clients.train, x=0.01 * clients.train.x))
    fed = World(norm_net, small).run(SCAFFOLD, [(2,)], server_lr=2.0, compact=compact)
    variance = fed.server["w"][fed.method.model.size - 8 : fed.method.model.size]
    assert 0 < variance.min() < 0.5
    assert fed.evaluate()["personal"]["test"]["loss"].isfinite().all()


@pytest.mark.parametrize("wrong", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_refuses_what_breaks_its_formula(wrong, clients):
    with pytest.raises(Problem, match="plain SGD"):
        World(plain_net, clients).federation(SCAFFOLD, **wrong)


def test_non_participants_keep_their_control_variate(clients):
    fed = World(plain_net, clients).run(SCAFFOLD)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert before[3].any()
    assert not before[NEVER].any()


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(SCAFFOLD))
