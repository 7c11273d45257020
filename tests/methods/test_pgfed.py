"""PGFed: other clients' risks, to first order, with a learned mixture."""

import copy
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
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    push,
    same,
    slope,
    state_of,
    weights,
)
from torch import nn

from perfed.methods.fedavg import FedAvg
from perfed.methods.pgfed import PGFed

M, N = 3, 5  # clients per round, and of the tests
STRONG = {"mu": 0.6, "alpha_lr": 0.02}


def reference(world, mu, alpha_lr, order="theta", clamp=True, keep=False, rounds=ROUNDS):
    """Algorithm 1 with Python loops. `keep`: one optimiser per client for the whole run, as the authors' code has."""
    w, A = world.net(), [[1 / M] * N for _ in range(N)]
    last = {}  # of the last cohort: client -> (gradient, c)
    nets = {i: world.net() for i in range(N)}
    optimisers = {i: world.sgd(nets[i]) for i in range(N)}
    for round, cohort in enumerate(rounds, 1):
        zero = torch.zeros_like(weights(w))
        gbar = mu / M * sum((g for g, _ in last.values()), zero)
        sent = {}
        for i in cohort:
            net, row = nets[i].train(), A[i]
            gtilde = mu * sum((row[j] * g for j, (g, _) in last.items()), zero)
            net.load_state_dict(w.state_dict())
            optimiser = optimisers[i] if keep else world.sgd(net)
            for x, y in world.batches(i, round):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                push(net, gtilde)
                before = weights(net)
                optimiser.step()
                s = float(gbar @ (weights(net) if order == "theta" else before))
                for j, (_, c) in last.items():
                    row[j] = row[j] - alpha_lr * (c + s)
                    if clamp:
                        row[j] = max(row[j], 0.0)
            net.zero_grad()
            risk = world.risk(net, i)  # all training samples, eval mode
            risk.backward()
            sent[i] = (slope(net).clone(), mu * float(risk.detach() - slope(net) @ weights(net)))
        w = average([nets[i] for i in cohort], [world.count(i) for i in cohort])
        last = copy.deepcopy(sent)
    return w, torch.tensor(A, dtype=torch.float64), nets, last


def check_against(fed, expected):
    w, A, nets, last = expected
    close(fed.server["w"], flat(w))
    same(fed.server["alpha"], A)
    assert fed.server["ids"].tolist() == sorted(last)
    for row, j in enumerate(sorted(last)):
        close(fed.server["grads"][row], last[j][0])  # and 0 at buffers
        same(float(fed.server["c"][row]), last[j][1])
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i)["theta"], flat(nets[i]))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("order", ["theta", "alpha"])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, order, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(PGFed, order=order, **STRONG)
    check_against(fed, reference(world, order=order, **STRONG))
    assert differs(fed.server["alpha"], torch.full((N, N), 1 / M, dtype=torch.float64))
    assert differs(fed.server["w"], world.run(FedAvg).server)


def test_momentum_that_survives_rounds(clients):
    """One SGD object per client, as in the authors' code; clients that sit out keep its buffer."""
    world = World(norm_net, clients, momentum=0.9)
    fed = world.run(PGFed, keep_momentum=True, **STRONG)
    check_against(fed, reference(world, keep=True, **STRONG))
    assert differs(fed.server["w"], world.run(PGFed, **STRONG).server["w"])


def test_orders_differ(clients):
    world = World(plain_net, clients)
    a, b = (world.run(PGFed, order=order, **STRONG).server["alpha"] for order in ("theta", "alpha"))
    assert differs(a, b)


def test_clamp(clients):
    """Positive by force, or free to go below 0; both as in the reference."""
    world = World(plain_net, clients)
    greedy = {"mu": 0.6, "alpha_lr": 0.3}
    held, free = (world.run(PGFed, clamp=clamp, **greedy) for clamp in (True, False))
    assert held.server["alpha"].min() == 0
    assert free.server["alpha"].min() < -0.1
    check_against(held, reference(world, **greedy))
    check_against(free, reference(world, clamp=False, **greedy))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_mu_0_is_fedavg_evaluated_as_own_models(build, clients):
    world = World(build, clients, momentum=0.9)
    fed, avg = world.federation(PGFed, mu=0, alpha_lr=0.1), world.federation(FedAvg)
    w, own = world.net(), [flat(world.net())] * N
    for round, cohort in enumerate(ROUNDS, 1):
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        for i, net in zip(cohort, nets, strict=True):
            own[i] = flat(net)
        w = average(nets, [world.count(i) for i in cohort])
        fed.step(cohort)
        avg.step(cohort)
        same(fed.server["w"], avg.server)
        for i, theta in enumerate(personal(fed)):
            close(theta, own[i])
    assert fed.server["alpha"].eq(1 / M).all()


def test_alpha_lr_0_keeps_alpha(clients):
    fed = World(plain_net, clients).run(PGFed, mu=0.6, alpha_lr=0)
    assert fed.server["alpha"].eq(1 / M).all()


