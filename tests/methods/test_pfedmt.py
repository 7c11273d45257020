"""pFedMT: devices, teams and a cloud."""

import copy

import pytest
import torch
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    World,
    average,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    models,
    norm_net,
    plain_net,
    same,
    state_of,
    weights,
)

from perfed.core.errors import Problem
from perfed.core.random import TRAIN, derive, shuffle
from perfed.methods.fedavg import FedAvg
from perfed.methods.pfedmt import PFedMT

STRONG = {"teams": 2, "lam": 1.2, "gamma": 0.4, "eta": 0.5, "beta": 1.5, "K": 2, "L": 3}
TEAM = (0, 0, 0, 1, 1)  # i * 2 // 5
ALONE = ((0, 1), (1, 2), (0, 2, 3))  # team 1 comes in the last round only


def batches(world, i, round, exchange, steps):
    """The library's batches of one exchange."""
    x, y = world.samples(i)
    key = derive(ORDER, TRAIN, round, exchange, i, 0, 0)
    out, epoch = [], 0
    while len(out) < steps:
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        out += [(x[rows], y[rows]) for rows in order.split(world.settings["batch_size"])]
        epoch += 1
    return out[:steps]


def follow(net, target, share, anchor=None, pull=0.0):
    """Parameters: net + share (target - net) + pull (anchor - net); statistics: the target's."""
    out = copy.deepcopy(target)
    with torch.no_grad():
        for p, q, t, a in zip(*(m.parameters() for m in (out, net, target, anchor or net)), strict=True):
            p.copy_((1 - share - pull) * q + share * t + pull * a)
    return out


class Tiers:
    """The triple loop of Algorithm 1, with beta gamma wbar in line 12."""

    def __init__(self, world, team=TEAM, weighted=False, **h):
        self.world, self.team, self.weighted, self.h = world, team, weighted, STRONG | h
        self.x, M = world.net(), self.h["teams"]
        self.w, self.theta = [world.net() for _ in range(M)], [world.net() for _ in team]
        self.tau = [0.0 if weighted else 1.0] * M

    def round(self, cohort, number):
        h, world = self.h, self.world
        here = sorted({self.team[i] for i in cohort})
        w = {t: copy.deepcopy(self.x) for t in here}
        for k in range(h["K"]):
            for t in here:
                devices = [i for i in cohort if self.team[i] == t]
                centre = [p.detach().clone() for p in w[t].parameters()]
                penalty = lambda net, c=centre: (
                    h["lam"] / 2 * sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), c, strict=True))
                )
                for i in devices:
                    steps = h["L"] or len(world.batches(i, 1))
                    self.theta[i] = world.train(w[t], batches(world, i, number, k, steps), penalty)
                share = [world.count(i) if self.weighted else 1 for i in devices]
                mean = average([self.theta[i] for i in devices], share)
                w[t] = follow(w[t], mean, h["eta"] * h["lam"], self.x, h["eta"] * h["gamma"])
                if self.weighted:
                    self.tau[t] = sum(share)
        for t in here:
            self.w[t] = w[t]
        self.x = follow(self.x, average(self.w, self.tau), h["beta"] * h["gamma"])


def check_against(fed, expected):
    found = models(fed)
    close(fed.server["x"], flat(expected.x))
    for w, net in zip(fed.server["w"], expected.w, strict=True):
        close(w, flat(net))
    for i, t in enumerate(expected.team):
        close(state_of(fed, i), flat(expected.theta[i]))
        close(found["personal"][i], flat(expected.theta[i]))
        close(found["team"][i], flat(expected.w[t]))
        close(found["global"][i], flat(expected.x))


def compare(world, rounds=ROUNDS, **h):
    weighted = h.pop("weighted", False)
    fed = world.run(PFedMT, rounds, weights="samples" if weighted else "uniform", **(STRONG | h))
    expected = Tiers(world, weighted=weighted, **h)
    for number, cohort in enumerate(rounds, 1):
        expected.round(cohort, number)
    check_against(fed, expected)
    return fed


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, weighted, clients):
    """Ragged devices, partial participation; the pull's gradient comes from autograd."""
    fed = compare(World(build, clients, momentum=0.9), weighted=weighted)
    assert differs(fed.server["w"][0], fed.server["w"][1])
    assert differs(fed.server["w"][0], fed.server["x"])


