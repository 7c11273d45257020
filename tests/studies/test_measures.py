"""Measures of a finished run beside accuracy: what is kept in memory, what it took to a target, training loss."""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import perfed
from perfed.cli import app
from perfed.contract import checks
from perfed.core.model import Model
from perfed.core.tree import leaves
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation
from perfed.federation.traffic import count_bytes
from perfed.methods.fedavg import FedAvg
from perfed.report.comparison import _to_target
from perfed.studies import measures
from perfed.training.catalog import find

NAMES = ("local", "fedavg", "fedamp", "fedfomo", "pgfed", "pfedmb", "scaffold", "ifca", "pfedmt")
N, E, ROUNDS = 4, 2, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measures") / "run"
    how = {"clients": N, "rounds": ROUNDS, "epochs": E, "batch_size": 50, "hidden": 8, "engine": "sequential"}
    return perfed.run(*NAMES, out=folder, teams=2, train_scores=True, **how)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_as_large_as_said(run, name):
    """The server's file after the last round, without the padding of rows of parameters."""
    model = Model(run.network)
    kept = [leaf for leaf in leaves(run.folder.method(name).server()) if isinstance(leaf, torch.Tensor)]
    assert measures.memory(run.config, run.entries[name], run.about)["server_state"] == count_bytes(
        kept, {model.width: model.size}
    )


def test_states_follow_the_formulas(run):
    P = 4 * sum(p.numel() for p in run.network().parameters())  # bytes; the network has no buffers
    found = {name: measures.memory(run.config, run.entries[name], run.about) for name in NAMES}
    kept = lambda key: {name: one[key] for name, one in found.items()}
    assert kept("client_state") | {"pfedmb": 0} == {
        **dict.fromkeys(("local", "fedamp", "pgfed", "scaffold", "pfedmt"), P),
        **dict.fromkeys(("fedavg", "ifca", "pfedmb"), 0),
        "fedfomo": 2 * P,
    }
    assert 0 < found["pfedmb"]["client_state"] < P  # the weights of its branches
    servers = kept("server_state")
    assert (servers["local"], servers["fedavg"], servers["scaffold"]) == (0, P, 2 * P + 4)  # and N
    assert servers["fedamp"] == N * P + 4  # a model for each client, and sigma
    assert servers["pgfed"] == P + 4 * N * N + N * (P + 4 + 8)  # w, A; of the last cohort gradients, constants, ids


def test_what_it_took_to_a_target(run):
    curve = measures.curves(run, "fedavg")
    target = float(curve.mean[1])
    assert curve.mean[0] < target
    found = measures.system(run, "fedavg", curve, target)
    assert (found["rounds_to_target"], found["epochs_to_target"]) == (2, 2 * E)
    lines = [json.loads(line) for line in (run.path / "fedavg" / "rounds.jsonl").read_text().splitlines()]
    assert found["bytes_to_target"] == sum(v for v in lines[1]["bytes"].values() if isinstance(v, int))
    at_once = {name: measures.system(run, name, measures.curves(run, name), 0.0) for name in NAMES}
    passes = {name: round(one["epochs_to_target"], 6) for name, one in at_once.items()}
    assert passes["pgfed"] == E + 1  # the gradient that it sends
    assert passes["pfedmb"] == 2 * E  # alpha, then the branches
    never = measures.system(run, "fedavg", curve, 1.01)
    assert [never[f"{key}_to_target"] for key in ("rounds", "epochs", "bytes")] == [None] * 3


def test_the_command_shows_them(tmp_path, monkeypatch, capsys):
    words = "compare fedavg pgfed --seeds 2 --rounds 3 --clients 4 --epochs 1 --batch-size 50 --hidden 8 --json --quiet"
    words += f" --engine sequential --train-scores --out {tmp_path / 'both'} --target 0.05"
    monkeypatch.setattr("sys.argv", ["perfed", *words.split()])
    with pytest.raises(SystemExit) as end:
        app.main()
    out, shown = capsys.readouterr()
    assert not end.value.code
    for one in json.loads(out.splitlines()[-1])["metrics"]:
        assert one["train_loss"] > 0
        assert one["server_state"] + one["client_state"] > 0
        assert one["rounds_to_target"] >= 1
    headings = ("keeps", "to 0.05", "speed-up", "training")
    assert all(heading in shown for heading in headings)
    monkeypatch.setattr("sys.argv", ["perfed", "resume", str(tmp_path / "both"), "--quiet"])
    with pytest.raises(SystemExit):
        app.main()
    again = capsys.readouterr().out  # what was asked for then
    assert all(heading in again for heading in headings)


def test_a_target_that_is_not_reached_says_so():
    never = {"method": "fedavg", "rounds_to_target": None, "bytes_to_target": None, "epochs_to_target": None}
    one = never | {"reached": 0, "seeds": 2}
    two = {"method": "ditto", "rounds_to_target": 2, "bytes_to_target": 10, "epochs_to_target": None, "reached": 2}
    _, rows = _to_target([one, two, one | {"reached": 1}], 0.7)
    assert rows[0] == ("fedavg", "not reached", "-", "-", "-")
    assert rows[1] == ("ditto", "2", "1.0", "n/a", "10 B")
    assert rows[2] == ("fedavg", "in 1 of 2 seeds", "-", "-", "-")


def test_a_target_that_one_of_two_seeds_reaches(tmp_path):
    how = {"clients": 4, "rounds": 2, "epochs": 1, "hidden": 8, "engine": "sequential", "baseline": False}
    runs = [perfed.run("fedavg", out=tmp_path / str(seed), seed=seed, **how) for seed in (0, 1)]
    best = sorted(float(measures.curves(run, "fedavg").mean.max()) for run in runs)
    assert best[0] < best[1]
    (found,) = measures.of_runs(runs, best[1])
    assert (found["reached"], found["seeds"], found["rounds_to_target"]) == (1, 2, None)


@pytest.mark.parametrize("method", [FedAvg, find("ditto").load()])
def test_training_loss_is_the_mean_over_the_training_samples(method, clients, model):
    """Of one model for all, and of each client's own; on every engine."""
    make = lambda: method(model, lr=0.05, epochs=1, batch_size=4)
    federation, saved = Federation(Sequential(Job(make(), clients), train_scores=True)), {}
    federation.step([0, 2])
    found = federation.evaluate(saved.__setitem__)
    train = clients.train
    for id, (first, size) in enumerate(zip(train.start, train.size, strict=True)):
        rows = slice(first, first + size)
        out = model.apply(saved[id]["personal"], train.x[rows])[0]
        expected = cross_entropy(out, train.y[rows])
        assert found["personal"]["train"]["loss"][id] == pytest.approx(expected.item(), abs=1e-9)
    for kind in (Vectorised, Workers):
        other = Federation(kind(Job(make(), clients), train_scores=True))
        try:
            other.step([0, 2])
            assert checks.difference(other.evaluate().tables, found.tables) < 1e-9
        finally:
            other.engine.close()
    assert "train" not in Federation(Sequential(Job(make(), clients))).evaluate()["personal"]


def test_training_loss_is_in_the_log(run):
    curve = measures.curves(run, "fedavg")
    assert curve.train_loss.shape == (ROUNDS, N)
    assert not np.isnan(curve.train_loss).any()
    assert measures.summary(run, "fedavg")["train_loss"] == pytest.approx(curve.train_loss[-1].mean())
    assert torch.tensor(run.scores("fedavg", "loss", split="train")).mean() == pytest.approx(
        curve.train_loss[-1].mean()
    )
