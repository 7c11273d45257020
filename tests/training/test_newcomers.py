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
from perfed.contract.toy import toy_settings
from perfed.core.errors import Problem
from perfed.training.catalog import methods

CANNOT = ("apple", "fedfomo", "fedgkt")  # the server has something for each client that it knows


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


def trained(home, *names, **more):
    table(home / "old.csv", ["x", "y", "z"])
    settings = {"data": "folder", "data_dir": str(home / "old.csv"), "rounds": 6, "engine": "sequential", "lr": 0.05}
    return perfed.run(*names, out=home / "run", **settings, **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("newcomers"), "fedavg", "ditto", "pgfed")


def welcome(run, path, method, **more):
    out = Path(path).with_suffix("") / "newcomers" / method
    made = perfed.personalise(run, path, method, rounds=3, fine_tune=5, out=out, **more)
    return [{"client": client.name, "path": client.path, **client.scores} for client in made.clients(method)]


@pytest.mark.parametrize("name", SUITED)
def test_every_method_gives_a_model_or_a_reason(name, tmp_path):
    table(tmp_path / "new.csv", ["late"], seed=1)
    run = trained(tmp_path, name, baseline=False, **toy_settings(methods()[name].load()))
    if name in CANNOT:
        with pytest.raises(Problem, match="nothing to send to a new one"):
            welcome(run, tmp_path / "new.csv", name)
        return
    (one,) = welcome(run, tmp_path / "new.csv", name)
    assert one["client"] == "late"
    assert one["personal"]["test"]["accuracy"] >= 0.6
    assert Path(one["path"]).is_file()


def test_labels_and_columns_mean_what_they_meant(run, tmp_path):
    table(tmp_path / "new.csv", ["late"], columns=("b", "a"), labels=("bee", "cat"), seed=1)
    (one,) = welcome(run, tmp_path / "new.csv", "fedavg")
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


def invoke(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def alone(path, **more):
    """A table of one hospital, which has no column of clients."""
    table(path, ["late"], **more)
    text = path.read_text().splitlines()
    path.write_text("".join(line.partition(",")[2] + "\n" for line in text))
    return path


def test_one_file_makes_a_run_folder_like_any_other(run, tmp_path, monkeypatch, capsys):
    """From the command, without a column of clients: card, report, models, predict; there is no resuming it."""
    file, out = alone(tmp_path / "mercy.csv", seed=4), tmp_path / "out"
    assert invoke(monkeypatch, "personalise", run.path, file, "--method", "ditto", "--out", out, "--quiet") == 0
    shown = capsys.readouterr().out
    assert "general" in shown
    assert "Local" in shown
    made = perfed.load(out)
    assert list(made.entries) == ["local", "ditto"]
    (client,) = made.clients()
    assert client.name == "mercy"
    assert list(client.scores) == ["general", "personal"]
    assert (made.result("local")["rounds"], made.result("ditto")["rounds"]) == (6, 7)
    assert made.about["newcomers"] == {"run": str(run.path), "method": "ditto"}
    card = (client.path.parent / "card.md").read_text()
    assert all(row in card for row in ("| Local |", "| Ditto |", "| Ditto, general |"))
    assert "general" in (out / "report" / "summary.md").read_text()
    general = client.path.parent / "general.safetensors"
    assert general.is_file()
    samples = tmp_path / "samples.csv"
    samples.write_text("a,b\n3,0\n0,0\n")
    assert invoke(monkeypatch, "predict", out, "--client", "mercy", "--input", samples) == 0
    assert capsys.readouterr().out.split() == ["bee", "ant"]
    assert invoke(monkeypatch, "models", out) == 0
    assert "mercy" in capsys.readouterr().out
    assert invoke(monkeypatch, "resume", out) == 2
    assert "nothing to resume" in capsys.readouterr().err
    again = perfed.personalise(out, file, out=tmp_path / "again")  # newcomers to newcomers: the server is the same
    assert again.client("mercy").scores["general"] == client.scores["general"]


class Frame:
    """What a DataFrame is to perfed."""

    columns = ("a", "b", "label")

    def __init__(self, path):
        self.text = path.read_text()

    def to_csv(self, path, index):
        assert not index
        Path(path).write_text(self.text)


def test_a_frame_and_a_folder_give_what_a_file_gives(run, tmp_path):
    file = alone(tmp_path / "mercy.csv", seed=4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mercy.csv").write_text(file.read_text())
    places = {"file": file, "folder": tmp_path / "folder", "frame": Frame(file)}
    made = {
        key: perfed.personalise(run, data, "ditto", out=tmp_path / "out" / key, name="mercy")
        for key, data in places.items()
    }
    scores = [each.client("mercy").scores for each in made.values()]
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(Problem, match="did you mean 'label_column'"):
        perfed.personalise(run, file, lable_column="y")
    with pytest.raises(Problem, match="no name of a file"):
        perfed.personalise(run, Frame(file), name="a/b")


def test_what_fails_leaves_no_folder(run, tmp_path):
    file = tmp_path / "mercy.csv"
    file.write_text("a,b,label\n" + "1e37,-1e37,ant\n-1e37,1e37,bee\n" * 9)
    with pytest.raises(Problem, match="the newcomer 'mercy' could not train"):
        perfed.personalise(run, file, "ditto", rounds=3, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_is_not_touched(run, tmp_path):
    """The run's own models and server stay as they were."""
    before = {p: p.read_bytes() for p in run.path.rglob("*.safetensors") if "newcomers" not in p.parts}
    table(tmp_path / "new.csv", ["late"])
    welcome(run, tmp_path / "new.csv", "pgfed")
    assert all(p.read_bytes() == content for p, content in before.items())
    assert torch.get_num_threads() >= 1
