"""Astraea: classes that are evened out, and mediators whose model goes from client to client."""

import math
from dataclasses import replace

import pytest
import torch
from reference import ORDER, SETTINGS, World, average, close, flat, norm_net, personal, plain_net, same
from scipy.stats import entropy
from torch import nn

from perfed.contract.toy import task_clients
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import EXTEND, TRAIN, derive, shuffle, uniform
from perfed.core.task import Binary
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.methods.astraea import Astraea
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.balance import balanced_teams, class_rates, resampled
from perfed.training.newcomers import visited

EVERYBODY = range(5)
ROUNDS = (EVERYBODY, (0, 1, 3), (1, 2, 3), (0, 2, 4))  # the first is a survey
NEVER = {"T_a": -1e9, "T_d": 1e9}


@pytest.fixture
def uneven(clients):
    """The toy's clients with few samples of one class and many of another."""
    draw = torch.rand(len(clients.train.y), generator=torch.Generator().manual_seed(3))
    y = (draw > 0.68).long() + (draw > 0.92).long()
    return replace(clients, train=replace(clients.train, y=y))


# ---------------------------------------------------------------------- the reference


def rates(C, T_a, T_d):
    M = sum(C) / len(C)
    S = math.sqrt(sum((c - M) ** 2 for c in C) / (len(C) - 1))
    R = []
    for c in C:
        z = (c - M) / S
        if z < T_a:
            R.append((M - S * math.sqrt(z * T_a)) / c)
        elif z > T_d:
            R.append((M + S * math.sqrt(z * T_d)) / c)
        else:
            R.append(1.0)
    return R


def evened(world, i, R):
    """The samples of client i after its copies have joined and others have gone."""
    x, y = world.samples(i)
    keys = derive(derive(derive(ORDER, EXTEND), i), torch.arange(len(y)))
    draws = uniform(keys, (), torch.float64).tolist()
    kept = [n for n in range(len(y)) if draws[n] < R[y[n]]]
    copies = []
    for n in range(len(y)):
        rate = R[y[n]]
        if rate > 1:
            copies += [n] * (math.floor(rate - 1) + (draws[n] < (rate - 1) % 1))
    return x[kept + copies], y[kept + copies]


def groups(counts, ids, g):
    """Who is in which mediator, by the distance to the uniform distribution as scipy has it."""
    left, found = list(ids), []
    while left:
        if not found or len(found[-1]) == g:
            found.append([])
        pooled = lambda i: sum(counts[k] for k in [*found[-1], i])
        uniform_share = torch.ones(3) / 3
        best = min(left, key=lambda i: entropy((pooled(i) / pooled(i).sum()).numpy(), uniform_share.numpy()))
        left.remove(best)
        found[-1].append(best)
    return found


def batches(data, round, exchange, i, settings):
    x, y = data
    key = derive(ORDER, TRAIN, round, exchange, i, 0, 0)
    for epoch in range(settings["epochs"]):
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        yield from ((x[rows], y[rows]) for rows in order.split(settings["batch_size"]))


def reference(world, g, E_m, T_a, T_d):
    counts = [world.samples(i)[1].bincount(minlength=3).double() for i in EVERYBODY]
    R = rates(sum(counts).tolist(), T_a, T_d)
    data = [evened(world, i, R) for i in EVERYBODY]
    expected = [count * torch.tensor(R, dtype=torch.float64) for count in counts]
    w, seen = world.net(), []
    for round, cohort in enumerate(ROUNDS[1:], 2):
        models, samples = [], []
        for group in groups(expected, cohort, g):
            v = w
            for turn in range(E_m):
                for place, i in enumerate(group):
                    v = world.train(v, batches(data[i], round, turn * g + place, i, world.settings))
            models.append(v)
            samples.append(sum(len(data[i][1]) for i in group))
            seen.append(group)
        w = average(models, samples)
    return w, R, expected, [len(y) for _, y in data], seen


