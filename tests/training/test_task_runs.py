"""Runs of tasks beyond classification, from the command line or a file of one's own to a prediction."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from real_data import real
from rich.console import Console

import perfed
from perfed import api
from perfed.cli import main
from perfed.core.errors import Problem
from perfed.studies.compare import Comparison
from perfed.training.config import from_dict, place_flags
from perfed.training.settings import outdated

QUICK = {"rounds": 2, "epochs": 1, "hidden": 8}


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0


def flats(path, city, level, rows=60, seed=0):
    """A city's flats: their size follows from the rooms, their price from size and floor."""
    draw = np.random.default_rng(seed)
    rooms, floor = draw.integers(1, 6, rows), draw.integers(0, 9, rows)
    size = 20.0 * rooms
    price = 1000 * level * size + 5000 * floor
    lines = [f"{city},{a},{b},{c:g},{d:g}" for a, b, c, d in zip(rooms, floor, size, price, strict=True)]
    path.write_text("\n".join(["city,rooms,floor,size,price", *lines]) + "\n")
    return np.stack([rooms, floor], 1), np.stack([price, size], 1)


class Frame(dict):
    """What a DataFrame of pandas looks like from here."""

    @property
    def columns(self):
        return list(self)


COLUMNS = {"client_column": "city", "label_column": "price,size"}


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    """A run that predicts two numbers of very different size, whose relation to the features is linear."""
    home = tmp_path_factory.mktemp("town")
    texts = []
    for seed, (city, level) in enumerate((("oslo", 9), ("lima", 3), ("pune", 2))):
        flats(home / "one.csv", city, level, seed=seed)
        texts.append((home / "one.csv").read_text().splitlines())
    (home / "flats.csv").write_text("\n".join([texts[0][0], *(line for text in texts for line in text[1:])]) + "\n")
    settings = {"data": "folder", "data_dir": str(home / "flats.csv"), "model": "linear", "lr": 0.1, **COLUMNS}
    return perfed.run("fedavg", out=home / "run", rounds=20, epochs=5, engine="sequential", **settings)


def test_diabetes_from_the_command_line(monkeypatch, capsys, tmp_path):
    out = tmp_path / "run"
    words = ("run", "fedavg", "ditto", "--data", "diabetes", "--clients", 3, "--rounds", 2, "--hidden", 8, "--out", out)
    command(monkeypatch, *words, "--partition", "classes", "--bins", 6)
    told = capsys.readouterr()
    assert "bins per client 2-2" in told.out + told.err
    about = json.loads((out / "clients.json").read_text())
    assert about["task"]["kind"] == "regression"
    assert about["partition"]["strata"]["rule"] == "6 bins of 'progression'"
    assert sum(about["clients"][0]["labels"].values()) == sum(about["clients"][0][s] for s in ("train", "val", "test"))
    assert 'task = "regression"' in (out / "config.toml").read_text()
    run = perfed.load(out)
    assert run.config.data.task == "regression"
    card = (run.client("client_00", "ditto").path.parent / "card.md").read_text()
    (target,) = about["preparation"]["targets"]
    assert f"order: progression = {target['std']:.6g} * output + {target['mean']:.6g}" in card
    assert "this client's samples by 6 bins of 'progression'" in card
    assert "numbers to predict standardised over all clients ('progression')" in (out / "report/summary.md").read_text()


def test_numbers_are_predicted_in_units_of_the_label(town):
    x, y = flats(Path(town.path) / "more.csv", "lima", 3, seed=7)
    local = town.client("lima", "local")
    close = np.abs(local.predict(x) - y).mean(0) / y.std(0)
    assert (close < 0.05).all()  # a line through the client's own samples
    frame = Frame({"floor": x[:, 1], "price": y[:, 0], "rooms": x[:, 0]})
    with pytest.warns(UserWarning, match="not used, because it is no feature: 'price'"):
        assert np.array_equal(local.predict(frame), local.predict(x))


def test_traffic_holds_what_targets_took(town):
    columns, targets, clients = 2, 2, 3
    sent = (1 + 3 * columns + 1 + 3 * targets) * 8 * clients
    assert town.about["preparation"]["traffic"]["up_mean"] == sent
    assert town.result("local")["bytes"]["up_mean"] == sent


