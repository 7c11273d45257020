"""AL2GD: local steps, steps to the mean of a known cluster and to that of all, by coins."""

import copy
import dataclasses
import math

import pytest
import torch
from reference import (
    World,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    personal,
    plain_net,
    same,
    state_of,
)

from perfed.core.clients import SPLITS, Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import derive
from perfed.data import load
from perfed.data.config import DataConfig
from perfed.methods.al2gd import AL2GD
from perfed.methods.l2gd import L2GD
from perfed.methods.local import Local
from perfed.methods.shared.coins import turns

OF = (0, 0, 0, 1, 1)  # i * 2 // 5
N = torch.tensor([3.0, 2.0], dtype=torch.float64)
QUICK = {"lam": 1.0, "between": 2.0, "p0": 0.05, "p": 0.5}  # a 2 / 5 and 1 / 2
ALL = tuple(range(5))


def moved(net, terms):
    """A network with the sum of others' tensors, each with its factor."""
    out = copy.deepcopy(net)
    states = [(share, other.state_dict()) for share, other in terms]
    out.load_state_dict({
        name: sum(share * state[name] for share, state in states) if t.is_floating_point() else t
        for name, t in net.state_dict().items()
    })  # fmt: skip
    return out


class Simulation:
    """One move after another, as they are described: the means are those of the models there are at the time."""

    def __init__(self, world, lines, lam, between, p0, p, tau=0.0):
        self.world, self.lines, self.p0, self.p, self.gamma = world, lines, p0, p, lam
        self.eta, self.tau = world.settings["lr"] * (1 - p0) * (1 - p), tau
        self.a = [between / (between + lam * OF.count(j)) for j in (0, 1)]
        self.t, self.round = [world.net() for _ in ALL], 0

    def mean(self, members):
        return moved(self.t[0], [(1 / len(members), self.t[i]) for i in members])

    def of(self, j):
        return [i for i in ALL if OF[i] == j]

    def all_move(self):
        own = [self.mean(self.of(j)) for j in (0, 1)]
        weights = [self.a[j] * self.gamma * OF.count(j) for j in (0, 1)]
        t_0 = moved(own[0], [(w / sum(weights), net) for w, net in zip(weights, own, strict=True)])
        for i in ALL:
            a, k = self.a[OF[i]], self.eta * self.gamma / self.p0
            to_all, to_own = a, self.tau * (1 - a)
            terms = [(1 - k * (to_all + to_own), self.t[i]), (k * to_all, t_0), (k * to_own, own[OF[i]])]
            self.t[i] = moved(self.t[i], terms)

    def cluster_moves(self, j):
        k = self.eta * self.gamma * (1 - self.tau) * (1 - self.a[j]) / ((1 - self.p0) * self.p)
        mean = self.mean(self.of(j))
        for i in self.of(j):
            self.t[i] = moved(self.t[i], [(1 - k, self.t[i]), (k, mean)])

    def cycle(self, number):
        """From one global move to the next."""
        self.all_move()
        lines = self.lines(number)
        for turn in range(max(map(len, lines))):
            self.round += 1
            for j, line in enumerate(lines):
                for _ in range(line[turn][0] if 0 < turn < len(line) else 0):
                    self.cluster_moves(j)
                for i in self.of(j) if turn < len(line) else ():
                    self.t[i] = self.world.train(self.t[i], self.world.steps(i, self.round, line[turn][1]))


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_a_simulation_move_by_move(build, tau, clients):
    world = World(build, clients, momentum=0.5)
    fed = world.federation(AL2GD, cohort=5, tau=tau, **QUICK)
    expected = Simulation(world, lambda number: fed.method.turns({"cycle": number}), tau=tau, **QUICK)
    for number in range(4):
        expected.cycle(number)
    while fed.round < expected.round:
        fed.step(ALL)
    for i, net in enumerate(expected.t):
        close(state_of(fed, i), flat(net))
        close(personal(fed)[i], flat(net))
    for j in (0, 1):
        close(fed.server["t"][j], flat(expected.mean(expected.of(j))))
    assert fed.server["cycle"] == 4
    assert differs(*fed.server["t"])