@pytest.mark.parametrize("E_m", [1, 2])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, E_m, uneven):
    world, settings = World(build, uneven, momentum=0.9, batch_size=6), {"T_a": -0.05, "T_d": 0.3}
    fed = world.run(Astraea, ROUNDS, g=2, E_m=E_m, **settings)
    w, R, expected, sizes, seen = reference(world, 2, E_m, **settings)
    assert max(R) > 2 > 1 > min(R)  # the case has copies, more than one of a sample, and samples that go
    assert seen != [[0, 1], [3], [1, 2], [3], [0, 2], [4]]  # nor are groups those of the order of clients
    same(fed.server["R"], torch.tensor(R, dtype=torch.float64))
    same(fed.server["counts"], torch.stack(expected))  # by which groups are made
    assert fed.engine.jobs[0].clients.train.size == tuple(sizes)
    close(fed.server["w"], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))


# ---------------------------------------------------------------------- what it is without its parts


def later(world, kind, **more):
    """A method that goes on where the survey was the first round."""
    fed = world.federation(kind, **more)
    fed.round = 1
    for cohort in ROUNDS[1:]:
        fed.step(cohort)
    return fed


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_mediators_of_one_client_without_rebalancing_are_fedavg(build, uneven):
    world = World(build, uneven, momentum=0.9, batch_size=8)
    alone = world.run(Astraea, ROUNDS, g=1, **NEVER)
    same(alone.server["w"], later(world, FedAvg).server)
    assert (world.run(Astraea, ROUNDS, g=2, **NEVER).server["w"] - alone.server["w"]).abs().max() > 1e-3
    assert not any(each.made or not each.kept.all() for each in alone.engine.extended[0].known.values())


