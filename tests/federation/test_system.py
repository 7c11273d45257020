"""The machines that clients are: who can be asked, what each can afford, and how long it takes on a simulated clock."""

import copy
import json
import math
from dataclasses import dataclass, replace

import pytest
import torch

import perfed
from perfed import api
from perfed.contract import checks, toy
from perfed.core.data import Meter, Plan
from perfed.core.errors import Problem
from perfed.core.messages import Up
from perfed.core.model import Model
from perfed.core.rounds import Chosen, Phase, Selection
from perfed.engines.base import Job, Request
from perfed.engines.local import ClientData, Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.faults import Answers, Faults, tally
from perfed.federation.federation import Federation, step
from perfed.federation.system import System
from perfed.methods.fedavg import FedAvg
from perfed.report.comparison import measure_tables
from perfed.report.picture import picture
from perfed.studies import measures
from perfed.training.observers.checkpoint import Checkpoints

SIZES = (8, 3, 7, 5, 6)
ENGINES = {
    "sequential": Sequential,
    "workers": lambda *jobs: Workers(*jobs, workers=2),
    "vectorised": Vectorised,
    "in blocks": lambda *jobs: Vectorised(*jobs, block=2),
}
COMPILED = pytest.param("compiled", marks=pytest.mark.slow)
MACHINES = System(
    speed=10, speed_spread=0.5, jitter=0.2, latency=0.1, bandwidth=500, bandwidth_spread=0.3, availability=0.8,
    affordable_max=3, affordable_spread=0.3,
)  # fmt: skip


def job(kind=FedAvg, seed=5, cohort=3, sizes=SIZES, **settings):
    method = kind(Model(toy.plain_net, dtype=torch.float64), **{"lr": 0.05, "epochs": 2, "batch_size": 4} | settings)
    return Job(method, toy.toy_clients(sizes), seed, cohort)


def played(engine, rounds=5, **options):
    fed = Federation(engine, **options)
    cohorts = [fed.step() for _ in range(rounds)]
    return fed, cohorts, checks.play(engine, (), fed)


# ---------------------------------------------------------------------- parts of an epoch


@dataclass(frozen=True)
class Phases(FedAvg):
    """Loops of every length, and a count of their steps."""

    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        w = self.descend(w, data, epochs=3, stream=1)
        w = self.descend(w, data, steps=7, stream=2)
        counts = torch.stack([data.steps(), data.steps(epochs=3), data.steps(steps=7)])
        return client, Up(mean=w - down.shared, own=counts)

    def nothing(self, carry, batch, given):
        return carry


def test_a_part_of_an_epoch_is_that_share_of_all_steps():
    """Rounded up; after whole epochs, other lengths keep whole epochs, as for every straggler."""
    plan = Plan(4, 5, None)
    assert [plan.shortened(done, 5).total(14) for done in (0.001, 0.25, 0.5, 1, 1.5, 1.51, 4.9, 5)] == [
        1, 1, 2, 4, 6, 7, 20, 20
    ]  # fmt: skip
    assert Plan(4, 10, None).shortened(1, 4).total(14) == 12  # three epochs of four batches
    assert Plan(4, 10, None).shortened(1.1, 4).total(14) == 11
    assert Plan(4, 5, 30).shortened(1.5, 4).total(14) == 12
    assert Plan(1, 1, None).shortened(0.1, 1).total(30) == 3  # 30 * 0.1 is 3.0000000000000004 in another order
    assert Plan(4, 5, None).shortened(1.5, 5).total(0) == 0


@pytest.mark.parametrize("done", [1, 2, 3, 0.001, 0.5, 1.5, 2.999, 2.0, 0.1, 1 / 3])
def test_steps_are_those_that_are_taken(done):
    clients = toy.toy_clients(SIZES)
    method = job(Phases, epochs=3).method
    for id, size in enumerate(SIZES):
        data = ClientData(clients, id, torch.tensor(0), method, done=done)
        for length in ({}, {"epochs": 2}, {"steps": 7}):
            plan = Plan(4, length.get("epochs", 3), length.get("steps")).shortened(done, 3)
            for known in (done, torch.tensor(done, dtype=torch.float64)):
                data.done = known
                assert data.steps(**length) == plan.total(size)
                assert data.steps(**length).dtype == torch.int64
            data.meter = Meter(torch.tensor(0))
            data.fold(method.nothing, (), **length)
            assert data.meter.samples == plan.samples(size, plan.total(size))


