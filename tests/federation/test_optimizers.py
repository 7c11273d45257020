"""Optimisers at the server: the papers' formulas, what they leave alone, abandoned rounds, groups and parts."""

import math
from dataclasses import dataclass

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Cohort, Up
from perfed.core.model import Model
from perfed.core.rounds import Phase
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation, step
from perfed.federation.optimizers import ServerOptimizer
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedrep import FedRep
from perfed.methods.ifca import IFCA
from perfed.methods.lgfedavg import LGFedAvg

KINDS = ("momentum", "adam", "yogi", "adagrad")
SETTINGS = {"rate": 0.3, "momentum": 0.8, "beta2": 0.7, "tau": 0.02}


def by_hand(kind, deltas, rate, momentum, beta2, tau):
    """The sum of a server's steps for one number's changes, with plain numbers, as the papers print them."""
    moved, m, v = 0.0, 0.0, tau**2
    for delta in deltas:
        if kind == "momentum":
            m = momentum * m + delta
            moved += rate * m
            continue
        m = momentum * m + (1 - momentum) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - beta2) * delta**2 * math.copysign(1, v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        moved += rate * m / (math.sqrt(v) + tau)
    return moved


def method(kind=FedAvg, build=toy.plain_net, **settings):
    usual = {"epochs": 1, "batch_size": 5, "lr": 0.1}
    return kind(Model(build, dtype=torch.float64), **{**usual, **settings})


def federation(made, optimizer=None, engine=Sequential, clients=None, **settings):
    return Federation(engine(Job(made, clients or toy.toy_clients(), seed=5)), optimizer=optimizer, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_papers_formulas(kind):
    made, optimizer = method(), ServerOptimizer(kind, **SETTINGS)
    deltas = torch.randn(4, made.model.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.1
    deltas[:, made.model.size :] = 0
    total, moments = torch.zeros_like(deltas[0]), {}
    for delta in deltas:
        cohort = Cohort(torch.arange(2), delta, (), torch.tensor(9.0).double(), 2)
        moments = optimizer.moments(made, cohort, moments)
        stepped, moments = optimizer.step(made, cohort, moments)
        total = total + stepped.mean
    for number in (0, 17, made.model.P - 1):
        expected = by_hand(kind, deltas[:, number].tolist(), **SETTINGS)
        assert float(total[number]) == pytest.approx(expected, rel=1e-12)
    assert not total[made.model.size :].any()  # padding


@pytest.mark.parametrize("kind", KINDS)
def test_a_federations_rounds(kind):
    """FedAvg's server moves by the steps of the mean changes that it would have added; statistics by the plain mean."""
    made, optimizer = method(build=toy.norm_net), ServerOptimizer(kind, **SETTINGS)
    stepped = federation(made, optimizer)
    weights, moved, deltas = made.model.weights.mask, [], []
    for cohort in toy.COHORTS:
        before = stepped.server
        plain = federation(made, server=before, round=stepped.round)
        plain.step(cohort)
        stepped.step(cohort)
        deltas.append(plain.server - before)
        moved.append(stepped.server - before)
        torch.testing.assert_close(moved[-1][~weights], deltas[-1][~weights], rtol=0, atol=0)
    for number in (0, 30, made.model.P - 1):
        expected = by_hand(kind, [float(delta[number]) for delta in deltas], **SETTINGS)
        assert float(sum(moved)[number]) == pytest.approx(expected, rel=1e-9)


def test_momentum_of_nothing_is_the_plain_mean():
    made = method(build=toy.norm_net)
    same = checks.play(
        Sequential(Job(made, toy.toy_clients())), federation=federation(made, ServerOptimizer("momentum", 1.0, 0.0))
    )
    torch.testing.assert_close(
        same.server, checks.play(Sequential(Job(made, toy.toy_clients(), seed=5))).server, rtol=0, atol=0
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_an_abandoned_round_leaves_the_moments(lazy, monkeypatch):
    made, optimizer = method(), ServerOptimizer("adam", **SETTINGS)
    whole, broken = (federation(made, optimizer, lazy=lazy) for _ in range(2))
    for cohort in toy.COHORTS[:2]:
        whole.step(cohort)
        broken.step(cohort)
    local = FedAvg.local

    def diverges(self, client, down, data):
        state, up = local(self, client, down, data)
        return state, Up(mean=up.mean * torch.nan)

    before = (broken.server.clone(), broken.moments)
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "local", diverges)
        broken.step(toy.COHORTS[2])
    assert len(broken.look()) == 3
    assert checks.difference((broken.server, broken.moments), before) == 0
    assert checks.difference((broken.server, broken.moments), (whole.server, whole.moments)) == 0


@dataclass(frozen=True)
class Twice(FedAvg):
    """Two exchanges in a round, in the second of which everybody fails where `fails` says so."""

    fails: bool = False

    def phase(self, server):
        return Phase(exchanges=2)

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "k": torch.zeros(1)}

    def local(self, client, down, data):
        w = self.descend(down.shared["w"], data)
        bad = torch.where(down.shared["k"].sum() % 2 > 0, torch.nan, 1.0) if self.fails else 1.0
        return client, Up(mean=(w - down.shared["w"]) * bad)

    def aggregate(self, server, cohort):
        return {"w": server["w"] + cohort.mean, "k": server["k"] + 1}

    def personalise(self, client, down, data):
        return down.shared["w"]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_round_that_is_abandoned_in_its_second_exchange(lazy, rounds):
    optimizer = ServerOptimizer("momentum", **SETTINGS)
    begun = federation(method(Twice), optimizer, lazy=lazy)
    for _ in range(rounds):
        begun.step(toy.COHORTS[0])
    before = (begun.server, begun.moments or {"m": [torch.zeros_like(begun.server["w"])]})
    failing = federation(method(Twice, fails=True), optimizer, lazy=lazy, server=begun.server, round=begun.round)
    failing.moments = begun.moments
    failing.step(toy.COHORTS[1])
    failing.look()
    assert checks.difference((failing.server, failing.moments), before) == 0


def test_a_group_that_nobody_is_in_stays_as_it_is():
    grouped = federation(method(IFCA, clusters=4), ServerOptimizer("momentum", **SETTINGS))
    grouped.step(toy.COHORTS[0])
    for cohort in toy.COHORTS[1:]:
        before, m = grouped.server["models"], grouped.moments["m"][0]
        grouped.step(cohort)
        empty = grouped.server["samples"] == 0
        assert empty.any()  # there are three clients
        assert torch.equal(grouped.server["models"][empty], before[empty])
        assert torch.equal(grouped.moments["m"][0][empty], m[empty])
        torch.testing.assert_close((grouped.server["models"] - before)[~empty], 0.3 * grouped.moments["m"][0][~empty])


def test_a_part_of_a_model_with_statistics():
    """FedRep sends its body: the body's weights step, its statistics are averaged."""
    made, optimizer = method(FedRep, toy.norm_net, head_epochs=1), ServerOptimizer("adam", **SETTINGS)
    stepped, plain = federation(made, optimizer), federation(made)
    start = plain.server
    stepped.step(toy.COHORTS[0])
    plain.step(toy.COHORTS[0])
    weights = made.model.weights.mask[made.model.body.index]
    assert 0 < weights.sum() < len(weights) < made.model.width
    assert torch.equal(stepped.server[~weights], plain.server[~weights])
    expected = [by_hand("adam", [float(delta)], **SETTINGS) for delta in (plain.server - start)[weights][:5]]
    assert (stepped.server - start)[weights][:5].tolist() == pytest.approx(expected, rel=1e-9)


def test_moments_begin_anew_where_another_part_is_sent():
    warm = federation(method(LGFedAvg, warmup=1), ServerOptimizer("momentum", **SETTINGS))
    for cohort in toy.COHORTS:
        warm.step(cohort)
        (m,) = warm.moments["m"]
        assert len(m) == (warm.method.model.width if warm.round == 1 else len(warm.method.sent))


def test_engines_agree_and_a_saved_run_goes_on():
    made, optimizer = method(momentum=0.5), ServerOptimizer("yogi", **SETTINGS)
    expected = federation(made, optimizer)
    vectorised = federation(made, optimizer, Vectorised, lazy=True)
    half = federation(made, optimizer)
    for number, cohort in enumerate(toy.COHORTS):
        step([expected], [cohort])
        step([vectorised], [cohort])
        if number == 1:
            moments, half = half.moments, federation(made, optimizer, server=half.server, round=1)
            half.moments = moments
        step([half], [cohort])
    assert checks.difference((vectorised.server, vectorised.moments), (expected.server, expected.moments)) < 1e-12
    assert checks.difference((half.server, half.moments), (expected.server, expected.moments)) == 0


@dataclass(frozen=True)
class Scalars(FedAvg):
    """Its mean holds a change, and a number that is none."""

    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        return client, Up(mean={"steps": data.steps().double(), "w": w - down.shared})

    def aggregate(self, server, cohort):
        assert float(cohort.mean["steps"]) >= 1
        return server + cohort.mean["w"]


@dataclass(frozen=True)
class OnlyHead(FedAvg):
    """It sends its head and does not say so."""

    def local(self, client, down, data):
        return client, Up(mean=self.model.head.take(self.descend(down.shared, data) - down.shared))

    def aggregate(self, server, cohort):
        return self.model.head.add(server, cohort.mean)


def test_what_is_no_change_of_a_model():
    optimizer = ServerOptimizer("momentum", **SETTINGS)
    mixed, plain = federation(method(Scalars), optimizer), federation(method(), optimizer)
    for cohort in toy.COHORTS:
        mixed.step(cohort)
        plain.step(cohort)
    assert torch.equal(mixed.server, plain.server)
    with pytest.raises(Problem, match=r"no change of a model in the Up.mean of OnlyHead: .* that its `sent` returns$"):
        federation(method(OnlyHead), optimizer).step(toy.COHORTS[0])


def test_what_nobody_weighs_stays_as_it_is():
    """Sums of weights for each tensor, or each of its numbers: what nobody sent has neither a step nor a moment."""
    made, optimizer = method(), ServerOptimizer("momentum", **SETTINGS)
    delta = torch.ones(made.model.width, dtype=torch.float64)
    there = (torch.arange(made.model.width) % 2).double()
    moments = {"m": [delta.clone(), delta.clone()]}
    cohort = Cohort(torch.arange(2), {"a": delta * there, "b": delta}, (), {"a": there, "b": there[1]}, 2)
    stepped, after = optimizer.step(made, cohort, moments)
    weights = made.model.weights.mask
    expected = torch.where(weights & (there > 0), 0.3 * (0.8 + 1), delta * there)
    torch.testing.assert_close(stepped.mean["a"], expected)
    assert torch.equal(after["m"][0][there == 0], delta[there == 0])
    torch.testing.assert_close(stepped.mean["b"], torch.where(weights, 0.3 * (0.8 + 1), delta))


@dataclass(frozen=True)
class Asks(OnlyHead):
    """A round in which clients are asked for their sizes alone, then FedAvg's."""

    def phase(self, server):
        return Phase("ask") if self.context.round == 2 else Phase()

    def local_ask(self, client, down, data):
        return client, Up(mean=data.size.double().reshape(1))

    def local(self, client, down, data):
        return FedAvg.local(self, client, down, data)

    def aggregate(self, server, cohort):
        return server if self.context.phase else server + cohort.mean


def test_a_phase_may_send_something_else():
    asks = federation(method(Asks), ServerOptimizer("momentum", **SETTINGS))
    asks.step(toy.COHORTS[0])
    before = asks.moments
    asks.step(toy.COHORTS[1])
    assert checks.difference(asks.moments, before) == 0
    asks.step(toy.COHORTS[2])
    assert checks.difference(asks.moments, before) > 0
