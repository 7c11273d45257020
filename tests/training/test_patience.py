"""Runs that end before their last round: by run.patience, or because they diverged, alone and in a batch."""

import dataclasses
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.core.tree import tree_map
from perfed.engines.scores import Scores
from perfed.federation.federation import Federation
from perfed.studies import measures
from perfed.training import files
from perfed.training import train as training
from perfed.training.config import from_dict
from perfed.training.observers.checkpoint import BestRound
from perfed.training.prepare import reopen

SMALL = {"clients": 4, "epochs": 1, "hidden": 8, "baseline": False}
STILL = 1e-12  # a learning rate at which nothing is learned: no evaluation is better than the first


def logged(folder, method="fedavg"):
    return [json.loads(line) for line in (folder / method / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers"])
def test_a_run_stops_where_nothing_gets_better(tmp_path, engine):
    """Evaluated in rounds 2, 4, 6: the first is the best, and 3 rounds of patience are over in round 6."""
    how = {"engine": engine, "workers": 2, "lr": STILL, "rounds": 9, "eval_every": 2, "patience": 3}
    run = perfed.run("fedavg", out=tmp_path / "run", **SMALL, **how)
    lines = logged(run.path)
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["stopped"].startswith("no better mean validation accuracy since round 2 (0.")
    assert not any("stopped" in line for line in lines[:-1])
    result = run.result("fedavg")
    assert result["rounds"] == 6
    assert result["best"] == {"round": 2, "validation": pytest.approx(lines[1]["validation"]["personal"])}
    assert all(client.path.exists() for client in run.clients())
    assert "up to 9 (patience 3) rounds" in (run.path / "report" / "summary.md").read_text()


def test_a_run_that_gets_better_goes_on(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", **SMALL, lr=0.05, rounds=5, patience=4, engine="sequential")
    assert run.result("fedavg")["rounds"] == 5
    assert "stopped" not in logged(run.path)[-1]


def configs(rates, **run):
    how = {"rounds": 6, "baseline": False, "engine": "vectorised", "save_models": "none", "fast": False, **run}
    raw = {"methods": ["fedavg"], "data": {"clients": 4}, "model": {"hidden": 8}, "run": how}
    return [from_dict({**raw, "train": {"epochs": 1, "lr": lr}}) for lr in rates]


def trained(tmp_path, name, rates, **run):
    console, places = Console(quiet=True), [tmp_path / f"{name}_{at}" for at in range(len(rates))]
    experiments = [reopen(c, p, console) for c, p in zip(configs(rates, **run), places, strict=True)]
    training.train(experiments, places, console)
    return places


def test_each_run_of_a_batch_stops_by_itself(tmp_path):
    """The middle one stops first; all end as they do alone."""
    rates = [0.02, STILL, 0.05]
    places = trained(tmp_path, "batch", rates, patience=3)
    for at, (place, lr) in enumerate(zip(places, rates, strict=True)):
        (alone,) = trained(tmp_path, f"alone{at}", [lr], patience=3, engine="sequential")
        mine, other = (json.loads((p / "fedavg" / "result.json").read_text()) for p in (place, alone))
        assert (mine["rounds"], mine["best"]["round"]) == (other["rounds"], other["best"]["round"])
        assert [line["cohort"] for line in logged(place)] == [line["cohort"] for line in logged(alone)]
        for one, two in zip(mine["clients"], other["clients"], strict=True):
            assert one["personal"]["test"]["loss"] == pytest.approx(two["personal"]["test"]["loss"], rel=1e-4)
    assert [len(logged(place)) for place in places] == [6, 4, 6]


def test_a_diverged_run_leaves_the_others_alone(tmp_path, monkeypatch):
    """The first of three sends what is not finite from its second round on; the others end as without it."""
    receive = Federation.receive

    def spoilt(self, request, reply):
        bad = self.method.lr == 0.5 and request.round > 1
        uploads = dataclasses.replace(reply.uploads, weight=-reply.uploads.weight)
        receive(self, request, dataclasses.replace(reply, uploads=uploads) if bad else reply)

    monkeypatch.setattr(Federation, "receive", spoilt)
    trained(tmp_path, "batch", [0.5, 0.02, 0.05], rounds=5)
    result = json.loads((tmp_path / "batch_0/fedavg/result.json").read_text())
    assert result["diverged"].startswith(
        "training diverged: too few clients of FedAvg sent something usable in 3 rounds"
    )
    assert result["rounds"] == 4
    assert result["refused"]["count"] == 12
    assert [line["round"] for line in logged(tmp_path / "batch_0") if "abandoned" in line] == [2, 3, 4]
    for at, lr in ((1, 0.02), (2, 0.05)):
        (alone,) = trained(tmp_path, f"alone{at}", [lr], rounds=5)
        mine, other = (json.loads((p / "fedavg/result.json").read_text()) for p in (tmp_path / f"batch_{at}", alone))
        assert mine["clients"][0]["personal"]["test"]["loss"] == pytest.approx(
            other["clients"][0]["personal"]["test"]["loss"], rel=1e-4
        )


def test_a_run_that_was_interrupted_stops_in_the_same_round(tmp_path, monkeypatch):
    """The best round so far is read back from the log."""
    how = {"lr": STILL, "rounds": 9, "patience": 4, "checkpoint_every": 1, "engine": "sequential"}
    whole = perfed.run("fedavg", out=tmp_path / "whole", **SMALL, **how)
    step = Federation.begin

    def stop(self, *given):
        if self.round == 3:
            raise KeyboardInterrupt
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "begin", stop)
        with pytest.raises(KeyboardInterrupt):
            perfed.run("fedavg", out=tmp_path / "stopped", **SMALL, **how)
    again = api.resume(tmp_path / "stopped", Console(quiet=True))
    assert again.result("fedavg") == whole.result("fedavg")
    assert logged(again.path) == logged(whole.path)
    assert len(logged(again.path)) == 5


def test_numbers_of_another_score_are_not_compared(tmp_path, monkeypatch):
    """The headline may change on the way: a squared error is never below the absolute errors of the rounds before."""
    step = Federation.begin

    def stop(self, *given):
        if self.round == 2:
            raise KeyboardInterrupt
        return step(self, *given)

    how = {"data": "diabetes", "model": "linear", "clients": 3, "epochs": 1, "lr": 0.02, "baseline": False}
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "begin", stop)
        with pytest.raises(KeyboardInterrupt):
            perfed.run("fedavg", out=tmp_path / "run", rounds=5, checkpoint_every=1, save_round="best", **how)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('headline = "auto"', 'headline = "squared_error"'))
    run = api.resume(tmp_path / "run", Console(quiet=True))
    assert [line["judged"] for line in logged(run.path)] == ["absolute_error"] * 2 + ["squared_error"] * 3
    best, curve = run.result("fedavg")["best"], measures.curves(run, "fedavg", metric="squared_error")
    assert best["round"] > 2
    assert best["validation"] == pytest.approx(curve.val[2:].mean(axis=1).min())