@pytest.mark.parametrize("engine", [*list(ENGINES)[1:], COMPILED])
def test_engines_end_alike_after_parts_of_an_epoch(engine):
    make = ENGINES.get(engine, lambda *jobs: Vectorised(*jobs, compile="eager"))
    find = lambda make: exchanged(make(job(Phases, epochs=3)), [1.5, 0.25, 3, 2, 2.2])
    expected, found = find(Sequential), find(make)
    assert checks.difference((found.mean, found.own), (expected.mean, expected.own)) < 1e-12
    assert found.own.tolist() == expected.own.tolist()
    assert expected.own[:, 0].tolist() == [3, 1, 6, 4, 5]


def test_recorded_steps_end_alike_after_parts_of_an_epoch():
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    find = lambda engine: exchanged(engine, [1.5, 0.25, 3, 2, 2.2])
    expected, found = find(Sequential(job(Phases, epochs=3))), find(Vectorised(job(Phases, epochs=3), fast=True))
    assert checks.difference(found.mean, expected.mean) < 1e-9
    assert found.own.tolist() == expected.own.tolist()


def exchanged(engine, done, counted=False):
    try:
        down = engine.method.broadcast(engine.method.init_server(5), torch.arange(5))
        (reply,) = engine.exchange([Request(0, 1, 0, list(range(5)), down, done, counted=counted)])
        return reply if counted else reply.uploads
    finally:
        engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_are_counted_as_steps_look_at_them(engine):
    reply = exchanged(ENGINES[engine](job(Phases, epochs=3)), [1.5, 0.25, 3, 2, 2.2], counted=True)
    plans = [Plan(4, 3, None), Plan(4, 3, None), Plan(4, 3, 7)]
    count = lambda size, done: sum(
        plan.samples(size, plan.shortened(done, 3).total(size)) for plan in plans
    )  # fmt: skip
    assert reply.looked.tolist() == [count(*each) for each in zip(SIZES, [1.5, 0.25, 3, 2, 2.2], strict=True)]


@dataclass(frozen=True)
class Taught(FedAvg):
    public = "unlabelled"
    sends_public = True

    def nothing(self, carry, batch, given):
        return carry

    def local(self, client, down, data):
        w = data.public.fold(self.nothing, down.shared, steps=3, batch_size=2)
        return client, Up(mean=self.descend(w, data) - down.shared)


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_on_public_samples_count_too(engine):
    reply = exchanged(ENGINES[engine](job(Taught)), None, counted=True)
    assert reply.looked.tolist() == [2 * size + 6 for size in SIZES]


# ---------------------------------------------------------------------- draws


def test_nothing_is_simulated_by_default():
    system, able = System(), [0, 2, 3]
    assert (system.timed, system.limits) == (False, False)
    assert system.available(0, 1, able) is able
    assert system.affordable(0, 1, able) is None
    fed = Federation(Sequential(job()))
    fed.step()
    assert (fed.clock, fed.took) == (0, {})
    assert set(fed.known.save()) == {"asked", "answered", "failed", "joined"}
    assert fed.known.affordable.tolist() == [math.inf] * 5


def test_draws_are_those_of_seed_client_and_round():
    """Whoever else is asked."""
    everybody, some = range(50), [3, 7, 41]
    for draw in (MACHINES.affordable, lambda *place: MACHINES.seconds(*place, [100] * len(place[2]), 10, 10)):
        drawn = draw(0, 1, everybody)
        assert draw(0, 1, some) == [drawn[id] for id in some]
        assert drawn != draw(1, 1, everybody)
        assert drawn != draw(0, 2, everybody)
    there = MACHINES.available(0, 1, everybody)
    assert MACHINES.available(0, 1, some) == [id for id in some if id in there]


def test_draws_are_spread_as_they_should_be():
    ids, rounds = range(100), range(1, 101)
    there = [len(System(availability=0.3).available(0, round, ids)) for round in rounds]
    assert sum(there) / 10_000 == pytest.approx(0.3, abs=0.02)
    own = torch.tensor(System(speed=1, speed_spread=0.5).seconds(0, 1, range(4000), [1] * 4000, 0, 0)).log()
    assert (own.mean(), own.std()) == (pytest.approx(0, abs=0.03), pytest.approx(0.5, abs=0.03))
    steady = System(affordable_min=2, affordable_max=6)
    assert steady.affordable(0, 1, ids) == steady.affordable(0, 2, ids)
    assert 2 <= min(steady.affordable(0, 1, ids)) < 2.5 < 5.5 < max(steady.affordable(0, 1, ids)) <= 6
    varied = replace(steady, affordable_spread=0.25)
    share = torch.tensor([varied.affordable(0, round, ids) for round in rounds]) / torch.tensor(
        steady.affordable(0, 1, ids)
    )
    assert (share.mean(), share.std()) == (pytest.approx(1, abs=0.01), pytest.approx(0.25, abs=0.01))


