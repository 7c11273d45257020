"""FedSAE: each client is given an easy and a hard task, which follow what it could do before."""

import math
from collections import Counter

import pytest
import torch
from reference import ORDER, World, average, close, flat, norm_net, personal, plain_net, same

from perfed.contract import toy
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.federation.system import System
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedsae import FedSAE, followed

INF = math.inf
MACHINES = System(affordable_min=0.5, affordable_max=4, affordable_spread=0.4)


def federation(world, kind=FedSAE, cohort=3, system=None, faults=None, **settings):
    method = kind(Model(world.build, dtype=torch.float64), **(world.settings | settings))
    job = Job(method, world.clients, ORDER, cohort)
    return Federation(Sequential(job), system=system or System(), faults=faults or Faults())


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------- the whole method


class Client:
    """What a server remembers of a client, as plain numbers; every case is written down by itself."""

    def __init__(self, rule, cap, easy=1.0, hard=2.0):
        self.L, self.H, self.rule, self.cap = min(easy, cap), min(hard, cap), rule, cap
        self.E = []

    def threshold(self):
        if len(self.E) < 2:
            return None
        theta = self.E[0]
        for each in self.E[1:]:
            theta = 0.95 * theta + 0.05 * each
        return theta

    def grown(self, task):
        if self.rule == "ira":
            return task + 2 / task
        theta = self.threshold()
        return task + 3 if theta is not None and task < theta else task + 1

    def works(self, A):
        """The epochs that reach the server; then its tasks are those of its next round."""
        L, H = self.L, self.H
        if A >= H:
            done, reached, tasks = H, math.floor(H), (self.grown(L), self.grown(H))
        elif A >= L:
            done, reached, tasks = L, math.floor(A), (self.grown(L), H / 2)
        else:
            done, reached, tasks = 0, math.floor(A), (L / 2, H / 2)
        self.L, self.H = (min(max(task, 0.001), self.cap) for task in sorted(tasks))
        self.E.append(reached)
        return done


def steps(world, i, round, done):
    """The batches of a client that ends after so many epochs."""
    per_epoch = math.ceil(world.count(i) / world.settings["batch_size"])
    return world.batches(i, round)[: math.ceil(per_epoch * done - 1e-9)]


def reference(world, rule, cohorts):
    cap, N = world.settings["epochs"], len(world.clients)
    w, known, outcomes = world.net(), [Client(rule, cap) for _ in range(N)], Counter()
    for round, cohort in enumerate(cohorts, 1):
        able, nets = MACHINES.affordable(ORDER, round, range(N)), {}
        for i in cohort:
            hard = known[i].H
            done = known[i].works(able[i])
            outcomes["full" if done == hard else "fail" if done == 0 else "partial"] += 1
            if done:
                nets[i] = world.train(w, steps(world, i, round, done))
        if nets:
            w = average(list(nets.values()), [world.count(i) for i in nets])
    return w, known, outcomes


@pytest.mark.parametrize("rule", ["ira", "fassa"])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, rule, clients):
    world, cohorts = World(build, clients, epochs=3), []
    fed = federation(world, rule=rule, U=2.0, system=MACHINES)
    for _ in range(14):
        answered = fed.step()
        cohorts.append(sorted(answered + fed.answers.lost))
    fed.begin()  # in which the server learns what became of the last round
    w, known, outcomes = reference(world, rule, cohorts)
    close(fed.server["w"], flat(w))
    same(fed.server["L"], numbers(*(client.L for client in known)))
    same(fed.server["H"], numbers(*(client.H for client in known)))
    assert {*outcomes} == {"full", "partial", "fail"}
    for theta in personal(fed):
        close(theta, flat(w))


def test_tasks_that_stay_are_fedavg(clients):
    """Bit for bit: machines without limits, L = H = E, no growth, and clients as the run draws them."""
    world = World(norm_net, clients, momentum=0.9)
    fixed = dict(easy=2.0, hard=2.0, rule="ira", U=0.0, beta=0.0)
    sae, avg = federation(world, **fixed), federation(world, FedAvg)
    for _ in range(4):
        assert sae.step() == avg.step()
    assert torch.equal(sae.server["w"], avg.server)
    assert sae.traffic == avg.traffic