def test_the_case_that_is_simulated_has_all_kinds_of_turns(clients):
    method = World(plain_net, clients).federation(AL2GD, **QUICK).method
    lines = [method.turns({"cycle": number}) for number in range(4)]
    assert any(len(set(map(len, pair))) == 2 for pair in lines)  # one waits for the other
    assert any(moves > 1 for pair in lines for line in pair for moves, _ in line)
    assert any(local == 0 for pair in lines for line in pair for _, local in line)


def test_moves_and_local_steps_together_are_an_unbiased_gradient():
    """Of the sum of gamma/2 |t - c_j|^2 and lambda/2 |c_j - c|^2, least in the centres, which are solved for."""
    gamma, between, lr, tau = 0.7, 1.3, 0.05, 0.25
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    cluster = torch.tensor(OF)
    system = torch.zeros(3, 3, dtype=torch.float64)  # of c_0, c_1 and c: where the objective's slope is 0
    for j in (0, 1):
        system[j, j], system[j, 2], system[2, j] = gamma * N[j] + between, -between, -between
    system[2, 2] = 2 * between
    right = torch.stack([gamma * t[cluster == j].sum(0) for j in (0, 1)] + [torch.zeros(4, dtype=torch.float64)])
    c = torch.linalg.solve(system, right)
    penalty = gamma / 2 * ((t - c[cluster]) ** 2).sum() + between / 2 * ((c[:2] - c[2]) ** 2).sum()
    (slope,) = torch.autograd.grad(penalty, t)
    t = t.detach()
    for p0, p in ((0.1, 0.3), (0.3, 0.1)):
        method = AL2GD(Model(plain_net, dtype=torch.float64), lam=gamma, between=between, lr=lr, p0=p0, p=p, tau=tau)
        own = torch.stack([t[cluster == j].mean(0) for j in (0, 1)])
        server = {"t": own, "n": N, "cluster": cluster}
        moves = []
        for turn in (0, 1):
            centre, pull, _ = method.centres(server | {"turn": turn})
            moves.append(method.theta * pull[cluster][:, None] * (t - centre[cluster]))
        expected = p0 * moves[0] + (1 - p0) * p * moves[1]
        same(expected, lr * (1 - p0) * (1 - p) * slope)


@pytest.mark.parametrize(("end", "chance"), [(0.1, 0.3), (0.3, 0.6)])
def test_turns_have_the_law_of_coins_that_are_thrown_one_by_one(end, chance):
    """Against steps that are simulated one after another, with a coin of all and one of each row."""
    drawn = [turns(derive(1, number), 2, end, chance) for number in range(3000)]
    coin, thrown = torch.Generator().manual_seed(0), []
    draws = iter(torch.rand(300_000, generator=coin, dtype=torch.float64).tolist())
    for _ in range(3000):
        lines = [[[1, 0]], [[1, 0]]]
        while next(draws) >= end:
            for line in lines:
                if next(draws) >= chance:
                    line[-1][1] += 1
                elif len(line) > 1 and line[-1][1] == 0:
                    line[-1][0] += 1
                else:
                    line.append([1, 0])
        thrown.append(lines)

    def facts(pairs):
        rows = torch.tensor([[
            sum(local for _, local in line) + sum(moves for moves, _ in line[1:]), len(line), line[0][1],
            sum(local for _, local in line), line[-1][1] == 0, len(other) == len(line),
        ] for line, other in pairs], dtype=torch.float64)  # fmt: skip
        return rows.mean(0), rows.std(0) / math.sqrt(len(rows))

    (mine, error), (theirs, other) = facts(drawn), facts(thrown)
    assert ((mine - theirs).abs() < 4 * (error**2 + other**2).sqrt()).all()
    assert float(mine[0]) == pytest.approx((1 - end) / end, rel=0.1)
    assert all(sum(map(sum, first)) - sum(map(sum, second)) == 0 for first, second in drawn)  # as many steps in all
    assert drawn[0][0] != drawn[0][1] or drawn[1][0] != drawn[1][1]  # with coins of their own


def test_no_pull_is_local(clients):
    world = World(norm_net, clients, momentum=0.9)
    none = world.run(AL2GD, (ALL,) * 3, coins="fixed", lam=0.0)
    same(personal(none), personal(world.run(Local, (ALL,) * 3)))