def test_seconds_are_messages_and_training():
    system = System(speed=50, latency=0.5, bandwidth=1000)
    assert system.seconds(0, 1, [0, 4], [100, 25], 300, 200) == [1 + 0.5 + 2, 1 + 0.5 + 0.5]
    assert System(latency=0.5).seconds(0, 1, [0], [100], 300, 200) == [1]


# ---------------------------------------------------------------------- who is asked, and for how much


def test_who_is_not_available_is_not_asked():
    machines = System(availability=0.5)
    fed = Federation(Sequential(job()), system=machines)
    for round in range(1, 9):
        there = machines.available(5, round, range(5))
        ids = fed.step()
        assert {*ids} <= {*there}
        assert len(ids) == min(3, len(there))
        assert fed.known.available == there
        assert fed.answers.lost == []
    assert Federation(Sequential(job()), system=machines).step(range(5)) == machines.available(5, 1, range(5))


@dataclass(frozen=True)
class Everybody(FedAvg):
    def phase(self, server):
        return Phase(everybody=self.context.round == 1)

    def cohort_of(self, server, info):
        return [0, 1, 2, 3, 4]


def test_whoever_is_chosen_has_to_be_available():
    machines = System(availability=0.5)
    fed = Federation(Sequential(job(Everybody)), system=machines)
    assert [fed.step() for _ in range(4)] == [machines.available(5, round, range(5)) for round in range(1, 5)]


def test_a_round_in_which_nobody_can_be_asked():
    fed = Federation(Sequential(job()), system=System(availability=1e-9, speed=1))
    server = fed.server
    assert fed.step() == []
    assert (fed.round, fed.clock, fed.diverged) == (1, 0, "")
    assert fed.server is server


CAN = [0.5, 1.0, 2.5, 4.0, 0.0]


@pytest.mark.parametrize(
    ("selected", "discard", "expected"),
    [
        ((None, None), False, Answers([0, 1, 2, 3], [4], [0.5, 1, 2.5, 4], None)),
        ((None, None), True, Answers([3], [0, 1, 2, 4], [4], None)),
        (([0.5, 2, 2, 2, 2], None), False, Answers([0, 1, 2, 3], [4], [0.5, 1, 2, 2], [0.5, 2, 2, 2])),
        (([0.5, 2, 2, 2, 2], None), True, Answers([0, 2, 3], [1, 4], [0.5, 2, 2], [0.5, 2, 2])),
        (([1, 2, 3, 4, 2], [0.75, 0.75, 1.5, 1, 1]), True, Answers([1, 2, 3], [0, 4], [0.75, 1.5, 4], [2, 3, 4])),
    ],
)
def test_nobody_does_more_than_it_can_or_than_it_was_asked_for(selected, discard, expected):
    table = [None if column is None else dict(enumerate(column)) for column in selected]
    found = Answers([0, 1, 2, 3, 4], []).limited(Chosen([], *table), CAN, 4, discard)
    assert found == expected
    assert all(isinstance(epochs, int) for epochs in found.done if epochs == int(epochs))


def test_stragglers_and_what_is_affordable_combine_by_the_smaller():
    answers = Answers([0, 1], [2], [1, 3])
    assert answers.limited(Chosen([]), [2.5, 2.5], 3, discard=False) == Answers([0, 1], [2], [1, 2.5])
    assert answers.limited(Chosen([]), None, 3, discard=False) is answers
    assert answers.late(3) == {0: 1}


@dataclass(frozen=True)
class Careful(FedAvg):
    """Asks three clients for parts of an epoch, and notes what is known of the work of all."""

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "known": []}

    def broadcast(self, server, ids):
        return FedAvg.broadcast(self, server["w"], ids)

    def show(self, server, ids):
        return self.broadcast(server, ids)

    def cohort_of(self, server, info):
        server["known"].append((info.epochs.tolist(), info.affordable.tolist(), list(info.available)))
        return Selection([0, 2, 3], [1.5, 0.4, 2], [0.5, 0.1, 1])

    def aggregate(self, server, cohort):
        return server | {"w": FedAvg.aggregate(self, server["w"], cohort)}