def test_without_limits_everybody_soon_does_all_epochs(clients):
    for rule in ("ira", "fassa"):
        fed = federation(World(plain_net, clients, epochs=4), rule=rule, beta=0.0, cohort=5)
        for _ in range(5):
            fed.step()
        assert fed.known.epochs.tolist() == [4] * 5
        assert fed.server["L"].tolist() == [4] * 5


# ---------------------------------------------------------------------- the rules


def ira(L, H, A, U=10.0):
    full, failed = torch.tensor(A >= H), torch.tensor(A < L)
    return tuple(map(float, followed(numbers(L), numbers(H), full, failed, numbers(U / L), numbers(U / H))))


def test_ira_with_a_client_that_can_always_do_seven_epochs():
    """Public code makes H of an L that it has changed before."""
    tasks, trace = (1.0, 2.0), []
    for _ in range(5):
        tasks = ira(*tasks, A=7)
        trace.append(tasks)
    expected = [(7, 11), (5.5, 8.4286), (4.2143, 7.3182), (3.6591, 6.5872), (6.3920, 8.1053)]
    assert trace == [pytest.approx(each, abs=1e-3) for each in expected]


def lost(c, U=10.0, rounds=300):
    """In how many rounds ira gives too long tasks, from (1, 2) on, to a client that can always do c epochs."""
    (L, H), count = (1.0, 2.0), 0
    for _ in range(rounds):
        count += c < L
        L, H = ira(L, H, c, U)
        assert L <= H
    return count


def test_with_ira_a_client_of_some_epochs_hardly_ever_drops_out():
    """One that can do little does, however: 10 / L is more than that. Then a smaller U is better."""
    assert [lost(c) for c in (5, 7, 10, 40)] == [1, 0, 0, 0]
    assert [lost(c) > 100 for c in (0.3, 1.5, 3)] == [True] * 3
    assert [lost(c, U=0.5) < 2 for c in (1.5, 3)] == [True] * 2


@pytest.mark.parametrize("c", [0.3, 1.5, 7.0, 40.0])
def test_too_long_tasks_are_short_enough_after_log2_rounds(c):
    tasks, rounds = (64.0, 90.0), 0
    while c < tasks[0]:
        tasks = ira(*tasks, c)
        rounds += 1
    assert rounds == math.ceil(math.log2(64 / c))
    assert tasks == (64 / 2**rounds, 90 / 2**rounds)


def judged(clients, seen, L, H, done, able=INF, **settings):
    """The tasks after a round of client 0, with L and H, of which it finished `done`; `seen` reached epochs before."""
    fed = federation(World(plain_net, clients), epochs=100, **settings)
    theta = 0.0
    for number, reached in enumerate(seen):
        theta = 0.95 * theta + 0.05 * reached if number else reached
    state = {"L": L, "H": H, "theta": theta, "rounds": len(seen), "able": able}
    fed.server = fed.server | {name: torch.full((5,), value, dtype=torch.float64) for name, value in state.items()}
    fed.known.ask(1, [0])
    fed.known.note("epochs", {0: done})
    after = fed.method.at(round=2).before_round(fed.server, fed.known)
    assert after["L"][1:].tolist() == [L] * 4  # nobody else was asked
    return float(after["L"][0]), float(after["H"][0]), float(after["theta"][0])