def test_what_goes_down_is_mu_A_G(clients):
    """gtilde_i = mu A[i, last] G, summed by hand, after alpha has moved."""
    fed = World(norm_net, clients).run(PGFed, **STRONG)
    down = fed.method.broadcast(fed.server, torch.arange(N))
    A, G = fed.server["alpha"], fed.server["grads"]
    for i in range(N):
        same(down.own["mixed"][i], 0.6 * sum(A[i, j] * G[row] for row, j in enumerate(ROUNDS[-1])))
        same(down.own["alpha"][i], A[i, list(ROUNDS[-1])])
    same(down.shared["mean"], 0.6 / M * (G[0] + G[1] + G[2]))
    same(down.shared["w"], fed.server["w"])
    assert differs(down.own["mixed"][0], down.own["mixed"][1])


def test_first_reception_is_the_mean(clients):
    """While a row is untouched its mixture is the plain mean; a client's first round has none at all."""
    fed = World(plain_net, clients).federation(PGFed, **STRONG)
    everyone = torch.arange(N)
    assert not fed.method.broadcast(fed.server, everyone).own["mixed"].any()
    fed.step(ROUNDS[0])
    down = fed.method.broadcast(fed.server, everyone)
    for i in range(N):  # nobody has received a gradient yet
        same(down.own["mixed"][i], down.shared["mean"])
    assert down.shared["mean"].norm() > 1e-3
    fed.step(ROUNDS[1])
    fed.step(ROUNDS[2])
    down = fed.method.broadcast(fed.server, everyone)
    same(down.own["mixed"][NEVER], down.shared["mean"])
    assert differs(down.own["mixed"][2], down.shared["mean"])


def test_first_round_is_fedavg(clients):
    world = World(norm_net, clients)
    fed = world.run(PGFed, ROUNDS[:1], **STRONG)
    same(fed.server["w"], world.run(FedAvg, ROUNDS[:1]).server)
    assert fed.server["alpha"].eq(1 / M).all()
    assert fed.server["grads"].any(dim=1).all()


def test_alpha_moves_only_between_this_cohort_and_the_last(clients):
    fed = World(plain_net, clients).federation(PGFed, clamp=False, **STRONG)
    last = ()
    for cohort in ROUNDS:
        before = fed.server["alpha"].clone()
        fed.step(cohort)
        expected = torch.zeros(N, N, dtype=torch.bool)
        for i in cohort:
            for j in last:
                expected[i, j] = True
        assert torch.equal(fed.server["alpha"] != before, expected)
        last = cohort


def test_smaller_cohort_leaves_empty_places(clients):
    """A round with fewer clients than usual: M stays the constant, empty places weigh nothing."""
    world = World(plain_net, clients)
    rounds = (ROUNDS[0], (1, 2), ROUNDS[2])
    fed = world.federation(PGFed, **STRONG)
    for cohort in rounds[:2]:
        fed.step(cohort)
    assert fed.server["ids"].tolist() == [1, 2, -1]
    assert not fed.server["grads"][2].any()
    fed.step(rounds[2])
    check_against(fed, reference(world, rounds=rounds, **STRONG))


def test_uploaded_gradient_is_exact_in_eval_mode_and_leaves_the_statistics(clients):
    """All training samples, none dropped; the extra pass does not move BatchNorm."""
    world = World(norm_net, clients)
    fed = world.run(PGFed, [(0, 2, 3)], mu=0.5)
    for row, i in enumerate((0, 2, 3)):
        net = world.train(world.net(), world.batches(i, 1))
        close(state_of(fed, i)["theta"], flat(net))
        net.zero_grad()
        world.risk(net, i).backward()
        close(fed.server["grads"][row], slope(net))


def test_evaluates_own_models_that_newer_global_ones_do_not_overwrite(clients):
    fed = World(plain_net, clients).run(PGFed, **STRONG)
    before, kept = personal(fed), {i: copy.deepcopy(state_of(fed, i)) for i in range(N)}
    w = fed.server["w"].clone()
    fed.step((0, 1, 2))
    after = personal(fed)
    check_kept(fed, kept, (3, NEVER))
    assert torch.equal(after[3], before[3])
    assert torch.equal(after[NEVER], before[NEVER])
    assert differs(fed.server["w"], w)
    assert differs(after[3], fed.server["w"])
    assert all(differs(after[i], before[i]) for i in (0, 1, 2))


def test_no_look_at_test_data(clients):
    world = World(plain_net, clients)
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    honest, other = (world.run(PGFed, clients=c, **STRONG) for c in (clients, spoiled))
    torch.testing.assert_close(other.server, honest.server, rtol=0, atol=0)
    assert torch.equal(personal(other), personal(honest))


@pytest.mark.parametrize("keep_momentum", [False, True])
def test_personal_models_are_copies(keep_momentum, clients):
    check_no_alias(World(plain_net, clients, momentum=0.9).run(PGFed, keep_momentum=keep_momentum, **STRONG))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_three_models_down_two_up(build, clients):
    world = World(build, clients)
    size = len(flat(world.net()))
    fed = world.run(PGFed)
    down, up = per_client(fed)
    assert 3 * size <= down <= 3 * size + 2 * M
    assert 2 * size <= up <= 2 * size + M + 1
    assert fed.traffic.up_mean == len(ROUNDS) * M * size * 8  # the models alone are behind a sum