def test_a_method_knows_what_its_clients_can_and_did():
    machines = System(affordable_max=3, affordable_spread=0.5)
    fed, cohorts, _ = played(Sequential(job(Careful)), 3, system=machines)
    first, second, _ = fed.server["known"]
    assert all(math.isnan(epochs) for epochs in first[0])
    assert first[1] == machines.affordable(5, 1, range(5))
    asked, least = {0: 1.5, 2: 0.4, 3: 2}, {0: 0.5, 2: 0.1, 3: 1}
    for id, can in enumerate(first[1]):
        if id in asked:
            did = asked[id] if can >= asked[id] else least[id] if can >= least[id] else 0
            assert second[0][id] == did
            assert (id in cohorts[0]) == (did > 0)
        else:
            assert math.isnan(second[0][id])


# ---------------------------------------------------------------------- the clock


def test_a_round_takes_as_long_as_its_slowest_client():
    fed = Federation(Sequential(job(cohort=5)), system=System(speed=10, latency=0.25, bandwidth=1e4))
    fed.step()
    size = fed.method.model.size * 8
    expected = {id: 0.5 + 2 * size / 1e4 + 2 * samples / 10 for id, samples in enumerate(SIZES)}
    assert fed.took == pytest.approx(expected)
    assert fed.known.seconds.tolist() == list(fed.took.values())
    assert fed.clock == max(fed.took.values())
    fed.step()
    assert fed.clock == 2 * max(fed.took.values())


@dataclass(frozen=True)
class Pairs(FedAvg):
    def phase(self, server):
        return Phase(exchanges=2)

    def cohort_of(self, server, info):
        return [[0, 1], [0, 2]]


def test_exchanges_follow_one_another():
    fed = Federation(Sequential(job(Pairs)), system=System(speed=1))
    fed.step()
    assert fed.took == {0: 4 * 8, 1: 2 * 3, 2: 2 * 7}
    assert fed.clock == 16 + 16
    assert fed.known.seconds.nan_to_num(-1).tolist() == [32, 6, 14, -1, -1]


def test_who_is_lost_is_not_waited_for():
    fed = Federation(Sequential(job(cohort=5)), system=System(speed=1), faults=Faults(dropout=0.6))
    ids = fed.step()
    assert 0 < len(ids) < 5
    assert fed.clock == max(2 * SIZES[id] for id in ids)


@pytest.mark.parametrize("engine", list(ENGINES)[1:])
def test_engines_agree_about_work_and_time(engine):
    options = {"system": MACHINES, "faults": Faults(dropout=0.2, stragglers=0.3)}
    fed, cohorts, expected = played(Sequential(job(Phases)), **options)
    other, others, found = played(ENGINES[engine](job(Phases)), **options)
    assert others == cohorts
    checks.compare(found, expected, engine, tolerance=1e-12)
    assert (other.clock, other.took) == (fed.clock, fed.took)
    assert checks.difference(other.known.save(), fed.known.save()) == 0
    assert any(isinstance(epochs, float) for epochs in fed.answers.done)


def test_runs_in_one_batch_have_clocks_of_their_own():
    jobs = [job(Phases, seed) for seed in (0, 3)]
    engine, alone = Vectorised(*jobs), [Federation(Vectorised(each), system=MACHINES) for each in jobs]
    both = [Federation(engine, run, system=MACHINES) for run in range(2)]
    for _ in range(4):
        assert step(both) == [fed.step() for fed in alone]
    assert [fed.clock for fed in both] == [fed.clock for fed in alone]
    assert both[0].clock != both[1].clock
    for one, other in zip(both, alone, strict=True):
        assert checks.difference(one.server, other.server) < 1e-12


def test_a_run_goes_on_in_its_time():
    options = {"system": MACHINES, "faults": Faults(dropout=0.2)}
    whole, _, expected = played(Sequential(job(Phases)), 6, **options)
    half = Federation(Sequential(job(Phases)), **options)
    for _ in range(3):
        half.step()
    rest = Federation(
        Sequential(job(Phases)), server=half.server, round=3, traffic=half.traffic, clock=half.clock, **options
    )
    rest.known.restore(copy.deepcopy(half.known.save()))
    for _ in range(3):
        rest.step()
    checks.compare(checks.play(rest.engine, (), rest), expected, "resumed", tolerance=0)
    assert (rest.clock, rest.took) == (whole.clock, whole.took)


# ---------------------------------------------------------------------- what is wrong gets a sentence