def test_fassa_grows_fast_below_the_threshold_and_slowly_above(clients):
    """4 and 6 epochs make a threshold of 4.1."""
    assert judged(clients, [4, 6], 3, 5, done=5)[:2] == (6, 6)
    assert judged(clients, [4, 6], 3, 4, done=4)[:2] == (6, 7)
    assert judged(clients, [4, 6], 5, 6, done=6)[:2] == (6, 7)
    assert judged(clients, [4, 6], 3, 5, done=3, able=4.7)[:2] == (2.5, 6)
    assert judged(clients, [4, 6], 3, 5, done=0, able=1.2)[:2] == (1.5, 2.5)
    assert judged(clients, [4, 4], 4, 5, done=5)[:2] == (5, 6)  # at the threshold, too
    assert judged(clients, [4], 3, 4, done=4)[:2] == (4, 5)  # one round says nothing yet
    assert judged(clients, [], 3, 4, done=4)[:2] == (4, 5)


def test_fassas_threshold_is_a_mean_of_whole_epochs(clients):
    assert judged(clients, [], 3.5, 5.5, done=5.5)[2] == 5
    assert judged(clients, [], 3.5, 5.5, done=3.5, able=4.9)[2] == 4
    assert judged(clients, [4], 3.5, 6.5, done=6.5)[2] == pytest.approx(0.95 * 4 + 0.05 * 6)
    assert judged(clients, [4, 6], 3, 5, done=0, able=1.9)[2] == pytest.approx(0.95 * 4.1 + 0.05)
    assert judged(clients, [4], 3, 5, done=0)[2] == pytest.approx(0.95 * 4)  # lost, though it could have done all


@pytest.mark.parametrize("rule", ["ira", "fassa"])
@pytest.mark.parametrize(("done", "able"), [(5, 9.0), (3, 4.0), (0, 1.0)])
def test_a_client_has_one_outcome_in_a_round(rule, done, able, clients):
    """In public code tasks that have just been changed are judged once more."""
    tasks = judged(clients, [4, 6], 3, 5, done=done, able=able, rule=rule)[:2]
    grow = {"ira": (10 / 3, 2.0), "fassa": (3, 1)}[rule]
    both = {5: (3 + grow[0], 5 + grow[1]), 3: (3 + grow[0], 2.5), 0: (1.5, 2.5)}[done]
    assert list(tasks) == pytest.approx(sorted(both))


def test_tasks_have_limits(clients):
    fed = federation(World(plain_net, clients, epochs=3), rule="ira", beta=0.0, cohort=5, easy=2.5, hard=9.0)
    assert fed.server["H"].tolist() == [3] * 5
    for _ in range(2):
        fed.step()
    assert fed.server["H"].max() == 3
    lost = federation(World(plain_net, clients), beta=0.0, cohort=5, system=System(affordable_max=1e-9))
    for _ in range(14):
        assert lost.step() == []
    assert lost.server["L"].tolist() == [0.001] * 5


# ---------------------------------------------------------------------- who does what


def test_a_client_does_the_hard_task_or_the_easy_one_or_none(clients):
    fed = federation(World(plain_net, clients, epochs=3), system=MACHINES, cohort=5, beta=0.0)
    for round in range(1, 10):
        fed.begin()
        able, did = MACHINES.affordable(ORDER, round, range(5)), fed.known.epochs.tolist()
        for id, (L, H) in enumerate(zip(fed.server["L"].tolist(), fed.server["H"].tolist(), strict=True)):
            assert did[id] == (H if able[id] >= H else L if able[id] >= L else 0)
        fed.end()


def test_rounds_in_which_all_drop_out_leave_the_model_and_halve_the_tasks(clients):
    """Else a cohort whose tasks are all too long would never come out of it."""
    fed = federation(World(plain_net, clients, epochs=8), easy=8.0, hard=8.0, system=System(affordable_max=2), cohort=5)
    before = fed.server["w"].clone()
    assert fed.step() == []
    assert torch.equal(fed.server["w"], before)
    assert [len(fed.step()) for _ in range(3)] == [0, 0, 4]  # 4, 2 and 1 epochs: all but client 0 can do 1
    assert not torch.equal(fed.server["w"], before)


def test_who_is_lost_for_another_reason_is_halved_too(clients):
    fed = federation(World(plain_net, clients), faults=Faults(dropout=0.5), cohort=5, beta=0.0)
    fed.step()
    lost = fed.answers.lost
    fed.begin()
    assert [id for id, L in enumerate(fed.server["L"].tolist()) if L == 0.5] == lost != []


