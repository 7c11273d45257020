"""TiFL: clients are sorted into tiers by how long they take, and the clients of a round are all of one tier."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from reference import ORDER, World, average, close, flat, norm_net, personal, plain_net, same

from perfed.contract import toy
from perfed.core.clients import Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import derive
from perfed.core.rounds import Known
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.federation.system import System
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared.tiers import credits_of, drawn_tier, first_odds, odds_by_accuracy, seconds_of, sorted_into
from perfed.methods.tifl import TiFL

INF = math.inf
CLOCK = System(speed=20, speed_spread=1.0)
BY_SIZE = [[1, 3], [0, 4], [2]]  # three tiers of clients of 23, 7, 41, 3 and 12 samples


def federation(world, kind=TiFL, cohort=2, system=None, faults=None, **settings):
    method = kind(Model(world.build, dtype=torch.float64), **(world.settings | settings))
    job = Job(method, world.clients, ORDER, cohort)
    return Federation(Sequential(job), system=system or System(), faults=faults or Faults())


def stepped(fed):
    """Who takes part in each exchange of the next round."""
    fed.begin()
    exchanges = []
    for request in fed.requests():
        (reply,) = fed.engine.exchange([request])
        fed.receive(request, reply)
        exchanges.append(list(request.ids))
    fed.end()
    return exchanges


def tiers_of(fed):
    tier = fed.server["tier"].tolist()
    return [[id for id, each in enumerate(tier) if each == number] for number in range(fed.method.tiers)]


# ---------------------------------------------------------------------- the whole method


def accuracy_of(world, net, ids):
    """The accuracy on the validation samples of some clients together."""
    samples = [world.samples(i, "val") for i in ids]
    right = sum(int((net.eval()(x).argmax(1) == y).sum()) for x, y in samples)
    return right / sum(len(y) for _, y in samples)


def reference(world, drawn, interval):
    """The model, the odds, and whether they changed, given who trained in each round and of which tier they were."""
    w, odds, last, changes = world.net(), [1 / 3] * 3, None, []
    for round, (tier, cohort) in enumerate(drawn, 1):
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
        if round > 1 and (round - 1) % interval == 0:
            now = [accuracy_of(world, w, ids) for ids in BY_SIZE]
            if last is not None:
                changes.append(now[tier] <= last[tier])
                if changes[-1]:
                    order = sorted(range(3), key=lambda t: now[t])
                    odds = [(3 - order.index(t)) / 6 for t in range(3)]
            last = now
    return w, odds, last, changes


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """Tiers are by samples, for there is no clock. Who is drawn is taken from the run, and looked at below."""
    world, drawn = World(build, clients, momentum=0.9, lr=0.02), []
    fed = federation(world, tiers=3, interval=2, cohort=1)
    for round in range(1, 16):
        cohort, *others = stepped(fed)
        assert others == ([[0, 1, 2, 3, 4]] if round > 1 and round % 2 else [])
        drawn.append((fed.server["now"], cohort))
        assert cohort == [0, 1, 2, 3, 4] if round == 1 else len(cohort) == 1
        assert round == 1 or cohort[0] in BY_SIZE[fed.server["now"]]
    w, odds, accuracy, changes = reference(world, drawn, interval=2)
    close(fed.server["w"], flat(w))
    assert fed.server["odds"].tolist() == pytest.approx(odds)
    assert fed.server["accuracy"].tolist() == pytest.approx(accuracy)
    assert tiers_of(fed) == BY_SIZE
    assert {*changes} == {True, False}
    for theta in personal(fed):
        close(theta, flat(w))


def test_one_tier_without_profiling_is_fedavg(clients):
    """Bit for bit, with the clients that FedAvg draws."""
    world = World(norm_net, clients, momentum=0.9)
    one, avg = federation(world, tiers=1, profiling=0, interval=2), federation(world, FedAvg)
    for _ in range(5):
        assert one.step() == avg.step()
    assert torch.equal(one.server["w"], avg.server)
    assert one.traffic == avg.traffic


def test_a_profiling_round_is_one_of_fedavg_with_everybody(clients):
    world = World(norm_net, clients)
    fed, avg = federation(world, profiling=2), federation(world, FedAvg, cohort=5)
    for _ in range(2):
        assert fed.step() == avg.step() == [0, 1, 2, 3, 4]
    assert torch.equal(fed.server["w"], avg.server)
    assert len(fed.step()) == 1  # five tiers of five clients


# ---------------------------------------------------------------------- tiers


def test_tiers_are_by_the_mean_time_of_all_rounds_of_profiling(clients):
    fed = federation(World(plain_net, clients), tiers=3, profiling=3, system=replace(CLOCK, jitter=1.0))
    total, orders = torch.zeros(5, dtype=torch.float64), []
    for _ in range(3):
        fed.step()
        total += fed.known.seconds
        orders.append(fed.known.seconds.argsort().tolist())
    fed.begin()
    same(fed.server["latency"], total)
    order = total.argsort().tolist()
    assert tiers_of(fed) == [sorted(order[:2]), sorted(order[2:4]), order[4:]]
    assert order not in orders[1:]  # a single round would have said something else


def test_tiers_stay_as_they_were_profiled(clients):
    fed = federation(World(plain_net, clients), system=replace(CLOCK, jitter=2.0), interval=1)
    for _ in range(2):
        fed.step()
    before = tiers_of(fed)
    for _ in range(5):
        fed.step()
    assert tiers_of(fed) == before
    assert fed.known.seconds.argsort().tolist() != [id for (id,) in before]


def test_any_number_of_clients_is_sorted_into_tiers():
    """Public code needs a number of clients that the number of tiers divides."""
    latency = torch.tensor([5.0, 1, 4, 2, 3, 9, 9])
    assert sorted_into(3, latency, range(7), 0).tolist() == [1, 0, 1, 0, 0, 2, 2]
    assert sorted_into(3, latency, [0, 1, 5], 0).tolist() == [1, 0, -1, -1, -1, 2, -1]
    assert sorted_into(2, latency, range(7), 9).tolist() == [1, 0, 1, 0, 0, -1, -1]


def known(seconds, answered):
    """What a server knows of clients after round 1."""
    info = Known([f"client {id}" for id in range(len(seconds))], [10] * len(seconds), range(len(seconds)))
    info.ask(1, range(len(seconds)))
    info.answer(1, range(len(seconds)), answered, None)
    info.note("seconds", {id: each for id, each in enumerate(seconds) if answered[id]})
    return info


def test_there_are_no_more_tiers_than_clients(clients):
    fed = federation(World(plain_net, clients), policy="slow", tiers=9, system=CLOCK)
    drawn = [fed.step() for _ in range(4)]
    assert fed.server["tier"].sort().values.tolist() == [0, 1, 2, 3, 4]
    assert drawn[1:] == [[int(fed.server["latency"].argmax())]] * 3


def test_who_is_lost_or_late_counts_as_long_as_the_timeout():
    info = known([1.0, 2.0, 9.0, 4.0], [True, True, True, False])
    assert seconds_of(info, 1, 3.0).tolist() == [1, 2, 3, 3]
    assert seconds_of(info, 1, 0.0).tolist() == [1, 2, 9, 9]
    assert seconds_of(info, 2, 0.0).tolist() == [0, 0, 0, 0]  # nobody answered in round 2
    assert seconds_of(known([1.0, 2.0], [False, False]), 1, 3.0).tolist() == [3, 3]


def test_who_was_never_faster_than_the_timeout_is_left_out(clients):
    world = World(plain_net, clients)
    plain = federation(world, system=CLOCK)
    plain.step()
    seconds = plain.known.seconds
    limit = float(seconds.sort().values[3])
    fed = federation(world, system=CLOCK, timeout=limit, tiers=2, profiling=3, interval=2)
    for _ in range(3):
        assert fed.step() == [0, 1, 2, 3, 4]  # all are timed
    left = [id for id in range(5) if seconds[id] < limit]
    assert len(left) == 3
    rated = False
    for _ in range(8):
        exchanges = stepped(fed)
        assert all({*ids} <= {*left} for ids in exchanges)
        rated |= exchanges[1:] == [left]
    assert rated
    same(fed.server["latency"], 3 * seconds.clamp_max(limit))
    assert fed.method.notes(fed.server) == {"tier_sizes": [2, 1]}


def test_without_profiling_tiers_are_by_samples(clients):
    fed = federation(World(plain_net, clients), tiers=3, profiling=0, system=CLOCK)
    assert len(fed.step()) <= 2
    assert tiers_of(fed) == BY_SIZE


# ---------------------------------------------------------------------- odds and credits


def test_odds_are_by_rank_the_lowest_accuracy_first():
    accuracy = torch.tensor([0.5, 0.9, 0.7], dtype=torch.float64)
    same(odds_by_accuracy(accuracy, torch.tensor([1.0, INF, 3])), torch.tensor([3, 1, 2], dtype=torch.float64) / 6)
    same(odds_by_accuracy(accuracy, torch.tensor([1.0, 0, 3])), torch.tensor([2, 0, 1], dtype=torch.float64) / 3)
    assert odds_by_accuracy(accuracy, torch.zeros(3)).tolist() == [0, 0, 0]


def test_odds_stay_where_the_tier_has_become_better(clients):
    """Public code changes them whenever it looks."""
    better = federation(World(plain_net, clients), tiers=3, interval=1)
    better.step()
    for before, odds in ((0.0, [1 / 3] * 3), (1.0, None)):
        better.server = better.server | {"accuracy": torch.full((3,), before, dtype=torch.float64)}
        better.step()
        assert (better.server["odds"].tolist() == odds) == (odds is not None)


def test_odds_of_policies_stay(clients):
    for policy, odds in {
        "slow": [0, 0, 0, 0, 1],
        "uniform": [0.2] * 5,
        "random": [0.7, 0.1, 0.1, 0.05, 0.05],
        "fast": [1, 0, 0, 0, 0],
    }.items():
        assert first_odds(policy, 5).tolist() == odds
        fed = federation(World(plain_net, clients), policy=policy, interval=1)
        drawn = []
        for _ in range(5):
            assert len(stepped(fed)) == 1  # nobody is asked how good the model is
            drawn.append(fed.server["now"])
        assert fed.server["odds"].tolist() == odds
        if policy in ("slow", "fast"):
            assert drawn[1:] == [odds.index(1)] * 4


def draws(odds, credits, there, count):
    odds, credits, tiers = torch.tensor(odds, dtype=torch.float64), torch.tensor(credits, dtype=torch.float64), []
    for number in range(count):
        tier, credits = drawn_tier(derive(3, number), odds, credits, torch.tensor(there))
        tiers.append(tier)
    return tiers, credits.tolist()


def test_a_tier_is_drawn_as_often_as_its_odds_say():
    tiers, credits = draws([0.5, 0.2, 0.3], [INF] * 3, [0, 1, 2], 2000)
    assert [tiers.count(tier) / 2000 for tier in range(3)] == pytest.approx([0.5, 0.2, 0.3], abs=0.03)
    assert credits == [INF] * 3


def test_every_round_of_a_tier_costs_a_credit():
    """A tier without credits is not drawn, though odds have not been changed; in public code its odds stay."""
    tiers, credits = draws([0.8, 0.1, 0.1], [2, 3, 4], [0, 1, 2], 9)
    assert Counter(tiers) == {0: 2, 1: 3, 2: 4}
    assert credits == [0, 0, 0]


def test_when_all_credits_are_gone_each_tier_gets_another():
    """Public code then draws for ever."""
    tiers, credits = draws([0.8, 0.2, 0.0], [0, 0, 0], [0, 1, 2], 6)
    assert sorted(tiers[:3]) == sorted(tiers[3:]) == [0, 1, 2]  # also who has no odds, once the others have no credits
    assert credits == [0, 0, 0]


def test_a_tier_of_clients_who_cannot_be_asked_is_not_drawn():
    assert {*draws([0.8, 0.1, 0.1], [INF] * 3, [1, 2, 2, -1], 50)[0]} == {1, 2}
    assert {*draws([1.0, 0.0, 0.0], [INF] * 3, [1, 2], 50)[0]} == {1, 2}  # nobody who has odds is there
    assert draws([0.5, 0.5], [0, 2], [0], 3) == ([0, 0, 0], [0, 2])  # nor anybody with credits
    assert draws([0.5, 0.5], [3, 2], [-1], 2) == ([0, 0], [3, 2])  # nobody at all


def test_credits_by_speed_are_fewer_where_a_tier_is_slow():
    latency, tier = torch.tensor([1.0, 2, 4, 9, 50]), torch.tensor([0, 0, 1, 2, -1])
    assert credits_of(3, 6, latency, tier, by_speed=True).tolist() == [
        6,
        3,
        2,
    ]  # 2 / 2, 2 / 4 and 2 / 9 of 6, rounded up
    assert credits_of(3, 6, latency, tier, by_speed=False).tolist() == [6, 6, 6]
    assert credits_of(3, 0, latency, tier, by_speed=True).tolist() == [INF] * 3


def test_credits_limit_the_rounds_of_a_tier(clients):
    fed, drawn = federation(World(plain_net, clients), tiers=3, credits=2), []
    for _ in range(7):
        fed.step()
        drawn.append(fed.server["now"])
    assert Counter(drawn[1:]) == {0: 2, 1: 2, 2: 2}


# ---------------------------------------------------------------------- who takes part


def test_clients_of_a_round_are_different_and_drawn_alike(clients):
    """Public code draws with replacement."""
    fed = federation(World(plain_net, clients, epochs=1), tiers=2, cohort=2, policy="fast")
    fed.step()
    count = Counter()
    for _ in range(120):
        fed.begin()
        assert len(fed.answers.ids) == 2
        count.update(fed.answers.ids)
        fed.end()
    assert {*count} == {1, 3, 4}  # 7, 3 and 12 samples
    assert min(count.values()) > 60


def test_only_who_can_be_asked_is_asked(clients):
    """The engine leaves others out: a tier of which nobody is there would be a round for nothing."""
    fed = federation(World(plain_net, clients, epochs=1), system=System(availability=0.5), tiers=5, interval=3)
    for round in range(12):
        there = System(availability=0.5).available(ORDER, round + 1, range(5))
        exchanges = stepped(fed)
        assert len(exchanges) > 0 or not there
        assert all({*ids} <= {*there} for ids in exchanges)


def test_clients_without_training_samples_are_in_no_tier():
    empty = toy.toy_clients((23, 0, 41, 3, 12))
    fed = federation(World(plain_net, empty), tiers=3)
    for _ in range(3):
        assert 1 not in fed.step()
    assert fed.server["tier"].tolist() == [1, -1, 2, 0, 0]


# ---------------------------------------------------------------------- accuracies


def ratings(clients, **settings):
    fed = federation(World(plain_net, clients), tiers=3, interval=1, **settings)
    for _ in range(2):
        fed.step()
    return fed.server["accuracy"].tolist(), fed.server["w"]


def test_without_validation_samples_accuracy_is_of_training_samples(clients):
    table = clients.val
    keep = torch.cat([torch.full((n,), id in (0, 4)) for id, n in enumerate(table.size)])  # tier 1 alone has some
    some = Split(table.x[keep], table.y[keep], tuple(n * (id in (0, 4)) for id, n in enumerate(table.size)))
    world, net = World(plain_net, clients), plain_net().double()
    found, w = ratings(replace(clients, val=some))
    net.load_state_dict(Model(plain_net, dtype=torch.float64).state_dict(w))
    train = lambda id: world.samples(id)
    right = lambda x, y: int((net(x).argmax(1) == y).sum())
    assert found[1] == pytest.approx(accuracy_of(world, net, [0, 4]))
    assert found[0] == pytest.approx((right(*train(1)) + right(*train(3))) / 10)
    assert found[2] == pytest.approx(right(*train(2)) / 41)


def test_test_samples_say_nothing(clients):
    other = replace(clients, test=toy.toy_clients(seed=3).test)
    assert ratings(other)[0] == ratings(clients)[0]


def test_a_tier_that_nobody_speaks_for_keeps_its_accuracy(clients):
    fed, silent = federation(World(plain_net, clients), tiers=3, interval=1, faults=Faults(dropout=0.6)), 0
    for _ in range(12):
        before, exchanges, tiers = fed.server["accuracy"].tolist(), stepped(fed), tiers_of(fed)
        for tier, members in enumerate(tiers):
            if fed.round > 1 and not {*members} & {*exchanges[-1]}:
                assert fed.server["accuracy"][tier] == before[tier]
                silent += 0 < before[tier] < 1
    assert silent > 2


# ---------------------------------------------------------------------- time and bytes


@pytest.mark.parametrize("policy", ["slow", "fast", "random"])
def test_time_is_what_odds_and_tiers_predict(policy, clients):
    """All clients of a tier take part, so a round takes as long as the tier's slowest one."""
    fed = federation(World(plain_net, clients, epochs=1), policy=policy, system=CLOCK, cohort=5)
    fed.step()
    slowest, begun = fed.known.seconds.sort().values, fed.clock
    predicted = 80 * float(first_odds(policy, 5) @ slowest)
    for _ in range(80):
        fed.step()
    assert fed.clock - begun == pytest.approx(predicted, rel=0.35 if policy == "random" else 1e-9)


