"""Clients that drop out and clients that straggle: what they do to a round, the same on every engine."""

import collections
import dataclasses
import json

import pytest
import torch
from reference import state_of

import perfed
from perfed import api
from perfed.cli import main
from perfed.contract import checks
from perfed.contract.toy import job, maker, plain_net, toy_clients
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.base import Job, Request
from perfed.engines.local import ClientData, Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.faults import Answers, Faults, in_words, refuse_pointless, tally
from perfed.federation.federation import Federation, evaluate, step
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import find, methods
from perfed.training.observers.checkpoint import Checkpoints

ENGINES = {
    "workers": lambda m, c: Workers(job(m, c), workers=2),
    "vectorised": lambda m, c: Vectorised(job(m, c)),
    "vectorised in blocks": lambda m, c: Vectorised(job(m, c), block=2, sizes=(2, 3)),
}
IDS = list(range(20))
FAULTY = Faults(dropout=0.3, stragglers=0.7)


def toy(**changed):
    base = {"lr": 0.05, "momentum": 0.5, "epochs": 3, "batch_size": 5}
    return FedAvg(Model(plain_net, dtype=torch.float64), **{**base, **changed})


# ---------------------------------------------------------------------- draws


def test_nothing_fails_by_itself():
    assert Faults().draw(0, 1, IDS, 5) == Answers(IDS, [], None)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_a_share_drops_out(share):
    drawn = [Faults(dropout=share).draw(0, round, IDS, 5) for round in range(200)]
    assert {len(one.lost) for one in drawn} == {round(20 * share)}
    assert all(sorted([*one.ids, *one.lost]) == IDS and one.done is None for one in drawn)
    often = collections.Counter(id for one in drawn for id in one.lost)
    assert all(abs(often[id] / 200 - share) < 0.13 for id in IDS)  # four deviations: nobody is preferred


def test_a_part_of_a_client_is_right_on_average():
    lost = [len(Faults(dropout=0.3).draw(0, round, [7], 5).lost) for round in range(500)]
    assert set(lost) == {0, 1}
    assert abs(sum(lost) / 500 - 0.3) < 0.08


def test_draws_are_those_of_seed_and_round():
    draw = lambda seed, round: FAULTY.draw(seed, round, IDS, 5)
    assert draw(3, 4) == draw(3, 4)
    assert draw(3, 4) != draw(4, 4)
    assert draw(3, 4) != draw(3, 5)


def test_stragglers_finish_one_to_all_epochs():
    drawn = [Faults(stragglers=0.5).draw(1, round, IDS, 4) for round in range(200)]
    assert all(one.ids == IDS and not one.lost for one in drawn)
    done = collections.Counter(e for one in drawn for e in one.done)
    assert set(done) == {1, 2, 3, 4}
    assert sum(done.values()) - done[4] == pytest.approx(2000 * 3 / 4, rel=0.1)  # a quarter of them finishes all
    assert all(done[e] == pytest.approx(500, rel=0.2) for e in (1, 2, 3))


def test_discarded_stragglers_are_lost():
    """The same clients as where their work is used."""
    used, lost = (Faults(0.2, 0.5, discard).draw(1, 1, IDS, 100) for discard in (False, True))
    late = [id for id, e in zip(used.ids, used.done, strict=True) if e < 100]
    assert len(used.lost) == 4
    assert len(lost.lost) == 12
    assert set(lost.lost) >= {*used.lost, *late}
    assert lost.done is None


def test_everybody_may_fail():
    assert Faults(stragglers=1.0, discard=True).draw(0, 1, IDS, 5) == Answers([], IDS)
    assert Faults(dropout=0.5, stragglers=0.5).draw(0, 1, [], 5) == Answers([], [])


# ---------------------------------------------------------------------- what a round does


def play(engine, faults=FAULTY, rounds=4):
    federation = Federation(engine, faults=faults)
    try:
        for _ in range(rounds):
            federation.step()
        models = {}
        values = federation.evaluate(lambda id, found: models.update({id: found}))
    finally:
        engine.close()
    states = {str(id): state for id, state in federation.engine.states[0].items()}
    return checks.Outcome(federation.server, states, models, values.tables, dataclasses.asdict(federation.traffic))