@pytest.mark.parametrize(
    ("epochs", "least", "sentence"),
    [
        ([1, 0], None, "Asking.cohort_of asks client 3 for 0 epochs: above 0, and at most 2"),
        ([1, 2.5], None, "asks client 3 for 2.5 epochs: above 0, and at most 2"),
        ([math.nan, 1], None, "asks client 1 for nan epochs"),
        ([1, 1], [1], "selects 2 clients with 1 epochs"),
        ([1, 1], [1, -1], "asks client 3 for -1 epochs"),
    ],
)
def test_work_that_is_none(epochs, least, sentence):
    @dataclass(frozen=True)
    class Asking(FedAvg):
        def cohort_of(self, server, info):
            return Selection([1, 3], epochs, least)

    with pytest.raises(Problem, match=sentence):
        Federation(Sequential(job(Asking))).step()


# ---------------------------------------------------------------------- in a run

TINY = dict(rounds=6, clients=4, epochs=2, batch_size=50, hidden=8, checkpoint_every=2, engine="sequential")
SIMULATED = dict(speed=100, jitter=0.2, latency=0.5, bandwidth=1e5, availability=0.7, affordable_max=3)


def lines(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return perfed.run("fedavg", "ditto", out=tmp_path_factory.mktemp("simulated") / "run", **TINY, **SIMULATED)


def test_a_run_says_what_it_simulated(simulated):
    for method in simulated.entries:
        log, last = lines(simulated.path / method), 0
        for line in log:
            assert {*line["seconds"]} == {*line["cohort"]}
            assert line["clock"] == pytest.approx(last + max(line["seconds"].values(), default=0), abs=1e-4)
            assert len(line["cohort"]) + len(line["lost"]) + line["away"] == 4
            assert all(0 < epochs < 2 for epochs in line["late"].values())
            last = line["clock"]
        result = simulated.result(method)
        assert result["clock"] == pytest.approx(last, abs=1e-5)
        assert result["faults"] == tally(log)
        assert result["faults"]["away"] > 0 < result["faults"]["late"]
        assert simulated.clock(method) == [line["clock"] for line in log]
    summary = (simulated.path / "report" / "summary.md").read_text()
    assert "clients a round could not be asked" in summary
    clocks = [simulated.result(method)["clock"] for method in ("local", "fedavg", "ditto")]
    assert "simulated time: Local {:.1f} s, FedAvg {:.1f} s, Ditto {:.1f} s".format(*clocks) in summary
    training = [clock - 6 * 1 for clock in clocks[1:]]  # but for latency, and a little for bytes
    assert training[1] / training[0] == pytest.approx(2, rel=0.1)  # Ditto trains two models
    assert picture(simulated).startswith(b"\x89PNG")


def test_a_resumed_run_goes_on_in_its_time(simulated, tmp_path, monkeypatch):
    folder, write = tmp_path / "run", Checkpoints.write

    def stop(self, federation):
        write(self, federation)
        if federation.round == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        perfed.run("fedavg", "ditto", out=folder, baseline=False, **TINY, **SIMULATED)
    monkeypatch.undo()
    api.resume(folder, api.Console(quiet=True))
    for name in ("rounds.jsonl", "metrics.jsonl", "result.json", "server.safetensors"):
        assert (folder / "fedavg" / name).read_bytes() == (simulated.path / "fedavg" / name).read_bytes(), name


def test_time_to_a_target(simulated):
    clock = simulated.clock("fedavg")
    found = measures.summary(simulated, "fedavg", target=0.0)
    assert (found["clock"], found["clock_to_target"], found["flops"]) == (clock[-1], clock[0], None)
    heads, rows = measure_tables([found], target=0.0)[-1]
    assert (heads[-1], rows[0][-1]) == ("simulated time", f"{clock[0]:,.1f} s")
    never = measure_tables([measures.summary(simulated, "fedavg", 1.1) | {"reached": 0, "seeds": 1}], target=1.1)[-1]
    assert never[1] == [("fedavg", "not reached", *"----")]


def test_the_best_round_has_the_time_of_all(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", baseline=False, save_round="best", **TINY | {"lr": 3.0}, speed=100)
    result = run.result("fedavg")
    assert result["saved_round"] < 6
    assert result["clock"] == pytest.approx(lines(run.path / "fedavg")[-1]["clock"], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"speed": -1}, "system.speed must be at least 0, not -1"),
        ({"availability": 0}, "system.availability must be above 0, not 0"),
        ({"jitter": 0.1}, "system.jitter has no effect without system.speed: set that above 0"),
        ({"affordable_spread": 0.1}, "system.affordable_spread has no effect without system.affordable_max"),
        (
            {"affordable_max": 1, "affordable_min": 2},
            r"system.affordable_min \(2\) is above system.affordable_max \(1\)",
        ),
        ({"affordable_maxi": 1}, "did you mean 'affordable_max'"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(settings, sentence, tmp_path):
    with pytest.raises(Problem, match=sentence):
        perfed.run("fedavg", out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
