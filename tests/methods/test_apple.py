"""APPLE: mixtures of core models with learned, private weights."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    SEED,
    World,
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
    weights,
)
from torch import nn

from perfed.contract.checks import play
from perfed.contract.toy import toy_clients
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.methods.apple import APPLE
from perfed.methods.fedavg import FedAvg

N = 5
STRONG = {"p_lr": 0.02, "mu": 0.5, "horizon": 2}


def fill(net, vector):
    """The network with these parameters; its statistics stay."""
    net = copy.deepcopy(net)
    nn.utils.vector_to_parameters(vector, net.parameters())
    return net


def lam(round, horizon, schedule):
    r = round - 1
    if r >= horizon:
        return 0.0
    return 0.001 ** (r / horizon) if schedule == "exponential" else (math.cos(math.pi * r / horizon) + 1) / 2


def reference(world, p_lr, mu, horizon, schedule="exponential", spread=False, wanted=None):
    """Autograd through sum_j p_ij c_j. `wanted`: round -> client -> what it downloads; None is everything."""
    cores = [world.net(SEED * N + j if spread else SEED) for j in range(N)]
    copies = [[weights(c) for c in cores] for _ in range(N)]
    ps, counts = {}, {}
    own = [fill(world.net(), sum(weights(c) for c in cores) / N) for _ in range(N)]
    for round, cohort in enumerate(ROUNDS, 1):
        known = sum(counts.values()) / len(counts) if counts else 1.0
        n = torch.tensor([counts.get(j, known) for j in range(N)], dtype=torch.float64)
        p0, sent = n / n.sum(), {}
        for i in cohort:
            for j in range(N) if wanted is None else wanted[round][i]:
                copies[i][j] = weights(cores[j])
            net = copy.deepcopy(cores[i]).train()  # its parameters are c_i, its statistics the client's
            p = ps.get(i, p0).clone().requires_grad_()
            optimiser = world.sgd(net)
            names = [name for name, _ in net.named_parameters()]
            sizes = [q.numel() for q in net.parameters()]
            for x, y in world.batches(i, round):
                optimiser.zero_grad()
                c_i = nn.utils.parameters_to_vector(net.parameters())
                w = sum(p[j] * (c_i if j == i else copies[i][j]) for j in range(N))
                parts = {k: t.view(q.shape) for k, t, q in zip(names, w.split(sizes), net.parameters(), strict=True)}
                loss = nn.functional.cross_entropy(torch.func.functional_call(net, parts, (x,)), y)
                loss = loss + lam(round, horizon, schedule) * mu * ((p - p0) ** 2).sum()
                (slope,) = torch.autograd.grad(loss, p, retain_graph=True)
                loss.backward()
                optimiser.step()
                p = (p.detach() - p_lr * slope).requires_grad_()
            copies[i][i] = weights(net)
            ps[i], sent[i] = p.detach(), net
            own[i] = fill(net, sum(p[j].detach() * copies[i][j] for j in range(N)))
        for i, net in sent.items():
            cores[i], counts[i] = net, world.count(i)
    return cores, ps, own


def check_against(fed, expected):
    cores, ps, own = expected
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(own[i]))
        close(fed.server["cores"][i], flat(cores[i]))
        same(state_of(fed, i)["p"], ps.get(i, torch.zeros(N, dtype=torch.float64)))


@pytest.mark.parametrize("schedule", ["exponential", "cosine"])
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, spread, schedule, clients):
    """Autograd gives the own core p_ii g and p_ij <g, c_j>; others' models get nothing."""
    world = World(build, clients, momentum=0.9)
    settings = {**STRONG, "schedule": schedule, "spread": spread}
    fed = world.run(APPLE, **settings)
    check_against(fed, reference(world, **settings))
    assert differs(state_of(fed, 3)["p"], torch.full((N,), 1 / N, dtype=torch.float64))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_limited_downloads_equal_the_reference(build, clients):
    """What is not downloaded stays as the client last saw it."""
    world = World(build, clients)
    fed, wanted = world.federation(APPLE, downloads=2, **STRONG), {}
    for round, cohort in enumerate(ROUNDS, 1):
        wanted[round] = {i: fed.server["wants"][i].tolist() for i in cohort}
        fed.step(cohort)
    check_against(fed, reference(world, wanted=wanted, **STRONG))
    assert differs(personal(fed), personal(world.run(APPLE, **STRONG)))