# Steps counted (scaffold), two phases of different lengths (fedrep), a number of steps (pfedme), several exchanges and
# groups (pfedmt).
SETTINGS = {"scaffold": {}, "fedrep": {"head_epochs": 4}, "pfedme": {"steps": 7}, "pfedmt": {}}


@pytest.mark.parametrize("engine", ["workers", "vectorised in blocks"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_engine_ends_alike(name, engine):
    check_alike(name, engine, "plain", **SETTINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", list(methods()))
def test_every_engine_ends_alike_for_all(name, engine):
    check_alike(name, engine, "norm")


def check_alike(name, engine, network, **settings):
    make, clients = maker(find(name), network), toy_clients()
    method = make(epochs=3, **settings)
    if engine.startswith("vectorised") and not method.vectorised:
        pytest.skip("not batched")
    expected = play(Sequential(job(method, clients)))
    checks.compare(play(ENGINES[engine](method, clients)), expected, engine)
    whole = play(Sequential(job(method, clients)), Faults())
    assert checks.difference(expected.models, whole.models) > 1e-6


def test_recorded_steps_end_alike():
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    clients, method = toy_clients((8, 3, 7)), toy(epochs=2)
    found = play(Vectorised(job(method, clients), fast=True), rounds=2)
    checks.compare(found, play(Sequential(job(method, clients)), rounds=2), "recorded")


@pytest.mark.parametrize("engine", ["sequential", *ENGINES])
def test_a_straggler_does_the_first_of_its_epochs(engine):
    """As a client whose method has fewer epochs; one that finishes all is like one of whom nothing is said."""
    clients, ids = toy_clients(), [0, 2, 3, 4]
    make = {"sequential": lambda m, c: Sequential(Job(m, c, seed=5))} | ENGINES
    train = lambda epochs, done: train_once(make[engine](toy(epochs=epochs), clients), ids, done)
    found, (all_of_it, plain) = train(3, [2, 1, 3, 2]), (train(3, [3, 3, 3, 3]), train(3, None))
    assert torch.equal(all_of_it, plain)
    for row, epochs in enumerate([2, 1, 3, 2]):
        assert checks.difference(found[row], train(epochs, None)[row]) < 1e-12


def train_once(engine, ids, done):
    try:
        method = engine.method
        down = method.broadcast(method.init_server(5), torch.tensor(ids))
        return engine.exchange([Request(0, 1, 0, ids, down, done)])[0].uploads.mean
    finally:
        engine.close()


def test_what_is_shortened_in_proportion():
    """Phases of another length than `epochs`, and numbers of steps: the same part, rounded up."""
    from perfed.core.data import Plan

    assert Plan(5, 4, None).shortened(1, 4) == Plan(5, 1, None)
    assert Plan(5, 10, None).shortened(1, 4) == Plan(5, 3, None)
    assert Plan(5, 4, 30, stream=2).shortened(3, 4) == Plan(5, 3, 23, stream=2)
    assert Plan(5, 4, 30).shortened(4, 4) == Plan(5, 4, 30)
    data = ClientData(toy_clients(), 0, torch.tensor(0), toy(epochs=4), done=3)
    assert data.steps() == 15  # 23 samples: 5 batches
    assert data.steps(epochs=2) == 10
    assert data.steps(steps=10) == 8


def test_who_drops_out_leaves_no_trace_but_its_download():
    """The server ends as if it had chosen the others; who is lost keeps its state."""
    clients, faults = toy_clients(), Faults(dropout=0.4)
    make = lambda: maker(find("ditto"))()
    faulty, chosen = (Federation(Sequential(Job(make(), clients, 5)), faults=f) for f in (faults, Faults()))
    for _ in range(3):
        before = {id: state_of(faulty, id) for id in range(5)}
        ids = faulty.step()
        assert len(ids) == 3
        assert faulty.answers.lost == [id for id in range(5) if id not in ids]
        assert all(checks.difference(state_of(faulty, id), before[id]) == 0 for id in faulty.answers.lost)
        assert chosen.step(ids) == ids
    assert checks.difference(faulty.server, chosen.server) == 0
    assert checks.difference(dict(faulty.engine.states[0]), dict(chosen.engine.states[0])) == 0
    assert faulty.traffic.up == chosen.traffic.up
    assert faulty.traffic.down * 3 == chosen.traffic.down * 5


@pytest.mark.parametrize("name", list(methods()))
def test_a_round_without_answers_changes_nothing(name, monkeypatch):
    """Beyond what the server made of its state before the round; public samples are sent all the same."""
    federation, begun = Federation(Sequential(job(maker(find(name))()))), []
    kind = type(federation.method)
    begin = lambda self, server, info, plain=kind.before_round: begun.append(plain(self, server, info)) or begun[-1]
    monkeypatch.setattr(kind, "before_round", begin)
    federation.step()
    states, sent = dict(federation.engine.states[0]), dataclasses.asdict(federation.traffic)
    federation.faults = Faults(stragglers=1.0, discard=True)
    assert federation.step() == []
    assert len(federation.answers.lost) >= 1
    assert federation.round == 2
    assert checks.difference((federation.server, dict(federation.engine.states[0])), (begun[1], states)) == 0
    now = dataclasses.asdict(federation.traffic)
    assert all(("public_data" in numbers["extra"]) == kind.sends_public for numbers in (sent, now))
    assert {**now["extra"], "public_data": 0} == {**sent["extra"], "public_data": 0}
    assert (now["up_mean"], now["up_own"]) == (sent["up_mean"], sent["up_own"])
    federation.faults = Faults()
    assert federation.step()
    federation.evaluate()


def test_runs_in_one_batch_fail_each_in_its_own_way():
    """Also where of one run nobody answers."""
    faults, clients = Faults(dropout=0.6, stragglers=0.5), toy_clients()
    make = maker(find("ditto"))
    jobs, taken = [Job(make(epochs=3), clients, seed, cohort=2) for seed in (0, 3)], []
    engine, alone = Vectorised(*jobs), [Federation(Vectorised(job), faults=faults) for job in jobs]
    batched = [Federation(engine, run, faults=faults) for run in range(2)]
    for _ in range(8):
        taken.append(step(batched))
        assert taken[-1] == [one.step() for one in alone]
    assert any([] in round and round != [[], []] for round in taken)
    assert any(all(round) for round in taken)
    for one, other, values in zip(batched, alone, evaluate(batched, [None, None]), strict=True):
        ends = [(each.server, checks.states_of(each)) for each in (one, other)]
        assert checks.difference(*ends) < 1e-9
        assert checks.difference(values.tables, other.evaluate().tables) < 1e-9
        assert one.traffic == other.traffic


# ---------------------------------------------------------------------- in a run

TINY = dict(rounds=6, clients=4, epochs=2, batch_size=50, hidden=8, checkpoint_every=2, participation=0.5)
FAILING = dict(dropout=0.5, stragglers=0.5)


def lines(run, method):
    return [json.loads(line) for line in (run.path / method / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing") / "run"
    return perfed.run("fedavg", "pgfed", out=folder, engine="sequential", **TINY, **FAILING)


def test_a_run_says_who_failed(failing):
    for method in failing.entries:
        found = lines(failing, method)
        assert all(len(line["cohort"]) + len(line["lost"]) == 2 for line in found)
        assert all(set(line["late"]) <= set(line["cohort"]) for line in found)
        assert all(line["unchanged"] == (not line["cohort"]) for line in found)
        assert all(epochs == 1 for line in found for epochs in line["late"].values())
        assert failing.result(method)["faults"] == tally(found)
    assert {key: count for key, count in tally(found).items() if key != "late"} == {
        "asked": 12, "lost": 6, "rounds": 6, "unchanged": 0
    }  # fmt: skip
    assert tally(found)["late"] > 0
    summary = (failing.path / "report" / "summary.md").read_text()
    assert f"Local, FedAvg, PGFed: 6 of 12 answers lost, {tally(found)['late']} after a part of the epochs." in summary


def test_in_words():
    found = {"asked": 9, "lost": 9, "late": 0, "rounds": 3, "unchanged": 3}
    assert in_words(found) == "9 of 9 answers lost; 3 of 3 rounds had no answer and left the server as it was"


def test_where_nobody_ever_answers(tmp_path):
    """The result is the initial model, and nothing breaks on the way there."""
    run = perfed.run(
        "fedavg", out=tmp_path / "run", engine="sequential", stragglers=1.0, straggler_work="discard", **TINY
    )
    assert tally(lines(run, "fedavg"))["unchanged"] == 6
    scores = [line["accuracy"] for line in lines(run, "fedavg")]
    assert scores == scores[:1] * 6
    assert run.summary()[1]["bytes"]["up"] == 0
    assert run.summary()[1]["bytes"]["down"] > 0


def test_without_faults_nothing_is_said(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", baseline=False, engine="sequential", **TINY)
    assert "faults" not in run.result("fedavg")
    assert not {"lost", "late", "unchanged"} & set(lines(run, "fedavg")[0])


def test_a_resumed_run_fails_alike(failing, tmp_path, monkeypatch):
    """Stopped after round 4, it goes on from its checkpoint and ends with the same bytes."""
    folder = tmp_path / "run"
    write = Checkpoints.write

    def stop(self, federation):
        write(self, federation)
        if federation.round == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        perfed.run("fedavg", "pgfed", out=folder, engine="sequential", baseline=False, **TINY, **FAILING)
    monkeypatch.undo()
    api.resume(folder, perfed.api.Console(quiet=True))
    for name in ("rounds.jsonl", "metrics.jsonl", "result.json", "server.safetensors"):
        assert (folder / "fedavg" / name).read_bytes() == (failing.path / "fedavg" / name).read_bytes(), name


def test_a_comparison_of_failing_runs(tmp_path, capsys):
    """Two seeds, sums over both; arithmetic is not known where there are stragglers."""
    words = "compare fedavg --seeds 2 --rounds 2 --clients 4 --epochs 2 --batch-size 50 --hidden 8 --metrics --json"
    words += f" --dropout 0.5 --stragglers 0.5 --straggler-work use --engine sequential --out {tmp_path / 'both'}"
    out = called(words, capsys)
    found = json.loads(out[0].splitlines()[-1])
    assert [one["faults"]["asked"] for one in found["methods"]] == [16, 16]
    assert [one["faults"]["lost"] for one in found["methods"]] == [8, 8]
    assert all(one["flops"] is None and one["auc"] > 0 for one in found["metrics"])
    assert "Local, FedAvg: 8 of 16 answers lost" in out[1]
    assert "Local, FedAvg: 8 of 16 answers lost" in (tmp_path / "both" / "compare.md").read_text()


def called(words, capsys, code=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["perfed", *words.split()])
        with pytest.raises(SystemExit) as end:
            main()
    captured = capsys.readouterr()
    assert end.value.code == code, captured.err
    return captured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dropout 1", "run.dropout must be below 1, not 1"),
        ("--dropout -0.1", "run.dropout must be at least 0, not -0.1"),
        ("--stragglers 1.5", "run.stragglers must be at most 1, not 1.5"),
        ("--straggler-work late", "run.straggler_work must be one of use, discard, not 'late'"),
        ("--scores all", "run.scores must be one of last, every, none, not 'all'"),
        ("--stragglers 0.5 --epochs 1", "stragglers finish a part of the local epochs, but local has only 1"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(words, said, capsys, tmp_path):
    err = called(f"run fedavg --out {tmp_path / 'run'} {words}", capsys, code=2).err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_one_epoch_may_be_discarded():
    refuse_pointless(Faults(stragglers=0.5, discard=True), "fedavg", 1)
    with pytest.raises(Problem, match="--straggler-work to discard"):
        refuse_pointless(Faults(stragglers=0.5), "fedavg", 1)
