"""L2GD: local steps and steps towards the mean, by coins that all clients share."""

import copy
import math

import pytest
import torch
from conftest import make_clients
from reference import (
    NEVER,
    ROUNDS,
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
)

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.methods.fedavg import FedAvg
from perfed.methods.l2gd import L2GD
from perfed.methods.local import Local

ALL = ((0, 1, 2, 3, 4),) * 4
FEW = {"p": 0.5, "lam": 5.0}  # theta 0.25
LEAP = {"p": 0.5, "lam": 20.0}  # theta 1, with the rate of 0.05


def lengths(fed, round):
    return fed.method.at(round=round).lengths()


def towards(nets, i, centre, theta):
    """(1 - theta) x_i + theta centre, of parameters and statistics."""
    out = copy.deepcopy(nets[i])
    pairs = zip(nets[i].state_dict().items(), centre, strict=True)
    out.load_state_dict({n: (1 - theta) * t + theta * c if t.is_floating_point() else t for (n, t), c in pairs})
    return out


def mean(nets):
    states = [list(net.state_dict().values()) for net in nets]
    return [sum(each) / len(nets) for each in zip(*states, strict=True)]


def reference(world, runs, theta, rounds=ALL):
    """Coin by coin: so many averaging steps, each with a mean of its own, then so many local ones; all from plain SGD.

    Where some take part, xbar is what their mean was when they met last.
    """
    nets = [world.net() for _ in range(5)]
    xbar = mean(nets)
    for round, (cohort, (averaging, local)) in enumerate(zip(rounds, runs, strict=True), 1):
        for _ in range(averaging):
            if len(cohort) == 5:
                xbar = mean(nets)  # which stays as it is: all pull towards it alike
            pulled = {i: towards(nets, i, xbar, theta) for i in cohort}
            nets = [pulled.get(i, net) for i, net in enumerate(nets)]
        for i in cohort:
            nets[i] = world.train(nets[i], world.steps(i, round, local))
        xbar = mean([nets[i] for i in cohort])
    return nets, xbar


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
@pytest.mark.parametrize("rounds", [ALL, ROUNDS * 2], ids=["all", "some"])
def test_equals_a_simulation_coin_by_coin(build, momentum, rounds, clients):
    """A momentum begins anew after every averaging step."""
    world = World(build, clients, momentum=momentum)
    fed = world.run(L2GD, rounds, **FEW)
    runs = [lengths(fed, round) for round in range(1, len(rounds) + 1)]
    nets, _ = reference(world, runs, fed.method.theta, rounds)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i), flat(nets[i]))
    here = torch.stack([flat(nets[i]) for i in rounds[-1]])
    close(fed.server, here.mean(0))
    assert len({local for _, local in runs}) > 1
    assert max(averaging for averaging, _ in runs) > 1


@pytest.mark.parametrize("p", [0.1, 0.3, 0.6])
def test_lengths_have_the_law_of_coins_that_are_thrown_one_by_one(p):
    """Runs of equal coins in 100,000 throws and 4,000 rounds: shares of each length, to a few standard errors."""
    method = L2GD(Model(plain_net), p=p, lam=0.01)
    drawn = torch.tensor([method.at(seed=s, round=r).lengths() for s in range(4) for r in range(1, 1001)])
    coins = (torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < p).long()
    value, count = coins.unique_consecutive(return_counts=True)
    for column, averaging in ((0, 1), (1, 0)):
        thrown, found = count[value == averaging][1:-1], drawn[:, column]
        stay = p if averaging else 1 - p
        for length in range(1, 6):
            share = (1 - stay) * stay ** (length - 1)
            for sample in (thrown, found):
                error = 3.5 * math.sqrt(share * (1 - share) / len(sample))
                assert float((sample == length).double().mean()) == pytest.approx(share, abs=error)
    between = torch.corrcoef(drawn.T.double())[0, 1]
    assert abs(float(between)) < 0.06  # the two runs of a round do not know of each other


def test_a_round_is_a_communication_of_which_k_steps_have_p_times_1_minus_p_k():
    method, rounds, p = L2GD(Model(plain_net), p=0.2, lam=0.01), 3000, 0.2
    steps = sum(sum(method.at(seed=1, round=round).lengths()) for round in range(1, rounds + 1))
    assert rounds == pytest.approx(p * (1 - p) * steps, rel=0.05)


def test_both_steps_together_are_an_unbiased_gradient():
    """p theta (x - xbar) + (1 - p) lr g is lr (1 - p) times g + lambda (x - xbar)."""
    for p, lam, lr in ((0.1, 0.5, 0.1), (0.4, 0.03, 0.2)):
        method = L2GD(Model(plain_net), p=p, lam=lam, lr=lr)
        assert p * method.theta == pytest.approx((1 - p) * lr * lam)


