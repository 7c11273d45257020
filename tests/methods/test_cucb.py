"""The class-imbalance bandit: compositions that are read off models, and cohorts that balance classes."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from public_samples import samples_of
from reference import ORDER, SEED, World, average, close, differs, flat, norm_net, personal, plain_net, same
from torch import nn

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import COHORT, choose, derive
from perfed.core.rounds import Known
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.methods.cucb import CUCB
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.balance import grown, unevenness

N, C = 5, 3


def divergence(shares):
    """Kullback-Leibler, of plain numbers from the same share of each."""
    total = sum(shares)
    return max(0.0, sum(s / total * math.log(s / total * len(shares)) for s in shares if s > 0))


def slopes(world, net):
    """G: the squared length of row y of the last layer's gradient, under the mean loss of class y alone."""
    x, y = samples_of(world.clients)
    out = []
    for c in range(C):
        net = copy.deepcopy(net).eval()
        nn.functional.cross_entropy(net(x[y == c]), y[y == c]).backward()
        out.append(float((net[-1].weight.grad[c] ** 2).sum()))
    return out


def composition(G, b, estimate):
    if estimate == "inverse_root":
        parts = [g**-0.5 for g in G]
    else:
        parts = [math.exp(b * (min(G) if estimate == "scaled" else 1) / g) for g in G]
    return [part / sum(parts) for part in parts]


def chosen(R, visits, sizes, round, m, bonus):
    """The cohort: first whoever was never asked, then by value and by balance."""
    new = [k for k in range(N) if visits[k] == 0]
    if len(new) >= m:
        return [new[place] for place in choose(derive(SEED, COHORT, round), m, len(new))]
    team, rest = list(new), [k for k in range(N) if visits[k]]
    if not team:
        goodness = [1 / (divergence(R[k]) + 1e-12) for k in rest]
        value = [
            g / max(goodness) + bonus * math.sqrt(3 * math.log(round) / (2 * visits[k]))
            for g, k in zip(goodness, rest, strict=True)
        ]
        team = [rest.pop(value.index(max(value)))]
    while len(team) < m:
        pooled = [[sum(sizes[j] * R[j][c] for j in [*team, k] if visits[j]) for c in range(C)] for k in rest]
        distance = [divergence(shares) for shares in pooled]
        team.append(rest.pop(distance.index(min(distance))))
    return sorted(team)


def reference(world, rounds, m, b=3.0, rho=0.99, bonus=0.2, estimate="scaled"):
    w, seen, cohorts = world.net(), [[] for _ in range(N)], []
    sizes = [world.count(i) for i in range(N)]
    for round in range(1, rounds + 1):
        R = []
        for estimates in seen:
            weights = [rho ** (len(estimates) - 1 - j) for j in range(len(estimates))]
            sums = [sum(p * each[c] for p, each in zip(weights, estimates, strict=True)) for c in range(C)]
            R.append([s / sum(weights) for s in sums] if estimates else None)
        cohort = chosen(R, [len(each) for each in seen], sizes, round, m, bonus)
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        for i, net in zip(cohort, nets, strict=True):
            seen[i].append(composition(slopes(world, net), b, estimate))
        w = average(nets, [sizes[i] for i in cohort])
        cohorts.append(cohort)
    return w, cohorts, R


def rounds_of(world, rounds, m=2, **settings):
    fed = world.federation(CUCB, cohort=m, **settings)
    return fed, [fed.step() for _ in range(rounds)]


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (plain_net, {"bonus": 2.0}),
        (norm_net, {"b": 1.0, "rho": 0.5, "bonus": 4.0}),
        (plain_net, {"estimate": "raw", "b": 0.05, "bonus": 2.0}),
        (norm_net, {"estimate": "inverse_root", "bonus": 4.0}),
    ],
)
def test_equals_the_reference(build, settings, clients):
    world = World(build, clients, momentum=0.9)
    fed, cohorts = rounds_of(world, 7, **settings)
    w, expected, _ = reference(world, 7, 2, **settings)
    assert cohorts == expected
    assert len({*map(tuple, cohorts[3:])}) > 1, "a choice that is always the same tests little"
    close(fed.server["w"], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))