def test_patience_needs_validation_samples():
    with pytest.raises(Problem, match=r"run\.patience needs validation samples.*set data\.val above 0"):
        perfed.run("fedavg", **SMALL, rounds=2, patience=1, val=0.0)
    with pytest.raises(Problem, match="patience"):
        perfed.run("fedavg", **SMALL, rounds=2, patience=-1)


def models(run, method="fedavg"):
    return {client.name: load_file(client.path) for client in run.clients(method)}


@pytest.mark.parametrize("engine", ["sequential", pytest.param("vectorised", marks=pytest.mark.slow)])
def test_the_best_rounds_models_are_saved(tmp_path, engine):
    """A rate that soon is too large: the models of the best round are those of a run that ends there."""
    how = {"engine": engine, "lr": 2.0, "seed": 3, **SMALL}
    run = perfed.run("ditto", out=tmp_path / "run", rounds=8, save_round="best", **how)
    best = run.result("ditto")["best"]["round"]
    assert best < 8, "the last round must not be the best here"
    assert [line["round"] for line in logged(run.path, "ditto")] == list(range(1, 9))  # the log is of all rounds
    result = run.result("ditto")
    assert (result["rounds"], result["saved_round"]) == (8, best)
    assert not (run.path / "ditto" / "best").exists()
    short = perfed.run("ditto", out=tmp_path / "short", rounds=best, **how)
    mine, theirs = models(run, "ditto"), models(short, "ditto")
    assert all(torch.equal(mine[name][key], value) for name, one in theirs.items() for key, value in one.items())
    assert result["clients"] == short.result("ditto")["clients"]  # what is said is of what is saved
    assert result["bytes"] != short.result("ditto")["bytes"]  # but all rounds were paid for


def test_with_patience_the_best_is_saved_unless_the_last_is_asked_for(tmp_path):
    how = {"engine": "sequential", "lr": STILL, "rounds": 9, "patience": 3, **SMALL}
    assert perfed.run("fedavg", out=tmp_path / "best", **how).result("fedavg")["saved_round"] == 1
    last = perfed.run("fedavg", out=tmp_path / "last", save_round="last", **how).result("fedavg")
    assert "saved_round" not in last