def test_one_step_by_hand(clients):
    """grad c_i = p_ii g, grad p_ij = <g, c_j>, not scaled by N and not averaged."""
    world = World(plain_net, clients, weight_decay=0, epochs=1, batch_size=50, lr=0.1)
    fed = world.run(APPLE, [(2,)], spread=True, p_lr=0.01, mu=0)
    cores = [weights(world.net(SEED * N + j)) for j in range(N)]
    net = fill(world.net(), sum(cores) / N)
    world.risk(net, 2).backward()
    g = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    close(fed.server["cores"][2], cores[2] - 0.1 / N * g)
    same(state_of(fed, 2)["p"], torch.stack([1 / N - 0.01 * g @ c for c in cores]))


def test_core_models_are_uploaded_not_personal_ones(clients):
    fed = World(plain_net, clients).run(APPLE, **STRONG)
    for i in range(4):
        assert differs(fed.server["cores"][i], state_of(fed, i)["w"])


def test_p_lr_0_keeps_p_at_p0(clients):
    world = World(plain_net, clients)
    fed = world.run(APPLE, ROUNDS[:1], p_lr=0)
    for i in ROUNDS[0]:
        same(state_of(fed, i)["p"], torch.full((N,), 1 / N, dtype=torch.float64))
    fed.step((2,))  # joins later, when three counts are known; the others count as their mean
    n = torch.tensor([23.0, 7, (23 + 7 + 3) / 3, 3, (23 + 7 + 3) / 3], dtype=torch.float64)
    same(state_of(fed, 2)["p"], n / n.sum())


def test_alone_it_is_centralised_training(clients):
    """One client that holds everything: p = 1 and its core model is FedAvg's."""
    one = replace(
        clients,
        names=("all",),
        **{s: replace(clients.split(s), size=(sum(clients.split(s).size),)) for s in ("train", "val", "test")},
    )
    world = World(norm_net, one)
    fed, avg = (world.run(kind, [(0,)] * 3, **more) for kind, more in ((APPLE, {"p_lr": 0}), (FedAvg, {})))
    same(fed.server["cores"][0], avg.server)
    same(personal(fed), personal(avg))


def test_penalty_has_no_half_and_fades(clients):
    """One step from p off p0: lam(r) mu 2 (p - p0); gone after the horizon."""
    world = World(plain_net, clients, lr=1e-12, weight_decay=0, epochs=1, batch_size=50)
    off = torch.tensor([0.5, 0.1, 0.3, 0.0, -0.2], dtype=torch.float64)
    for schedule in ("exponential", "cosine"):
        for rounds in range(4):
            moved = []
            for mu in (0.0, 0.7):
                fed = world.run(APPLE, [(0,)] * rounds, schedule=schedule, mu=mu, horizon=3, p_lr=0.01)
                fed.engine.states[0][0] = state_of(fed, 0) | {"p": off}
                p0 = fed.method.broadcast(fed.server, torch.tensor([0])).shared["p0"]
                fed.step((0,))
                moved.append(state_of(fed, 0)["p"])
            expected = -0.01 * lam(rounds + 1, 3, schedule) * 0.7 * 2 * (off - p0)
            torch.testing.assert_close(moved[1] - moved[0], expected, rtol=1e-6, atol=1e-12)


def test_penalty_holds_p(clients):
    world = World(plain_net, clients)
    off = [
        float((state_of(world.run(APPLE, [(0,)], p_lr=0.02, mu=mu), 0)["p"] - 0.2).norm()) for mu in (0.0, 1.0, 10.0)
    ]
    assert off[0] > off[1] > off[2] > 0