def test_one_mediator_is_sgd_that_goes_from_client_to_client(uneven):
    world = World(plain_net, uneven, epochs=1)
    fed = world.run(Astraea, ROUNDS[:2], g=3, **NEVER)
    counts = [world.samples(i)[1].bincount(minlength=3).double() for i in EVERYBODY]
    (group,) = groups(counts, ROUNDS[1], 3)
    net = world.net()
    optimiser = torch.optim.SGD(net.parameters(), lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"])
    for place, i in enumerate(group):
        for x, y in batches(world.samples(i), 2, place, i, world.settings):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
    close(fed.server["w"], flat(net))


def test_the_survey_trains_nobody_and_comes_again_where_too_few_answered(uneven):
    world = World(plain_net, uneven)
    fed = world.federation(Astraea, g=2)
    start = fed.server["w"].clone()
    fed.quorum = 2.0  # nobody can reach it
    fed.step()
    assert not fed.server["counts"].any()
    fed.quorum = 0.5
    for _ in range(2):
        fed.step()
        assert fed.server["counts"].any()
    assert not torch.equal(fed.server["w"], start)
    assert fed.round == 3


# ---------------------------------------------------------------------- rebalancing


def test_rates_by_hand():
    C = torch.tensor([100.0, 100, 400], dtype=torch.float64)
    M, S = 200, math.sqrt(30000)
    R = class_rates(C, -0.5, 0.5)
    assert R[0] == pytest.approx((M - S * math.sqrt(0.57735 * 0.5)) / 100, rel=1e-5)
    assert [round(float(r), 4) for r in R] == [1.0694, 1.0694, 0.829]
    z = (C * R - M) / S
    assert z[2] == pytest.approx(math.sqrt(1.154700538 * 0.5))  # the geometric mean of score and threshold
    assert z[0] == pytest.approx(-math.sqrt(0.577350269 * 0.5))


def test_rates_are_continuous_at_the_threshold():
    C = torch.tensor([100.0, 100, 400], dtype=torch.float64)
    for low, high in ((-0.5773502, 1.1547005), (-0.5773503, 1.1547006)):  # on both sides of the scores
        same(class_rates(C, low, high).round(decimals=5), torch.ones(3, dtype=torch.float64))


def test_equal_classes_and_classes_that_nobody_has_stay():
    assert class_rates(torch.tensor([5.0, 5, 5]), -0.1, 0.1).tolist() == [1, 1, 1]
    R = class_rates(torch.tensor([0.0, 10, 50]), -0.1, 0.1)
    assert R[0] == 1
    assert R[1] > 1 > R[2]


def test_a_threshold_of_3_takes_nothing_from_ten_classes():
    """A score among K numbers is at most (K - 1) / sqrt(K)."""
    C = torch.zeros(10, dtype=torch.float64)
    C[0] = 1e6
    assert (C[0] - C.mean()) / C.std() == pytest.approx(9 / math.sqrt(10))
    assert class_rates(C, -1 / 3, 3.0)[0] == 1
    assert class_rates(C, -1.0, 1.0)[0] < 1


def resample(rate, n=4000, most=4):
    x = torch.arange(n, dtype=torch.float64)[:, None].expand(-1, most)
    draw = uniform(derive(torch.tensor(1), torch.arange(n)), (), torch.float64)
    rate = torch.full((n,), rate, dtype=torch.float64)
    return resampled(x, torch.zeros(n).long(), draw, rate, torch.ones(n).bool())


def test_a_rate_above_2_makes_several_copies():
    """Public code makes one copy at most, whatever the rate is."""
    made = resample(3.4).made.view(-1, 4).sum(1)
    assert set(made.tolist()) == {2, 3}
    assert made.double().mean() == pytest.approx(2.4, abs=0.03)
    assert resample(3.4).keep.all()
    assert set(resample(3.0).made.view(-1, 4).sum(1).tolist()) == {2}


def test_a_rate_below_1_keeps_that_share():
    extension = resample(0.3)
    assert extension.keep.double().mean() == pytest.approx(0.3, abs=0.03)
    assert not extension.made.any()
    assert resample(1.0).keep.all()
    assert not resample(1.0).made.any()


def test_a_client_keeps_a_sample():
    few = torch.tensor([0.9, 0.8, 0.0])
    real = torch.tensor([True, True, False])
    extension = resampled(torch.zeros(3, 2, 1), torch.zeros(3).long(), few, torch.full((3,), 0.01), real)
    assert extension.keep.tolist() == [True, False, False]
    assert not extension.made.any()


def test_classes_get_at_most_so_many_copies(uneven):
    fed = World(plain_net, uneven).run(Astraea, ROUNDS[:1], T_a=-0.05, T_d=0.3, most=0.5)
    assert float(fed.server["R"].max()) == 1.5


def images(seed=0):
    """Clients with images of bytes, and a class that is rare."""
    draw = torch.Generator().manual_seed(seed)

    def split(sizes):
        n = sum(sizes)
        x = torch.randint(0, 256, (n, 1, 6, 6), generator=draw, dtype=torch.uint8)
        return Split(x, (torch.rand(n, generator=draw) > 0.85).long(), sizes)

    return Clients(("a", "b", "c"), split((30, 20, 25)), split((0, 0, 0)), split((4, 4, 4)), 2)


def test_copies_of_images_are_numbers_between_pixels():
    """Public code rounds the pixels of copies to bytes again."""
    model = Model(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), dtype=torch.float64)
    method = Astraea(model, epochs=1, T_a=-0.01)
    engine = Sequential(Job(method, images(), 5))
    fed = Federation(engine)
    fed.step()
    fed.step()
    train, known = engine.jobs[0].clients.train, engine.extended[0].known
    made = []
    for i in range(3):
        end = train.start[i] + train.size[i]
        made.append(train.x[end - known[i].made : end])
        assert (train.y[end - known[i].made : end] == 1).all()
    made = torch.cat(made)
    assert len(made) > 20
    assert 0 <= float(made.min()) < float(made.max()) <= 1
    assert ((made * 255) % 1 > 1e-6).double().mean() > 0.3
    own = images().train.x.double() / 255
    assert all((copy != own).flatten(1).any(1).all() for copy in made)


# ---------------------------------------------------------------------- mediators


def test_a_mediator_takes_whoever_brings_it_nearest_to_even():
    """In public code the distance is never updated, so that the last client is taken whoever it is."""
    draw = torch.Generator().manual_seed(0)
    for size in (2, 3, 5):
        counts = torch.randint(0, 40, (13, 3), generator=draw).double()
        assert balanced_teams(counts, size) == groups(list(counts), range(13), size)
    first = [team[0] for team in balanced_teams(counts, 3)]
    assert first != [team[-1] for team in balanced_teams(counts, 3)]