BEST = {
    "engine": "sequential",
    "lr": 2.0,
    "seed": 3,
    "checkpoint_every": 4,
    "save_round": "best",
    "rounds": 8,
}  # round 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = perfed.run("ditto", out=tmp_path_factory.mktemp("whole") / "run", **BEST, **SMALL)
    assert run.result("ditto")["saved_round"] == 5
    return run


def test_what_is_said_is_of_what_is_saved(whole):
    (summary,) = whole.summary()
    assert (summary["rounds"], summary["saved_round"]) == (8, 5)
    found = measures.summary(whole, "ditto")
    assert found["mean"] == pytest.approx(summary["accuracy"]["mean"])
    card = next((whole.path / "ditto" / "clients").glob("*/card.md")).read_text()
    assert "round 5 of 8, the best on validation samples" in card
    assert "Accuracy: the round whose models are saved" in (whole.path / "report" / "summary.md").read_text()


def test_the_end_can_be_repeated(tmp_path, monkeypatch, whole):
    """Nothing of the best round is let go before the result is written."""
    save = files.Folder.save_tree

    def full(self, path, tree):
        if path.name == "server.safetensors":
            raise OSError("no space left on device")
        return save(self, path, tree)

    monkeypatch.setattr(files.Folder, "save_tree", full)
    with pytest.raises(OSError, match="no space"):
        perfed.run("ditto", out=tmp_path / "run", **BEST, **SMALL)
    monkeypatch.undo()
    again = api.resume(tmp_path / "run", Console(quiet=True))
    assert again.result("ditto") == whole.result("ditto")
    assert not (again.path / "ditto" / "best").exists()


def stopped(folder, monkeypatch, before):
    """A run that is interrupted before this round."""
    step = Federation.begin

    def stops(self, *args):
        if self.round == before - 1:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Federation, "begin", stops)
    with pytest.raises(KeyboardInterrupt):
        perfed.run("ditto", out=folder, **BEST, **SMALL)
    monkeypatch.undo()
    return folder / "ditto" / "best"


def test_rounds_that_come_again_otherwise(tmp_path, monkeypatch):
    """Interrupted after round 5, resumed from 4, and then nothing is as good: what was known in 4 is saved."""
    best = stopped(tmp_path / "run", monkeypatch, 7)
    assert len(list(best.glob("*.safetensors"))) == 2  # 5, and what round 4 knows as the best
    judge = training.MethodRun.judge

    def worse(self, scores):
        bad = lambda: Scores.of(tree_map(torch.zeros_like, scores.tables))
        judge(self, scores if self.federation.round <= 4 else bad())

    monkeypatch.setattr(training.MethodRun, "judge", worse)
    result = api.resume(tmp_path / "run", Console(quiet=True)).result("ditto")
    assert result["saved_round"] == result["best"]["round"] <= 4


def test_a_lost_best_round_is_said(tmp_path, monkeypatch, capsys):
    """As in a run of an older version: the last round's models are saved, and nothing else is claimed."""
    best = stopped(tmp_path / "run", monkeypatch, 7)
    monkeypatch.setattr(BestRound, "write", lambda *_: None)
    shutil.rmtree(best)
    result = api.resume(tmp_path / "run", Console()).result("ditto")
    assert "saved_round" not in result
    assert "those of the last round: 5 is lost" in capsys.readouterr().out.replace("\n", " ")


def test_a_damaged_best_round_does_not_stop_the_next_attempt(tmp_path, monkeypatch):
    best = stopped(tmp_path / "run", monkeypatch, 8)
    monkeypatch.setattr(BestRound, "write", lambda *_: None)

    def begin(self, folder, *_):
        self.files, self.method, self.folder = folder.files, folder, folder.best

    monkeypatch.setattr(BestRound, "__init__", begin)
    for path in best.glob("*.rows"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Problem, match="damaged: its checksum does not fit; `perfed resume` trains on"):
        api.resume(tmp_path / "run", Console(quiet=True))
    assert "saved_round" not in api.resume(tmp_path / "run", Console(quiet=True)).result("ditto")


def test_the_best_of_nothing_is_refused(tmp_path):
    with pytest.raises(Problem, match="has nothing to save with"):
        perfed.run("fedavg", out=tmp_path / "run", **SMALL, save_round="best", save_models="none")


def test_the_best_round_needs_validation_samples(tmp_path):
    with pytest.raises(Problem, match=r"run.save_round = best needs validation samples"):
        perfed.run("fedavg", out=tmp_path / "run", **SMALL, val=0.0, save_round="best")