@pytest.mark.parametrize("estimate", ["scaled", "inverse_root"])
def test_the_mean_of_estimates_forgets_by_rho(estimate, clients):
    world = World(plain_net, clients)
    fed, _ = rounds_of(world, 5, m=3, rho=0.6, estimate=estimate)
    expected = reference(world, 6, 3, rho=0.6, estimate=estimate)[2]  # as the sixth round begins with
    same(nn.functional.normalize(fed.server["R"], p=1, dim=1), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_with_everybody_in_each_round_it_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    fed, cohorts = rounds_of(world, 3, m=N)
    assert cohorts == [list(range(N))] * 3
    same(fed.server["w"], world.run(FedAvg, [range(N)] * 3).server)


def test_everybody_is_asked_once_before_anybody_twice(clients):
    _, cohorts = rounds_of(World(plain_net, clients), 3, m=2)
    assert len({*cohorts[0]} & {*cohorts[1]}) == 0
    assert {id for cohort in cohorts for id in cohort} == set(range(N))


# ---------------------------------------------------------------------- who is chosen


SIX = [(5, 5, 5, 5, 5, 5), (6, 6, 6, 6, 6, 0), (0, 0, 0, 10, 10, 10), (10, 10, 10, 0, 0, 0)]


def picked(compositions, m, sizes=None, visits=None, available=None, round=9, **settings):
    """Whom `cohort_of` chooses where these compositions are known."""
    R = torch.tensor(compositions, dtype=torch.float64)
    clients, visits = len(R), torch.ones(len(R), dtype=torch.int64) if visits is None else torch.tensor(visits)
    method = CUCB(Model(lambda: nn.Linear(6, R.shape[1])), **settings).at(round=round, cohort=m, population=clients)
    info = Known([str(id) for id in range(clients)], sizes or [30] * clients, range(clients))
    info.available = list(range(clients)) if available is None else available
    server = {"R": nn.functional.normalize(R, p=1, dim=1) * visits[:, None], "visits": visits}
    return method.cohort_of(server, info)


def test_greedy_takes_the_even_client_first_and_misses_the_best_three():
    """Clients 1, 3 and 4 (from 1) would be even together; the rule of the paper ends with 1, 2 and 3."""
    assert picked(SIX, 3) == [0, 1, 2]
    assert grown(torch.tensor(SIX, dtype=torch.float64), [0], [1, 2, 3], 3) == [0, 1, 2]
    even = torch.tensor([SIX[0], SIX[2], SIX[3]]).sum(0)
    assert float(unevenness(even)) == 0.0 < float(unevenness(torch.tensor(SIX[:3]).sum(0)))


def test_a_single_class_is_as_uneven_as_can_be():
    for classes in (2, 6, 10):
        one = torch.eye(classes, dtype=torch.float64)[0]
        assert float(unevenness(one)) == pytest.approx(math.log(classes))
    assert float(unevenness(torch.full((7,), 3.0))) == pytest.approx(0, abs=1e-6)


def test_it_can_starve_clients_and_a_bonus_asks_them_again():
    """Six clients of one class each, two of a kind: one of each kind is enough for ever."""
    kinds = torch.eye(3).repeat(2, 1).tolist()
    assert sorted(picked(kinds, 3, bonus=0.0)) == [0, 1, 2]
    assert sorted(picked(kinds, 3, bonus=0.0, visits=[9, 9, 9, 1, 1, 1])) == [0, 1, 2]
    assert picked(kinds, 3, bonus=0.2, visits=[9, 9, 9, 1, 1, 1])[0] == 3


def test_sums_are_weighted_by_samples():
    """Beside a large client of class 0, three small ones of class 1 are nearer to even than another of class 0."""
    R = [(1, 0), (0, 1), (0, 1), (1, 0)]
    assert picked(R, 3, sizes=[90, 30, 30, 30], bonus=0.0) == [0, 1, 2]
    assert picked(R, 3, sizes=[30, 30, 30, 30], bonus=0.0) == [0, 1, 2]
    assert picked(R, 3, sizes=[30, 90, 30, 30], bonus=0.0) == [0, 2, 3]


def test_whoever_cannot_be_asked_is_not():
    assert picked(SIX, 3, available=[1, 2, 3]) == [1, 2, 3]
    assert 0 not in picked(SIX, 2, available=[1, 2, 3])
    assert picked(SIX, 3, available=[3]) == [3]
    assert picked(SIX, 3, available=[]) == []
    assert set(picked(SIX, 3, available=[0, 1, 2], visits=[1, 1, 0, 0])) == {0, 1, 2}
    assert picked(SIX, 1, available=[0, 1, 2], visits=[1, 1, 0, 0]) == [2]  # who was never asked is first


# ---------------------------------------------------------------------- what is read off a model


def two_of(classes=6, each=60):
    """Clients with two classes of six, in unequal shares, and a balanced public set."""
    draw = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(classes, 6, generator=draw, dtype=torch.float64)
    labels = [torch.tensor([k] * (each * 2 // 3) + [(k + 1) % classes] * (each // 3)) for k in range(classes)]

    def split(y, sizes):
        noise = torch.randn(len(y), 6, generator=draw, dtype=torch.float64)
        return Split(centres[y] + noise, y, sizes)

    y, names = torch.cat(labels), tuple(f"client_{id}" for id in range(classes))
    sizes = tuple(len(labels) for labels in labels)
    shared = torch.arange(classes).repeat(20)
    table = [split(y, sizes) for _ in range(3)]
    return Clients(names, *table, classes, public=split(shared, (len(shared),)))


def guesses(estimate, b=3.0):
    """Compositions after everybody has trained once, and the true ones."""
    clients = two_of()
    world = World(lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)), clients, epochs=10)
    fed = world.federation(CUCB, cohort=6, estimate=estimate, b=b)
    fed.step()
    truth = torch.stack([world.samples(i)[1].bincount(minlength=6).double() / world.count(i) for i in range(6)])
    return nn.functional.normalize(fed.server["R"], p=1, dim=1), truth


def test_every_class_that_a_client_holds_stands_out():
    R, truth = guesses("inverse_root")
    for mine, true in zip(R, truth, strict=True):
        assert mine[true > 0].min() > mine[true == 0].max()


def test_in_units_of_the_smallest_a_guess_is_nearer_to_the_truth_than_raw():
    away = {}
    for estimate, b in (("scaled", 3.0), ("raw", 1.0), ("inverse_root", 3.0)):
        R, truth = guesses(estimate, b)
        away[estimate] = float((R - truth).abs().sum(1).mean()) / 2
    assert away["scaled"] < away["raw"]
    assert away["inverse_root"] < away["raw"]


def test_the_oracle_has_the_true_shares():
    R, truth = guesses("oracle")
    same(R, truth)


def test_a_class_without_public_samples_is_nobodys(clients):
    public = clients.public
    some = public.y > 0
    lacking = replace(clients, public=Split(public.x[some], public.y[some], (int(some.sum()),)))
    fed = World(plain_net, lacking).federation(CUCB, estimate="inverse_root")
    fed.step()
    assert fed.server["R"].isfinite().all()
    assert float(fed.server["R"][:, 0].max()) < 1e-9
    assert float(fed.server["R"].sum()) == pytest.approx(3.0)


# ---------------------------------------------------------------------- around it


def test_who_fails_has_not_been_asked(clients):
    job = Job(World(plain_net, clients).federation(CUCB, cohort=2).method, clients, ORDER, 2)
    fed = Federation(Sequential(job), faults=Faults(dropout=0.5), quorum=0.1)
    answers = [fed.step() for _ in range(6)]
    found = torch.tensor([sum(id in cohort for cohort in answers) for id in range(N)])
    assert torch.equal(fed.server["visits"], found)
    assert 0 < int(found.sum()) < 12
    assert fed.method.notes(fed.server) == {"visits": [int(found.min()), int(found.max())]}


@pytest.mark.parametrize(("estimate", "more"), [("scaled", 0), ("oracle", 3)])
def test_a_model_each_way_and_the_upload_read_client_by_client(estimate, more, clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed, _ = rounds_of(world, 2, m=3, estimate=estimate)
    assert fed.traffic.down == fed.traffic.down_shared == 2 * 3 * size * 8
    assert (fed.traffic.up_mean, fed.traffic.up_own) == (0, 2 * 3 * (size + 1 + more) * 8)  # and its samples
    assert fed.traffic.extra == {}


def test_newcomers_get_the_model(clients):
    fed, _ = rounds_of(World(plain_net, clients), 2)
    down = fed.method.newcomer(fed.server)
    same(fed.method.personalise((), down, None), fed.server["w"])
    same(fed.method.global_model(fed.server), fed.server["w"])
    assert differs(fed.server["w"], fed.method.model.init(SEED))


def bent_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 3, 1), nn.Flatten())


def test_what_is_refused(clients):
    world = World(plain_net, clients)
    for settings, words in (
        ({"b": 0.0}, "b must be above 0"),
        ({"rho": 1.5}, "rho must be at most 1"),
        ({"bonus": -1.0}, "bonus must be at least 0"),
        ({"estimate": "exact"}, "scaled, raw, inverse_root, oracle"),
    ):
        with pytest.raises(Problem, match=words):
            world.federation(CUCB, **settings)
    with pytest.raises(Problem, match="rows of a linear head, and '2' is Conv1d"):
        World(bent_net, clients).federation(CUCB)
    with pytest.raises(Problem, match="CUCB needs labelled public samples"):
        world.federation(CUCB, clients=replace(clients, public=replace(clients.public, labelled=False)))