def test_newcomers_share_the_targets_scale(town, tmp_path):
    flats(tmp_path / "bonn.csv", "bonn", 30, seed=3)
    made = perfed.personalise(town, tmp_path / "bonn.csv", rounds=3, out=tmp_path / "new")
    assert made.about["task"] == town.about["task"]
    assert made.config.data.label_column == "price,size"
    assert made.client("bonn", "local").score < made.client("bonn", "fedavg").score  # errors, in units of the labels
    (tmp_path / "swap.csv").write_text((tmp_path / "bonn.csv").read_text())
    with pytest.raises(Problem, match="the new clients have the labels size, price, and the run's models predict pri"):
        perfed.personalise(town, tmp_path / "swap.csv", out=tmp_path / "x", label_column="size,price")
    with pytest.raises(Problem, match="'binary' has one label for each sample"):
        perfed.personalise(town, tmp_path / "swap.csv", out=tmp_path / "x", task="binary")


def test_newcomers_with_few_numbers_are_read_as_the_run_was(town, tmp_path):
    """Whole numbers that would be classes in a file of their own."""
    text = (town.path.parent / "flats.csv").read_text().splitlines()
    (tmp_path / "old.csv").write_text("\n".join(line.rpartition(",")[0] for line in text) + "\n")
    columns = {"client_column": "city", "label_column": "size", "task": "regression"}
    settings = {"data": "folder", "data_dir": str(tmp_path / "old.csv"), "engine": "sequential"}
    run = perfed.run("fedavg", out=tmp_path / "run", **QUICK, **settings, **columns)
    few = [line.rpartition(",")[0] for line in (town.path.parent / "one.csv").read_text().splitlines()[:9]]
    (tmp_path / "few.csv").write_text("\n".join(few) + "\n")
    made = perfed.personalise(run, tmp_path / "few.csv", out=tmp_path / "new")
    assert made.about["task"]["kind"] == "regression"
    assert made.about["preparation"]["targets"] == run.about["preparation"]["targets"]


def test_a_model_file_says_what_its_outputs_are(town):
    from safetensors import safe_open

    with safe_open(town.client("lima").path, "pt") as file:
        assert json.loads(file.metadata()["task"]) == town.about["task"]


def test_runs_from_before_there_were_tasks_have_classes(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=draw.normal(size=(240, 2)).astype("float32"), y=np.arange(240) % 120)
    settings = {"data": "folder", "data_dir": str(tmp_path), "task": "classification", "val": 0, "baseline": False}
    perfed.run("fedavg", out=tmp_path / "run", engine="sequential", **QUICK, **settings)
    file = tmp_path / "run" / "config.toml"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith("task =")))
    assert perfed.load(tmp_path / "run").config.data.task == "classification"


def test_several_labels(tmp_path):
    settings = {"data": "synthetic-multilabel", "clients": 3, "synthetic_samples": 40}
    run = perfed.run("fedavg", out=tmp_path / "run", engine="vectorised", **QUICK, **settings)
    x = np.zeros((2, 20), np.float32)
    assert run.clients()[0].predict(x).shape == (2, 5)
    assert set(run.about["clients"][0]["labels"]) <= {"0", "1", "2", "3", "4", "none"}


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """The resolved configuration names the task, and its data are made again."""
    words = ("run", "fedavg", "--data", "diabetes", "--clients", 3, "--rounds", 2, "--hidden", 8)
    command(monkeypatch, *words, "--out", tmp_path / "run")
    whole = (tmp_path / "run/fedavg/metrics.jsonl").read_bytes()
    for file in ("fedavg/result.json", "fedavg/metrics.jsonl", "fedavg/rounds.jsonl", "fedavg/times.jsonl"):
        (tmp_path / "run" / file).unlink()
    command(monkeypatch, "resume", tmp_path / "run")
    assert (tmp_path / "run/fedavg/metrics.jsonl").read_bytes() == whole


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """A run that predicts tokens from files of one's own."""
    home = tmp_path_factory.mktemp("talk")
    (home / "data").mkdir()
    for seed, name in enumerate("ab"):
        tokens = np.random.default_rng(seed).integers(0, 7, size=(30, 6))
        np.savez(home / "data" / f"{name}.npz", x=tokens[:, :-1], y=tokens[:, 1:])
    settings = {"data": "folder", "data_dir": str(home / "data"), "engine": "sequential", "baseline": False}
    return perfed.run("fedavg", out=home / "run", **QUICK, **settings)