def test_bytes_are_models_and_a_number_for_each_look(clients):
    world = World(norm_net, clients)
    size, N = 8 * len(flat(world.net())), 5
    fed = federation(world, tiers=3, interval=2, cohort=1)
    sent = []
    for _ in range(3):
        before = fed.traffic.down, fed.traffic.up
        fed.step()
        sent.append((fed.traffic.down - before[0], fed.traffic.up - before[1]))
    # everybody; one client; one client, and then everybody is sent the model and its tier, and sends an accuracy
    assert sent == [(N * size, N * size), (size, size), (size + N * (size + 8), size + N * 8)]


def test_a_newcomer_gets_the_model(clients):
    fed = federation(World(plain_net, clients), interval=1)
    for _ in range(3):
        fed.step()
    down = fed.method.newcomer(fed.server)
    assert down.shared is fed.server["w"]
    assert down.own == ()


# ---------------------------------------------------------------------- what is refused


def test_what_cannot_be_is_refused_in_a_sentence(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="tifl's policy random has odds for 5 tiers, and tiers is 4"):
        federation(world, policy="random", tiers=4)
    fed = federation(world, timeout=1.0)
    fed.step()
    with pytest.raises(
        Problem, match=r"timeout needs a simulated clock: set speed, latency or bandwidth of \[system\]"
    ):
        fed.step()
    fed = federation(world, timeout=0.001, system=CLOCK)
    fed.step()
    with pytest.raises(Problem, match="timeout leaves out every client: set it higher"):
        fed.step()