@pytest.mark.parametrize("option", [{"L": 0}, {"K": 1}, {"K": 3, "L": 1}, {"beta": 2.5, "eta": 0.6}], ids=str)
def test_options_equal_the_reference(option, clients):
    compare(World(plain_net, clients, epochs=1), **option)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_team_without_participants_keeps_its_model_which_still_counts(weighted, clients):
    world = World(norm_net, clients)
    fed = world.federation(PFedMT, weights="samples" if weighted else "uniform", **STRONG)
    expected = Tiers(world, weighted=weighted)
    start = fed.server["w"][1].clone()
    for number, cohort in enumerate(ALONE, 1):
        fed.step(cohort)
        expected.round(cohort, number)
        check_against(fed, expected)
        assert torch.equal(fed.server["w"][1], start) == (number < 3)
    stale = fed.server["w"][1].clone()
    fed.step((0, 1))
    assert torch.equal(fed.server["w"][1], stale)  # neither stepped nor set back to x
    assert differs(fed.server["w"][1], fed.server["x"])


# ---------------------------------------------------------------------- limits


def test_full_team_step_is_the_mean_of_x_and_thetabar(clients):
    """K = 1, eta = 1 / (lambda + gamma): nothing of w itself is left."""
    world = World(plain_net, clients)
    fed = world.run(PFedMT, [(0, 1, 3)], **(STRONG | {"K": 1, "eta": 1 / 1.6}))
    x = weights(world.net())
    theta = [state_of(fed, i)[: len(x)] for i in range(5)]
    same(fed.server["w"][0][: len(x)], 0.25 * x + 0.75 * (theta[0] + theta[1]) / 2)
    same(fed.server["w"][1][: len(x)], 0.25 * x + 0.75 * theta[3])


def test_lambda_0_trains_alone_and_teams_stay(clients):
    world = World(plain_net, clients)
    fed = world.run(PFedMT, **(STRONG | {"lam": 0.0}))
    same(fed.server["x"], fed.method.init_server(5)["x"])
    same(fed.server["w"], fed.method.init_server(5)["w"])
    net = world.train(world.net(), batches(world, 1, 2, 1, 3))  # its last round, its last exchange
    close(state_of(fed, 1), flat(net))


def test_equal_teams_stay_equal(clients):
    """All devices with the same samples and one full batch: every tier is the same in both teams."""
    x, y = clients.train.x[:40], clients.train.y[:40]
    split = type(clients.train)(x.repeat(4, 1), y.repeat(4), (40,) * 4)
    alike = type(clients)(tuple("abcd"), split, split, split, 3)
    world = World(plain_net, alike, batch_size=40)
    fed = world.run(PFedMT, [(0, 1, 2, 3)] * 3, **STRONG)
    same(fed.server["w"][0], fed.server["w"][1])
    for i in range(1, 4):
        same(state_of(fed, i), state_of(fed, 0))
    assert differs(fed.server["x"], fed.method.init_server(4)["x"])


def test_full_steps_and_no_pull_on_data_are_hierarchical_averaging(clients):
    """eta lambda and beta gamma near 1, one exchange: x becomes the mean of team means, each that of its devices."""
    world = World(plain_net, clients)
    lam, gamma = 1e-7, 1e-13
    tiny = {"teams": 2, "lam": lam, "gamma": gamma, "eta": 1 / (lam + gamma), "beta": 1 / gamma, "K": 1, "L": 0}
    fed = world.run(PFedMT, [(0, 1, 3)], **tiny)
    nets = {i: world.train(world.net(), world.batches(i, 1)) for i in (0, 1, 3)}
    expected = average([average([nets[0], nets[1]], [1, 1]), nets[3]], [1, 1])
    torch.testing.assert_close(fed.server["x"][: len(flat(expected))], flat(expected), rtol=1e-5, atol=1e-6)