def test_even_is_uniform_and_not_what_all_have_together():
    """Public code compares with the distribution of everybody's samples."""
    counts = torch.tensor([[8.0, 1.0, 1.0], [80.0, 10.0, 10.0], [3.0, 4.0, 3.0]])
    assert balanced_teams(counts, 1)[0] == [2]


def test_groups_are_whole_but_for_the_last():
    teams = balanced_teams(torch.rand(11, 4, generator=torch.Generator().manual_seed(0)), 4)
    assert [len(team) for team in teams] == [4, 4, 3]
    assert sorted(i for team in teams for i in team) == list(range(11))
    assert balanced_teams(torch.zeros(3, 4), 2) == [[0, 1], [2]]  # of whom nothing is known


def test_groups_are_made_anew_of_each_rounds_clients(uneven):
    world, places = World(plain_net, uneven), []
    fed = world.federation(Astraea, g=2)
    for cohort in ROUNDS:
        fed.step(cohort)
        places.append(fed.server["place"].tolist())
    for cohort, place in zip(ROUNDS[1:], places[1:], strict=True):
        assert sorted(place) == [-1, -1, 0, 1, 2]
        assert {i for i in EVERYBODY if place[i] >= 0} == {*cohort}


def test_who_fails_is_passed_over(uneven):
    world = World(plain_net, uneven)
    method = Astraea(Model(plain_net, dtype=torch.float64), **SETTINGS, g=2)
    fed = Federation(Sequential(Job(method, world.clients, ORDER)), faults=Faults(dropout=0.4), quorum=0.1)
    short = 0
    for _ in range(6):
        answered = fed.step()
        sizes, place = fed.engine.jobs[0].clients.train.size, fed.server["place"].tolist()
        if not fed.server["n"].any():  # the survey
            continue
        expected = [sum(sizes[i] for i in answered if place[i] // 2 == mediator) for mediator in range(3)]
        assert fed.server["n"].tolist() == expected
        assert fed.server["w"].isfinite().all()
        short += len(answered) < 5
    assert short


# ---------------------------------------------------------------------- messages


def test_counts_once_and_a_model_each_way_at_every_stop(uneven):
    world = World(norm_net, uneven)
    fed, P = world.federation(Astraea, g=2, E_m=2), len(flat(world.net()))
    fed.step()
    assert (fed.traffic.down, fed.traffic.up) == (0, 5 * 3 * 8)
    assert fed.traffic.extra == {"mediators_down": 0, "mediators_up": 0}
    for round, cohort in enumerate(ROUNDS[1:], 1):
        fed.step(cohort)
        stops = round * 3 * 2
        assert fed.traffic.down == stops * (P + 3) * 8  # with the rates of three classes
        assert fed.traffic.up == (5 * 3 + stops * (P + 1)) * 8  # with a number of samples
        assert fed.traffic.extra == {"mediators_down": round * 2 * P * 8, "mediators_up": round * 2 * P * 8}


def test_a_newcomer_gets_the_model_and_trains_on_its_own_samples(uneven, clients):
    world = World(plain_net, uneven)
    fed = world.run(Astraea, ROUNDS, g=2, T_a=-0.05)
    guest = Federation(Sequential(Job(visited(fed.method, fed.server), clients, ORDER)))
    guest.step()
    assert not guest.engine.extended[0].known
    found = {}
    guest.evaluate(save=found.__setitem__)
    for models in found.values():
        same(models["personal"], fed.server["w"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"T_a": 0.5}, "T_a must be at most 0"),
        ({"T_d": -1.0}, "T_d must be at least 0"),
        ({"g": 0}, "g must be at least 1"),
        ({"E_m": 0}, "E_m must be at least 1"),
        ({"most": 0.0}, "most must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words, model):
    with pytest.raises(Problem, match=words):
        Astraea(model, **wrong)


def test_other_tasks_are_refused():
    assert task_clients(Binary()).classes == 0
    with pytest.raises(Problem, match="astraea counts samples of classes, and this task is binary"):
        Astraea(Model(lambda: plain_net(), dtype=torch.float64, task=Binary()))