def test_with_no_pull_between_clusters_each_is_an_l2gd_of_its_own(clients):
    first = {name: clients.split(name) for name in SPLITS}
    cut = {name: Split(s.x[: sum(s.size[:3])], s.y[: sum(s.size[:3])], s.size[:3]) for name, s in first.items()}
    three = dataclasses.replace(clients, names=clients.names[:3], **cut)
    settings = {"coins": "fixed", "lam": 1.0, "p": 0.3}
    apart = World(plain_net, clients).run(AL2GD, (ALL,) * 4, between=0.0, p0=0.01, cohort=5, **settings)
    alone = World(plain_net, three).run(L2GD, (ALL[:3],) * 4, **settings)
    same(personal(apart)[:3], personal(alone))
    same(apart.server["t"][0], alone.server)


def test_one_cluster_that_is_tied_to_all_without_end_is_l2gd():
    """Its own moves go nowhere, and global ones are those of L2GD with the probability p0 and a rate of lr (1 - p)."""
    method = AL2GD(Model(plain_net), clusters=1, lam=0.3, between=1e15, p0=0.2, p=0.4, lr=0.05)
    a, of_all, of_cluster = method.pulls(torch.tensor([5.0], dtype=torch.float64))
    assert float(a) == pytest.approx(1)
    assert float(of_cluster) == pytest.approx(0)
    assert method.theta * float(of_all) == pytest.approx(L2GD(Model(plain_net), lam=0.3, p=0.2, lr=0.05 * 0.6).theta)


def test_who_has_no_turn_waits_and_sends_nothing(clients):
    world = World(plain_net, clients)
    fed, size = world.federation(AL2GD, cohort=5, **QUICK), len(flat(world.net()))
    waited = 0
    for _ in range(12):
        now = fed.method.at(round=fed.round + 1).now(fed.server)
        before, sent = copy.deepcopy(fed.server["t"]), fed.traffic.up
        there = fed.step(ALL)
        assert there == [i for i in ALL if now[OF[i]][0]]
        assert fed.traffic.up - sent == len(there) * size * 8
        for j in (0, 1):
            waiting = not now[j][0]
            waited += waiting
            assert torch.equal(before[j], fed.server["t"][j]) == waiting
    assert waited
    assert fed.traffic.down == fed.traffic.up // size * (size + 4)  # and how far, how often, how many steps, for whom


def test_known_clusters_are_blocks_of_clients_that_can_be_put_side_by_side(clients):
    fed = World(plain_net, clients).federation(AL2GD)
    assert fed.server["cluster"].tolist() == list(OF)
    config = dict(partition="iid", clients=6, relabel=1.0, relabel_by="shift")
    apart, together = (load(DataConfig(**config, team_order=order), 0) for order in ("dealt", "groups"))
    groups = lambda clients: clients.partition["skews"]["relabel"]["groups"]
    assert groups(together) == [0, 0, 0, 1, 1, 1] != groups(apart)
    with pytest.raises(Problem, match=r"'groups' is for clients that differ by data.rotate or data.relabel"):
        load(DataConfig(partition="iid", team_order="groups"), 0)


def test_a_newcomer_begins_at_the_mean_of_all(clients):
    """Weighted as the pull between clusters does it: a n_j."""
    fed = World(plain_net, clients, weight_decay=0.0).run(AL2GD, (ALL,) * 3, **QUICK)
    to = fed.method.newcomer(fed.server).own
    t = to["t"] + (1 - fed.method.theta * to["pull"]) ** to["moves"] * (fed.method.init_client() - to["t"])
    same(t, (1.2 * fed.server["t"][0] + 1.0 * fed.server["t"][1]) / 2.2)  # 2 / 5 of 3, and 1 / 2 of 2


def test_settings_that_cannot_be_are_refused(clients):
    world = World(plain_net, clients)
    for wrong, sentence in (
        ({"clusters": 6}, "al2gd cannot make 6 clusters of 5 clients"),
        ({"lam": 50.0}, r"al2gd needs lr \* lam \* \(1 - p\) / p of at most 1, not 47\.5"),
        ({"lam": 1.0, "between": 1e6, "p0": 0.001}, "al2gd would leap over the mean of all by a pull of 47"),
        ({"tau": 1.5}, r"al2gd\.tau must be at most 1"),
    ):
        with pytest.raises(Problem, match=sentence):
            world.federation(AL2GD, **wrong)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(AL2GD, **QUICK))