def test_one_team_of_equal_devices_with_full_steps_is_fedavg(clients):
    world = World(norm_net, clients)
    lam, gamma = 1e-7, 1e-13
    tiny = {"teams": 1, "lam": lam, "gamma": gamma, "eta": 1 / (lam + gamma), "beta": 1 / gamma, "K": 1, "L": 0}
    fed, avg = (
        world.run(kind, [(0, 1, 3)], **h) for kind, h in ((PFedMT, tiny | {"weights": "samples"}), (FedAvg, {}))
    )
    torch.testing.assert_close(fed.server["x"], avg.server, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- traps


def test_line_12_has_beta_gamma(clients):
    """A fixed point stays one: with teams at x the printed form would multiply x by 1 - beta gamma + beta."""
    world = World(plain_net, clients, lr=1e-300, weight_decay=0)
    fed = world.run(PFedMT, [(0, 1, 3)] * 4, teams=2, lam=1.0, gamma=0.1, eta=0.5, beta=1.0)
    start = fed.method.init_server(5)["x"]
    same(fed.server["x"], start)
    printed = start
    for _ in range(4):
        printed = (1 - 0.1) * printed + 1.0 * printed
    assert printed.norm() > 10 * start.norm()


def test_teams_start_each_round_from_x_and_devices_each_exchange_from_w(clients):
    world = World(plain_net, clients)
    fed = world.run(PFedMT, ROUNDS[:1], **STRONG)
    ids = torch.arange(5)
    first = fed.method.broadcast(fed.server, ids)
    for w in first.own["w"]:
        assert torch.equal(w, fed.server["x"])
    assert differs(fed.server["w"][0], fed.server["x"])
    later = fed.method.broadcast({**fed.server, "k": fed.server["k"] + 1}, ids)
    for i in range(5):
        assert torch.equal(later.own["w"][i], fed.server["w"][TEAM[i]])


def test_teams_are_blocks(clients):
    fed = World(plain_net, clients).federation(PFedMT, teams=3)
    assert fed.server["team"].tolist() == [0, 0, 1, 1, 2]
    assert World(plain_net, clients).federation(PFedMT, teams=5).server["team"].tolist() == [0, 1, 2, 3, 4]


def test_the_device_pull_spares_statistics_and_pulls(clients):
    world = World(norm_net, clients)
    far, near = (world.run(PFedMT, ROUNDS[:1], **(STRONG | {"lam": lam, "eta": 0.4, "K": 1})) for lam in (0.01, 2.0))
    start, P = flat(world.net()), near.method.model.P
    move = lambda fed: (state_of(fed, 0)[: len(start)] - start)[:P].norm()
    assert move(near) < move(far)
    assert differs(state_of(near, 0)[P : len(start)], start[P:])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"eta": 1.0, "lam": 0.7, "gamma": 0.4}, "at most 1"),
        ({"beta": 3.0, "gamma": 0.5, "eta": 0.1}, "at most 1"),
        ({"lr": 2.0, "lam": 1.0, "eta": 0.1}, "diverge"),
        ({"teams": 6}, "6 teams"),
        ({"team_share": 0.0}, "team_share"),
    ],
)
def test_refuses_what_cannot_converge(wrong, reason, clients):
    with pytest.raises(Problem, match=reason):
        World(plain_net, clients).federation(PFedMT, **wrong)


def test_share_of_teams(clients):
    """One of two teams takes part in a round; the others' devices do nothing and send nothing."""
    world = World(plain_net, clients)
    fed, expected = world.federation(PFedMT, team_share=0.5, **STRONG), Tiers(world)
    seen = []
    for number in range(1, 7):
        before = {i: state_of(fed, i).clone() for i in range(5)}
        sent = fed.traffic.up
        cohort = fed.step((0, 1, 3, 4))
        seen.append({TEAM[i] for i in cohort})
        assert len(seen[-1]) == 1
        expected.round(cohort, number)
        check_kept(fed, before, [i for i in range(5) if i not in cohort])
        assert fed.traffic.up - sent == 2 * len(cohort) * fed.method.model.size * 8  # K = 2 exchanges
    check_against(fed, expected)
    assert {0} in seen
    assert {1} in seen
    assert fed.step((3, 4)) == [3, 4]  # only reachable teams are drawn: a round never is empty
    again = world.federation(PFedMT, team_share=0.5, **STRONG)
    assert [{TEAM[i] for i in again.step((0, 1, 3, 4))} for _ in range(6)] == seen


def test_keeps_own_models(clients):
    fed = World(plain_net, clients).run(PFedMT, **STRONG)
    before = {i: state_of(fed, i).clone() for i in range(5)}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert torch.equal(models(fed)["personal"][3], before[3])


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(PFedMT, **STRONG))


def test_a_newcomer_starts_from_the_global_model(clients):
    fed = World(plain_net, clients).run(PFedMT, **STRONG)
    down = fed.method.newcomer(fed.server)
    assert torch.equal(down.own["w"], fed.server["x"])
    assert torch.equal(down.shared, fed.server["x"])


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("K", [1, 3])
def test_edge_and_cloud_traffic_are_apart(K, clients):
    """K P each way and device, and a team's number; P each way, team and round between teams and cloud."""
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(PFedMT, ROUNDS, **(STRONG | {"K": K}))
    devices = 9 * K  # three rounds of three
    assert fed.traffic.up == devices * size * 8
    assert fed.traffic.down == devices * (size + 1) * 8
    assert fed.traffic.extra == {"cloud_down": 6 * size * 8, "cloud_up": 6 * size * 8}  # both teams, every round
    fed.step((0, 1))  # one team
    assert fed.traffic.extra == {"cloud_down": 7 * size * 8, "cloud_up": 7 * size * 8}
    fed.evaluate()  # costs nothing
    assert fed.traffic.up == (devices + 2 * K) * size * 8
    assert world.run(FedAvg).traffic.extra == {}
