"""Clients that come after training: they get a model, or the reason why not; nothing is read the wrong way round."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import perfed
from perfed.cli import main
from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.training.catalog import methods
from perfed.training.newcomers import personalise

CANNOT = ("apple", "fedfomo")  # they mix the models of the clients they know


SUITED = [name for name in methods() if name not in ("fedbn", "fedalign")]  # which need other networks than this one


def table(path, clients, columns=("a", "b"), labels=("ant", "bee", "cat"), seed=0):
    """One CSV for all clients: ants are near (0, 0), bees near (3, 0), cats near (0, 3)."""
    draw = np.random.default_rng(seed)
    with Path(path).open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["client", *columns, "label"])
        for client in clients:
            for at in range(30):
                label = labels[at % len(labels)]
                value = {"a": 3.0 * (label == "bee"), "b": 3.0 * (label == "cat")}
                value = {column: place + 0.3 * draw.normal() for column, place in value.items()}
                write.writerow([client, *(value[c] for c in columns), label])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp("newcomers")
    table(home / "old.csv", ["x", "y", "z"])
    names = SUITED
    settings = {"data": "folder", "data_dir": str(home / "old.csv"), "rounds": 6, "engine": "sequential", "lr": 0.05}
    return perfed.run(*names, out=home / "run", **settings)


def welcome(run, path, method, **more):
    return personalise(run, method, DataConfig(name="folder", dir=str(path)), 3, 5, None, **more)


@pytest.mark.parametrize("name", SUITED)
def test_every_method_gives_a_model_or_a_reason(run, name, tmp_path):
    table(tmp_path / "new.csv", ["late"], seed=1)
    if name in CANNOT:
        with pytest.raises(Problem, match="nothing to send to a new one"):
            welcome(run, tmp_path / "new.csv", name)
        return
    found = welcome(run, tmp_path / "new.csv", name)
    (one,) = found["clients"]
    assert one["client"] == "late"
    assert one["personal"]["test"]["accuracy"] >= 0.6
    assert Path(one["path"]).is_file()


def test_labels_and_columns_mean_what_they_meant(run, tmp_path):
    table(tmp_path / "new.csv", ["late"], columns=("b", "a"), labels=("bee", "cat"), seed=1)
    (one,) = welcome(run, tmp_path / "new.csv", "fedavg")["clients"]
    assert one["personal"]["test"]["accuracy"] == 1.0
    table(tmp_path / "other.csv", ["late"], labels=("ant", "cat"))
    (tmp_path / "other.csv").write_text((tmp_path / "other.csv").read_text().replace("ant", "eel"))
    with pytest.raises(Problem, match="label 'eel' is not among ant, bee, cat"):
        welcome(run, tmp_path / "other.csv", "fedavg")
    np.savez(tmp_path / "z.npz", x=np.zeros((9, 2), "float32"), y=np.arange(9) % 3)
    (tmp_path / "files").mkdir()
    (tmp_path / "z.npz").rename(tmp_path / "files" / "z.npz")
    with pytest.raises(Problem, match="another kind"):
        welcome(run, tmp_path / "files", "fedavg")


def test_the_command(run, tmp_path, monkeypatch, capsys):
    table(tmp_path / "new.csv", ["late", "../later"], seed=2)
    words = ["perfed", "personalise", str(run.path), "--data-dir", str(tmp_path / "new.csv"), "--method", "ditto"]
    monkeypatch.setattr(sys, "argv", [*words, "--fine-tune", "1", "--out", str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {one["client"] for one in found["clients"]} == {"late", "../later"}
    assert all(Path(one["path"]).is_relative_to(tmp_path / "out") for one in found["clients"])
    monkeypatch.setattr(sys, "argv", [*words, "--set", "lr=3"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "--set takes data.key=value here" in capsys.readouterr().err


def test_training_is_not_touched(run, tmp_path):
    """The run's own models and server stay as they were."""
    before = {p: p.read_bytes() for p in run.path.rglob("*.safetensors") if "newcomers" not in p.parts}
    table(tmp_path / "new.csv", ["late"])
    welcome(run, tmp_path / "new.csv", "pgfed")
    assert all(p.read_bytes() == content for p, content in before.items())
    assert torch.get_num_threads() >= 1