@pytest.mark.parametrize("normalise", ["none", "federated"])
def test_a_run_of_own_tokens_can_be_resumed(talk, tmp_path, normalise):
    """Early folders say `federated`, which tokens are not."""
    assert talk.config.data.normalise == "none"
    folder = shutil.copytree(talk.path, tmp_path / "run")
    for file in ("fedavg/result.json", "fedavg/metrics.jsonl", "fedavg/rounds.jsonl", "fedavg/times.jsonl"):
        (folder / file).unlink()
    shutil.rmtree(folder / "fedavg" / "checkpoints", ignore_errors=True)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('normalise = "none"', f'normalise = "{normalise}"'))
    assert f'normalise = "{normalise}"' in (folder / "config.toml").read_text()
    api.resume(folder, Console(quiet=True))
    assert (folder / "fedavg/result.json").exists()


@pytest.mark.parametrize("wrong", [7, -1, 3.7, np.nan])
def test_an_input_that_is_no_token_is_refused(talk, wrong):
    client, x = talk.clients()[0], np.zeros((3, 5))
    assert client.predict(x).shape == (3, 5)
    x[1, 2] = wrong
    with pytest.raises(Problem, match=rf"holds {wrong}.* \(sample 1, place 2\), .* numbers from 0 to 6"):
        client.predict(x)


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [
        ("school", "school.npz", {"clients": 3}),
        ("landmine", "landmine_small.npz", {"clients": 3}),
        ("shakespeare", "shakespeare_roles.npz", {"clients": 2, "sequence": 10}),
    ],
)
def test_data_sets_with_files(tmp_path, name, file, settings):
    settings |= {"data": name, "data_dir": real(file), "engine": "sequential", "baseline": False}
    run = perfed.run("ditto", out=tmp_path / "run", **QUICK, **settings)
    assert run.config.model.name == ("gru" if name == "shakespeare" else "mlp")
    client = run.clients("ditto")[0]
    assert client.score is not None
    if name == "shakespeare":
        assert client.predict(np.zeros((3, 10), np.int64)).shape == (3, 10)


def test_seeds_with_scales_of_their_own_are_compared(tmp_path):
    """Each seed splits anew, so its labels are standardised in their own way: such runs are no batch."""
    how = {"data": "diabetes", "clients": 3, "rounds": 1, "epochs": 1, "model": "linear"}
    how |= {"engine": "vectorised", "fast": False, "baseline": False}
    comparison = Comparison.create(from_dict(place_flags(how, ["fedavg"])), 2, tmp_path / "both")
    (both,) = api.compare(comparison, api.Console(quiet=True))["methods"]
    seeds = [perfed.run("fedavg", out=tmp_path / f"{seed}", seed=seed, **how) for seed in (0, 1)]
    alone = [run.scores("fedavg", "absolute_error").mean() for run in seeds]
    assert both["absolute_error"]["mean"]["mean"] == pytest.approx(np.mean(alone), rel=1e-6)


def test_a_stopped_run_of_tokens_goes_on(tmp_path):
    """Tokens stay as they are, and the configuration says so; folders that said something else are read."""
    draw = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        text = draw.integers(0, 5, (20, 4))
        np.savez(tmp_path / "data" / f"{name}.npz", x=text[:, :-1], y=text[:, 1:])
    settings = {"data": "folder", "data_dir": str(tmp_path / "data"), "model": "gru", "baseline": False}
    run = perfed.run("fedavg", out=tmp_path / "run", engine="sequential", **QUICK, **settings)
    assert run.config.data.normalise == "none"
    whole = (run.path / "fedavg/metrics.jsonl").read_bytes()
    file = run.path / "config.toml"
    file.write_text(file.read_text().replace('normalise = "none"', 'normalise = "federated"'))
    settings_then = run.result("fedavg")["settings"] | {"data.normalise": "federated"}
    config, about = perfed.load(run.path).config, run.folder.raw_clients()
    assert not outdated({"settings": settings_then}, config, run.entries["fedavg"], about)
    for name in ("result.json", "metrics.jsonl", "rounds.jsonl", "times.jsonl"):
        (run.path / "fedavg" / name).unlink()
    api.resume(run.path, api.Console(quiet=True))
    assert (run.path / "fedavg/metrics.jsonl").read_bytes() == whole
