"""Runs on tables in natural units: what columns become is part of the saved models, and goes with them."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open

import perfed
from perfed import api
from perfed.cli import main
from perfed.core.errors import Problem
from perfed.data import load
from perfed.data.preparation import Preparation
from perfed.training.config import from_dict, place_flags

COLUMNS = ["age", "sex", "crp"]
SETTINGS = {"data": "folder", "rounds": 2, "epochs": 1, "lr": 0.1, "batch_size": 10, "model": "mlr", "baseline": False}


def rows(seed, n=60, known=COLUMNS):
    """Who is old, and has much crp, is ill."""
    draw = np.random.default_rng(seed)
    for _ in range(n):
        age, crp = draw.normal(60, 12), draw.normal(200, 50)
        row = {"age": f"{age:.1f}", "sex": draw.choice(["F", "M"]), "crp": f"{crp:.1f}"}
        ill = (age - 60) / 12 + (crp - 200) / 50 > 0
        yield {**{name: row[name] for name in known}, "label": "ill" if ill else "well"}


def write(path, lines):
    lines = list(lines)
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(lines[0]))
        out.writeheader()
        out.writerows(lines)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("tables")
    (home / "data").mkdir()
    for seed, name in enumerate(["graz", "lima"]):
        write(home / "data" / f"{name}.csv", rows(seed))
    write(home / "data" / "pune.csv", rows(2, known=["sex", "age"]))
    return home


@pytest.fixture(scope="module")
def run(home):
    return perfed.run("fedavg", data_dir=str(home / "data"), engine="sequential", out=home / "run", **SETTINGS)


def call(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    written = capsys.readouterr()
    return end.value.code, written.out, written.err


class Frame:
    """What a DataFrame of pandas looks like from here."""

    def __init__(self, lines):
        self._lines, self.columns = lines, list(lines[0])

    def __getitem__(self, name):
        return np.array([line[name] for line in self._lines], dtype=object)


def test_a_table_in_natural_units_is_learned(run):
    assert run.config.data.normalise == "federated"
    assert run.summary()[0]["accuracy"]["mean"] > 0.75  # the majority class has about half


def test_traffic_and_papers_say_what_left_the_clients(run):
    agreed = run.about["preparation"]["traffic"]
    # Of three clients: rows, three sums of two columns, a count of texts; F, M. Back: means, deviations, flag, F, M.
    assert agreed == {"up_mean": 3 * 8 * 8, "up_own": 3 * 2, "down_shared": 3 * (32 + 1 + 2)}
    line = run.folder.method("fedavg").rounds()[0]["bytes"]
    assert line["up_mean"] == agreed["up_mean"] + 3 * 4 * run.result("fedavg")["parameters"]
    assert line["up_own"] == agreed["up_own"]
    assert "counts, sums and sums of squares of numeric columns" in (run.folder.report / "summary.md").read_text()
    card = (run.client("pune").path.parent / "card.md").read_text()
    assert "2 numeric columns standardised over all clients; text becomes one-hot (sex)" in card


def test_the_model_file_holds_what_becomes_of_a_row(run):
    for name in ("graz", "pune"):
        with safe_open(run.client(name).path, framework="pt") as file:
            kept = Preparation.of(json.loads(file.metadata()["preparation"]))
        assert kept == run.client(name).preparation
    assert kept.absent == ("crp",)


def test_models_take_raw_rows(run):
    client, lines = run.client("graz"), list(rows(7, n=9))
    known = [{key: value for key, value in line.items() if key != "label"} for line in lines]
    expected = client.logits(Frame(known))
    assert torch.allclose(client.model()(Frame(known)), expected)
    numbers = [[float(line["age"]), float(line["sex"] == "M"), float(line["crp"])] for line in known]
    assert torch.allclose(client.model()(torch.tensor(numbers)), expected, atol=1e-5)  # of a text its place: F, M
    turned = [dict(reversed(line.items())) for line in known]
    assert client.predict(Frame(turned)).tolist() == client.predict(Frame(known)).tolist()
    with pytest.warns(UserWarning, match=r"not used, because it is no feature: 'label'"):
        client.predict(Frame(lines))
    with pytest.raises(Problem, match=r"the input needs names of columns, because 'sex' holds text"):
        client.predict(np.zeros((2, 3)))


@pytest.mark.slow
def test_an_exported_model_takes_raw_rows(run):
    model, rows = run.client("graz").model(), torch.tensor([[60.0, 0, 200], [80.0, 1, float("nan")]])
    assert torch.allclose(torch.export.export(model, (rows,)).module()(rows), model(rows))


def test_predict_finds_columns_by_name(run, tmp_path, monkeypatch, capsys):
    lines = list(rows(8, n=12))
    write(tmp_path / "a.csv", [{key: line[key] for key in COLUMNS} for line in lines])
    write(tmp_path / "b.csv", [{"ward": "w", **dict(reversed(line.items()))} for line in lines])
    write(tmp_path / "c.csv", [{"age": line["age"], "sex": line["sex"]} for line in lines])
    predict = ("predict", run.path, "--method", "fedavg", "--input")
    code, plain, err = call(monkeypatch, capsys, *predict, tmp_path / "a.csv", "--client", "graz")
    assert (code, err) == (0, "")
    assert set(plain.split()) <= {"ill", "well"}
    code, turned, err = call(monkeypatch, capsys, *predict, tmp_path / "b.csv", "--client", "graz")
    assert (code, turned) == (0, plain)
    assert "the model does not know it: 'ward'" in err
    assert "it is no feature: 'label'" in err
    code, _, err = call(monkeypatch, capsys, *predict, tmp_path / "c.csv", "--client", "graz")
    assert code == 2
    assert "the input lacks what the model needs: 'crp'" in err
    code, _, _ = call(monkeypatch, capsys, *predict, tmp_path / "c.csv", "--client", "pune")  # it never had crp
    assert code == 0


def test_newcomers_share_the_runs_statistics(run, home, tmp_path):
    write(tmp_path / "oslo.csv", [{"client": "oslo", **line} for line in rows(9)])
    welcome = lambda: perfed.personalise(run, tmp_path, "fedavg", out=tmp_path / "new")
    made = welcome()
    (client,) = made.clients()
    assert client.accuracy > 0.7
    frame = Frame([{"age": 80.0, "sex": "F", "crp": 200.0}])
    assert torch.allclose(client.model()(frame), client.logits(frame))
    with safe_open(client.path, framework="pt") as file:
        kept = Preparation.of(json.loads(file.metadata()["preparation"]))
    assert kept == run.client("graz").preparation
    lacking = [{"client": "oslo", **line} for line in rows(9, known=["crp", "sex"])]  # every site had ages
    write(tmp_path / "oslo.csv", lacking)
    with pytest.raises(Problem, match=r"the new clients' data lacks what the model needs: 'age'"):
        welcome()


def test_means_of_ones_own_come_back(home):
    run = perfed.run("fedavg", data_dir=str(home / "data"), normalise="local", out=home / "local", **SETTINGS)
    graz, lima = (run.client(name).preparation for name in ("graz", "lima"))
    assert graz.columns[0].mean != lima.columns[0].mean
    assert graz.columns[1] == lima.columns[1]
    assert run.result("fedavg")["bytes"]["up_own"] == run.about["preparation"]["traffic"]["up_own"]
    frame = Frame([{"age": 80.0, "sex": "F", "crp": 200.0}])
    assert torch.allclose(run.client("lima").model()(frame), run.client("lima").logits(frame))


@pytest.mark.parametrize("engine", [pytest.param("vectorised", marks=pytest.mark.slow), "workers"])
def test_every_engine_gets_the_same_samples(run, home, engine, tmp_path):
    other = perfed.run("fedavg", data_dir=str(home / "data"), engine=engine, out=tmp_path / "run", **SETTINGS)
    assert other.about == run.about
    assert other.result("fedavg")["bytes"] == run.result("fedavg")["bytes"]


def test_a_run_goes_on_with_what_it_began_with(run, home, tmp_path):
    again = perfed.run("fedavg", data_dir=str(home / "data"), engine="sequential", out=tmp_path / "run", **SETTINGS)
    (again.folder.method("fedavg").result_file).unlink()
    resumed = api.resume(tmp_path / "run", Console(quiet=True))
    assert resumed.result("fedavg") == run.result("fedavg")


def test_tables_of_version_0_1_stay_as_they_were(run, home, tmp_path):
    """Then nothing was normalised, and the word for that was `channel`."""
    old = perfed.run("fedavg", data_dir=str(home / "data"), normalise="none", out=tmp_path / "run", **SETTINGS)
    config, about = old.folder.config_file, old.folder.clients_file
    config.write_text(config.read_text().replace('normalise = "none"', 'normalise = "channel"'))
    plain = json.loads(about.read_text())
    assert plain.pop("preparation")["normalise"] == "none"
    about.write_text(json.dumps(plain))
    assert perfed.load(tmp_path / "run").config.data.normalise == "none"


@pytest.mark.slow
def test_seeds_whose_tables_differ_train_one_after_another(tmp_path):
    """A rare text may lie in one seed's training rows and not in another's: their samples have other shapes."""
    (tmp_path / "data").mkdir()
    for name in ("graz", "lima"):
        lines = [{**row, "sex": "X"} if at == 3 and name == "lima" else row for at, row in enumerate(rows(1))]
        write(tmp_path / "data" / f"{name}.csv", lines)
    settings = {**SETTINGS, "data_dir": str(tmp_path / "data"), "engine": "vectorised", "rounds": 1}
    configs = [from_dict(place_flags({**settings, "seed": seed}, ["fedavg"])) for seed in range(20)]
    by_shape = {load(config.data, config.run.seed).shape: config for config in configs}
    assert len(by_shape) == 2
    done = api.carry_out(list(by_shape.values()), [tmp_path / "one", tmp_path / "other"], Console(quiet=True))
    assert [run.result("fedavg")["rounds"] for run in done] == [1, 1]