def test_coins_follow_from_seed_and_round_alone(clients):
    fed = World(plain_net, clients).federation(L2GD)
    method = fed.method
    draws = lambda method: [method.at(round=round).lengths() for round in range(1, 30)]
    assert draws(method) == draws(L2GD(Model(norm_net), lr=0.01, p=method.p).at(seed=method.context.seed))
    assert draws(method) != draws(method.at(seed=6))
    assert len(set(draws(method))) > 10


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_lambda_0_is_local_with_as_many_steps(build, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(L2GD, ALL, lam=0.0, p=0.2)
    nets = [world.net() for _ in range(5)]
    for round in range(1, 5):
        nets = [world.train(net, world.steps(i, round, lengths(fed, round)[1])) for i, net in enumerate(nets)]
    for theta, net in zip(personal(fed), nets, strict=True):
        close(theta, flat(net))
    fixed = world.run(L2GD, lam=0.0, coins="fixed")
    same(personal(fixed), personal(world.run(Local)))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_theta_1_is_fedavg_with_equal_weights(build):
    """All samples alike in number: there FedAvg's weights are equal, too."""
    world = World(build, make_clients((11,) * 5))
    leap, avg = world.run(L2GD, ALL, coins="fixed", **LEAP), world.run(FedAvg, ALL)
    assert leap.method.theta == pytest.approx(1)
    same(leap.server, avg.server)


def test_the_servers_model_is_the_mean_of_all_and_weights_are_equal(clients):
    """Sizes differ from 3 to 41 samples."""
    fed = World(plain_net, clients).federation(L2GD, **FEW)
    for cohort in ALL:
        fed.step(cohort)
        same(fed.server, personal(fed).mean(0))


def test_who_does_not_take_part_stays(clients):
    fed = World(plain_net, clients).federation(L2GD, **FEW)
    fed.step((0, 1, 3))
    before = {i: state_of(fed, i).clone() for i in range(5)}
    fed.step((1, 2, 3))
    check_kept(fed, before, (0, NEVER))
    assert differs(state_of(fed, 1), before[1])


def test_fixed_lengths_are_one_averaging_step_and_all_epochs(clients):
    world = World(plain_net, clients)
    fed = world.run(L2GD, ALL, coins="fixed", **FEW)
    assert [lengths(fed, round) for round in range(1, 5)] == [(1, None)] * 4
    nets, xbar = [world.net() for _ in range(5)], mean([world.net()])
    for round in range(1, 5):
        pulled = [towards(nets, i, xbar, fed.method.theta) for i in range(5)]
        nets = [world.train(net, world.batches(i, round)) for i, net in enumerate(pulled)]
        xbar = mean(nets)
    for theta, net in zip(personal(fed), nets, strict=True):
        close(theta, flat(net))
    assert fed.method.notes(fed.server) == {}


def test_a_model_goes_each_way_and_how_often_it_is_pulled(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(L2GD, **FEW)
    assert per_client(fed) == (size + 1, size)
    assert fed.method.notes(fed.server) == dict(zip(("averaging_steps", "local_steps"), lengths(fed, 3), strict=True))


@pytest.mark.parametrize("theta", [{"lam": 0.0}, FEW, LEAP])
def test_a_newcomer_begins_at_the_mean(theta, clients):
    """It has met nobody, so what it has is the initial model; with lambda = 0 it stays there, as Local does."""
    fed = World(plain_net, clients, weight_decay=0.0).run(L2GD, **theta)
    down, start = fed.method.newcomer(fed.server), fed.method.init_client()
    keep = (1 - fed.method.theta) ** down.shared["j"]
    same(down.shared["xbar"] + keep * (start - down.shared["xbar"]), fed.server if fed.method.theta else start)


def test_a_step_that_would_leap_over_means_is_refused():
    L2GD(Model(plain_net), lr=0.1, lam=1.0, p=1 / 11)  # theta 1
    with pytest.raises(Problem, match=r"l2gd needs lr \* lam \* \(1 - p\) / p of at most 1, not 1\.9"):
        L2GD(Model(plain_net), lr=0.1, lam=1.0, p=0.05)
    for wrong in ({"p": 0}, {"p": 1}, {"lam": -1}, {"coins": "flipped"}):
        with pytest.raises(Problem, match=rf"l2gd\.{next(iter(wrong))} must be"):
            L2GD(Model(plain_net), **wrong)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(L2GD, **FEW))