# ---------------------------------------------------------------------- selection by loss


def drawn(clients, count=800, cohort=2, system=None, losses=None, **settings):
    fed = federation(World(plain_net, clients), cohort=cohort, system=system, **settings)
    if losses is not None:
        fed.known.table["loss"] = numbers(*(math.nan if each is None else each for each in losses))
    method, found = fed.method, Counter()
    for round in range(1, count + 1):
        found.update(method.at(round=round, cohort=cohort).cohort_of(fed.server, fed.known).ids)
    return [found[id] / count for id in range(5)]


def test_clients_are_drawn_by_size_and_loss(clients):
    """v = sqrt(n) loss, P = softmax(0.01 v); what public code makes of later rounds divides by sqrt(n)."""
    sizes, losses = numbers(23, 7, 41, 3, 12), numbers(40.0, 2.0, 30.0, 90.0, 5.0)
    share = (0.01 * sizes.sqrt() * losses).softmax(0)
    assert drawn(clients, cohort=1, losses=losses.tolist()) == pytest.approx(share.tolist(), abs=0.04)
    assert max(share) > 2 * min(share)
    assert drawn(clients, cohort=1, beta=1e-9, losses=losses.tolist()) == pytest.approx([0.2] * 5, abs=0.04)


def test_who_has_not_sent_a_loss_counts_with_the_largest(clients):
    same_sizes = toy.toy_clients((9, 9, 9, 9, 9))
    share = drawn(same_sizes, cohort=1, beta=1.0, losses=[0.1, None, 0.8, None, 0.1])
    assert share[1] == pytest.approx(share[2], abs=0.04)
    assert share[3] == pytest.approx(share[2], abs=0.04)
    assert share[0] < share[2] / 3
    assert drawn(same_sizes, cohort=1) == pytest.approx([0.2] * 5, abs=0.04)


def test_clients_of_a_round_are_different_however_unlike_their_losses(clients):
    assert drawn(clients, count=20, cohort=5, beta=1e6, losses=[1e3, 1, 1, 1, 1]) == [1.0] * 5


def test_only_who_can_be_asked_is_drawn(clients):
    fed, machines = federation(World(plain_net, clients), system=System(availability=0.5)), System(availability=0.5)
    for round in range(1, 9):
        ids = fed.step()
        there = machines.available(ORDER, round, range(5))
        assert {*ids} <= {*there}
        assert len(ids) == min(3, len(there))


def test_the_loss_is_that_of_the_received_model(clients):
    world = World(plain_net, clients)
    fed = federation(world, cohort=5)
    fed.step()
    same(fed.known.loss, torch.stack([world.risk(world.net(), i).detach() for i in range(5)]))
    quiet = federation(world, cohort=5, beta=0.0)
    quiet.step()
    assert quiet.known.loss.isnan().all()


# ---------------------------------------------------------------------- bytes, newcomers, refusals


def test_a_model_down_and_one_up_from_those_that_finish(clients):
    world = World(norm_net, clients)
    size, asked, answered = 8 * len(flat(world.net())), 0, 0
    fed = federation(world, system=MACHINES)
    for _ in range(6):
        ids = fed.step()
        asked, answered = asked + len(ids) + len(fed.answers.lost), answered + len(ids)
    assert (fed.traffic.down, fed.traffic.up) == (asked * size, answered * size)
    assert asked > answered


def test_a_newcomer_gets_the_model(clients):
    fed = federation(World(plain_net, clients))
    fed.step()
    down = fed.method.newcomer(fed.server)
    assert down.shared is fed.server["w"]
    assert fed.method.notes(fed.server) == {"easy": 1.0, "hard": 2.0}


def test_an_easy_task_is_not_longer_than_a_hard_one(clients):
    with pytest.raises(Problem, match="fedsae's easy task cannot be longer than its hard one: 3 > 2 epochs"):
        federation(World(plain_net, clients), easy=3.0)