def test_negative_weights_leave_statistics_positive(clients):
    fed = World(norm_net, clients).run(APPLE, **STRONG)
    p = torch.tensor([-3.0, 1, 1, 1, 1], dtype=torch.float64)
    fed.engine.states[0][1] = state_of(fed, 1) | {"p": p}
    fed.step((1,))
    size = fed.method.model.size
    variance = state_of(fed, 1)["w"][size - 8 : size]
    assert (variance > 0).all()
    assert torch.equal(variance, fed.server["cores"][1][size - 8 : size])  # the client's own


def test_downloads_first_what_was_never_had(clients):
    """The authors' code never marks a model as downloaded: its choice stays uniform."""
    fed = World(plain_net, clients).federation(APPLE, downloads=2)
    assert fed.server["wants"][3].tolist() == [4, 0]
    fed.step((3,))
    assert set(fed.server["wants"][3].tolist()) == {1, 2}
    assert state_of(fed, 3)["had"].tolist() == [1, 0, 0, 0, 1]
    fed.step((3,))
    assert state_of(fed, 3)["had"].tolist() == [1, 1, 1, 0, 1]


def test_then_by_the_size_of_p(clients):
    """Probability proportional to base^|p|: drawn often enough, a large weight, of any sign, is wanted most."""
    world = World(plain_net, clients, lr=1e-12, weight_decay=0, epochs=1, batch_size=50)
    fed = world.run(APPLE, [(3,)] * 3, downloads=1, p_lr=0)
    p = torch.tensor([0.2, -5.0, 0.2, 0.2, 0.2], dtype=torch.float64)
    counts, start = torch.zeros(N), fed.server
    for round in range(100, 200):
        fed.engine.states[0][3] = state_of(fed, 3) | {"p": p, "had": torch.ones_like(p)}
        fed.server = start | {"round": torch.tensor(round)}
        fed.step((3,))
        counts[fed.server["wants"][3]] += 1
    assert counts[1] > 95  # base is 20 or more
    mild, engine = torch.zeros(N), fed.engine
    for round in range(200):
        fed.engine.states[0][3] = state_of(fed, 3) | {"p": p / 5, "had": torch.ones_like(p)}
        fed.server = start | {"round": torch.tensor(round % 5)}
        engine.jobs = [replace(engine.jobs[0], method=engine.method.at(seed=round))]
        fed.step((3,))
        mild[fed.server["wants"][3]] += 1
    assert mild[3] == 0
    assert 45 < mild[1] < 90  # base 1.5: 1.5 / (1.5 + 3 * 1.5^0.04) = 0.33 of 200
    assert mild[[0, 2, 4]].min() > 25


def test_limited_downloads_agree_between_engines(clients):
    method = World(plain_net, clients).federation(APPLE, downloads=2, **STRONG).method
    one, block = (play(kind(Job(method, toy_clients(), seed=5))) for kind in (Sequential, Vectorised))
    same(block.server, one.server)
    same(block.states, one.states)


def test_p_never_leaves_the_client(clients):
    """A client's own weights: neither the server nor an upload holds them."""
    fed = World(plain_net, clients).run(APPLE, **STRONG)
    assert set(fed.server) == {"cores", "n", "round", "wants"}
    assert fed.traffic.up_mean == 0


def test_non_participants_keep_their_state(clients):
    fed = World(plain_net, clients).run(APPLE, **STRONG)
    before = {i: {name: t.clone() for name, t in state_of(fed, i).items()} for i in range(N)}
    cores = fed.server["cores"].clone()
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert torch.equal(fed.server["cores"][3:], cores[3:])
    assert torch.equal(personal(fed)[3], before[3]["w"])  # with the copies it had
    assert differs(state_of(fed, 0)["w"], before[0]["w"])
    check_no_alias(fed)


def test_traffic(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    down, up = per_client(world.run(APPLE))
    assert down == N * size + N + 3  # all core models; p0, lam, the round, the client's number
    assert up == size + 1
    down, up = per_client(world.run(APPLE, downloads=2))
    assert down == 2 * size + 2 + N + 3
    assert up == size + 1 + 2
