"""Runs from Python and from the command, with perfed's data and with the user's own: what they return and leave."""

import contextlib
import csv
import dataclasses
import hashlib
import io
import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import perfed
from perfed.report.tables import clients_csv
from perfed.training.config import from_dict, place_flags, read_toml
from perfed.training.prepare import prepare

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about names that click will rename
    from perfed.cli import app

TINY = dict(rounds=2, clients=4, epochs=1, batch_size=50, hidden=8, engine="sequential")
WORDS = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    """Drawing takes longer than these runs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfed.report.folder.picture", lambda run: b"")
        yield


def call(*words):
    """(exit code, standard output, standard error) of `perfed WORDS`."""
    before, sys.argv = sys.argv, ["perfed", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            app.main()
    finally:
        sys.argv = before
    return end.value.code, out.getvalue(), err.getvalue()


def last(out):
    return json.loads(out.splitlines()[-1])


def fingerprint(run):
    """Every model and every score of a run, as bytes."""
    kept = ("model.safetensors", "metrics.jsonl", "rounds.jsonl", "result.json")
    paths = sorted(path for path in run.path.rglob("*") if path.name in kept)
    return {str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished run of Local, FedAvg and Ditto."""
    return perfed.run("fedavg", "ditto", lr=0.2, out=tmp_path_factory.mktemp("small") / "run", **TINY)


def test_traffic_between_servers_is_shown(tmp_path):
    """Two teams, two rounds: a model each way in each of them; a method without such traffic has no line."""
    words = [*WORDS, "--no-baseline"]
    code, out, _ = call("run", "fedavg", "pfedmt", *words, "--out", tmp_path / "run")
    assert code == 0
    run = perfed.load(tmp_path / "run")
    bytes_of = {one["method"]: one["bytes"] for one in run.summary()}
    sent = 2 * 2 * 4 * sum(p.numel() for p in run.network().parameters())
    assert bytes_of["pfedmt"]["extra"] == {"cloud_down": sent, "cloud_up": sent}
    line = f"pFedMT between servers, in neither down nor up: cloud down {sent / 1000:.1f} kB, cloud up"
    for text in (out, (run.path / "report" / "summary.md").read_text()):
        assert text.count("between servers") == text.count(line) == 1
    code, out, _ = call("compare", "pfedmt", *words, "--out", tmp_path / "one", "--seeds", 1)
    assert code == 0
    for text in (out, (tmp_path / "one" / "compare.md").read_text()):
        assert text.count(line) == 1
    (method,) = json.loads((tmp_path / "one" / "result.json").read_text())["methods"]
    assert method["bytes"]["extra"] == bytes_of["pfedmt"]["extra"]


# ---------------------------------------------------------------------- from Python


def test_run_returns_a_run(small):
    assert isinstance(small, perfed.Run)
    assert list(small.entries) == ["local", "fedavg", "ditto"]
    assert small.main == "ditto"
    assert repr(small).startswith("Run(")


def test_run_can_be_called_again(tmp_path):
    """Whatever else was imported in between: the package's function and its module have one name."""
    assert callable(perfed.run)
    again = perfed.run("local", out=tmp_path / "again", **TINY)
    assert isinstance(again, perfed.Run)


def test_run_refuses_what_the_command_refuses(tmp_path):
    for settings in ({"rouns": 3}, {"rounds": 0}, {"rounds": True}, {"mu": 0.1}, {"data": "digit"}):
        with pytest.raises(perfed.Problem):
            perfed.run("fedavg", out=tmp_path / "run", **settings)
    with pytest.raises(perfed.Problem, match="fedavg"):
        perfed.run("fedavgg", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_models_reproduce_the_reported_accuracy(small):
    run = perfed.load(small.path)
    test = prepare(run.folder.config()).clients.test
    for method in run.entries:
        result = json.loads((run.path / method / "result.json").read_text())
        for id, reported in enumerate(result["clients"]):
            client = run.client(f"client_{id:02d}", method)
            model = client.model()
            assert isinstance(model, nn.Module)
            assert not model.training
            rows = slice(test.start[id], test.start[id] + test.size[id])
            x, y = test.x[rows], test.y[rows]
            with torch.no_grad():
                predicted = model(x).argmax(1)
            assert np.array_equal(client.predict(x.numpy()), predicted.numpy())
            accuracy = (predicted == y).double().mean().item()
            assert accuracy == pytest.approx(reported["personal"]["test"]["accuracy"], abs=1e-6)
            assert client.accuracy == reported["personal"]["test"]["accuracy"]


def test_the_last_line_of_the_metrics_is_the_result(small):
    lines = [json.loads(line) for line in (small.path / "ditto" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["client"]) for line in lines] == [
        (round, f"client_{id:02d}") for round in (1, 2) for id in range(4)
    ]
    result = json.loads((small.path / "ditto" / "result.json").read_text())
    assert [line["personal"] for line in lines[4:]] == [one["personal"] for one in result["clients"]]


def test_clients_have_models_of_their_own(small):
    models = {m: [load_file(client.path) for client in small.clients(m)] for m in small.entries}
    different = lambda a, b: any(not torch.equal(a[key], b[key]) for key in a)
    assert not any(different(models["fedavg"][0], one) for one in models["fedavg"])  # one model for all
    for method in ("local", "ditto"):
        assert all(different(models[method][0], one) for one in models[method][1:])


def test_resolved_configuration_gives_the_same_run(small, tmp_path):
    """config.toml is all there is to know."""
    shutil.copy(small.path / "config.toml", tmp_path / "c.toml")
    code, _, err = call("run", "-c", tmp_path / "c.toml", "--out", tmp_path / "again", "-q")
    assert code == 0, err
    assert fingerprint(perfed.load(tmp_path / "again")) == fingerprint(small)


def test_double_precision(tmp_path):
    run = perfed.run("local", out=tmp_path / "run", precision="float64", **TINY)
    assert all(p.dtype == torch.float64 for p in run.client("client_00").model().parameters())


# ---------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    return perfed.run("pgfed", out=tmp_path_factory.mktemp("sequential") / "run", participation=0.75, **TINY)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_bytes_of_the_sequential_engine(tmp_path, one_by_one, workers):
    settings = TINY | {"engine": "workers", "workers": workers, "participation": 0.75}
    run = perfed.run("pgfed", out=tmp_path / "run", **settings)
    assert len(fingerprint(run)) == 2 * (4 + 3)
    assert fingerprint(run) == fingerprint(one_by_one)


@pytest.mark.parametrize("block", [0, 2])
def test_vectorised_agrees(tmp_path, one_by_one, block):
    settings = TINY | {"engine": "vectorised", "block": block, "participation": 0.75}
    run = perfed.run("pgfed", out=tmp_path / "run", **settings)
    for method in run.entries:
        np.testing.assert_allclose(run.accuracies(method), one_by_one.accuracies(method), atol=0.021)
        for one, other in zip(run.clients(method), one_by_one.clients(method), strict=True):
            a, b = load_file(one.path), load_file(other.path)
            assert all(torch.allclose(a[key], b[key], atol=1e-4) for key in a)


def test_another_seed_gives_another_run(tmp_path, small):
    other = perfed.run("fedavg", "ditto", lr=0.2, out=tmp_path / "run", seed=1, **TINY)
    assert all(fingerprint(other)[name] != value for name, value in fingerprint(small).items())


# ---------------------------------------------------------------------- who takes part, and what is sent


def test_clients_never_chosen_keep_the_initial_model(tmp_path):
    run = perfed.run("local", out=tmp_path / "run", participation=0.25, **(TINY | {"rounds": 2}))
    rounds = [json.loads(line) for line in (run.path / "local" / "rounds.jsonl").read_text().splitlines()]
    chosen = {name for line in rounds for name in line["cohort"]}
    assert all(len(line["cohort"]) == 1 for line in rounds)
    assert 1 <= len(chosen) <= 2
    experiment = prepare(run.folder.config())
    model = experiment.method(run.entries["local"]).model
    initial = model.state_dict(model.init(0))
    for client in run.clients():
        state = load_file(client.path)
        same = all(torch.equal(state[key], initial[key]) for key in initial)
        assert same == (client.name not in chosen)


@pytest.mark.parametrize(("participation", "cohort"), [(1.0, 4), (0.5, 2)])
def test_bytes_of_fedavg(tmp_path, participation, cohort):
    run = perfed.run("fedavg", out=tmp_path / "run", participation=participation, **TINY)
    parameters = 64 * 8 + 8 + 8 * 10 + 10  # the perceptron with 8 hidden units on 64 pixels and 10 classes
    by_method = {one["method"]: one["bytes"] for one in run.summary()}
    expected = parameters * 4 * cohort * 2
    assert (by_method["fedavg"]["down"], by_method["fedavg"]["up"]) == (expected, expected)
    assert (by_method["local"]["down"], by_method["local"]["up"]) == (0, 0)
    rounds = [json.loads(line) for line in (run.path / "fedavg" / "rounds.jsonl").read_text().splitlines()]
    assert [line["bytes"]["up_mean"] for line in rounds] == [expected // 2, expected]


# ---------------------------------------------------------------------- the command


def test_json_of_a_run(tmp_path):
    code, out, err = call("run", "fedavg", *WORDS, "--json", "--out", tmp_path / "run")
    assert code == 0, err
    assert out.count("\n") == 1
    answer = last(out)
    assert answer["run"] == str(tmp_path / "run")
    assert [one["method"] for one in answer["methods"]] == ["local", "fedavg"]
    wanted = {"run", "method", "rounds", "accuracy", "gain", "bytes", "seconds", "models"}
    for one in answer["methods"]:
        assert wanted <= set(one)
        assert set(one["accuracy"]) == {"mean", "weighted", "std", "worst10"}
        assert all(0 <= value <= 1 for value in one["accuracy"].values())
        assert {"down", "up"} <= set(one["bytes"])
        assert one["rounds"] == 2
        assert one["seconds"] > 0
        models = list(Path(one["models"]).glob("*/model.safetensors"))
        assert len(models) == 4
    assert answer["methods"][0]["gain"] is None
    gain = answer["methods"][1]["gain"]
    assert {"mean", "better", "worse"} <= set(gain)
    assert gain["better"] + gain["worse"] <= 4


def test_numbers_of_the_summary(small):
    """Recomputed from result.json by hand."""
    summary = {one["method"]: one for one in small.summary()}
    sizes = [client["test"] for client in small.about["clients"]]
    score = {m: [c["personal"]["test"]["accuracy"] for c in small.result(m)["clients"]] for m in small.entries}
    one = summary["ditto"]["accuracy"]
    assert one["mean"] == pytest.approx(sum(score["ditto"]) / 4)
    assert one["weighted"] == pytest.approx(sum(a * n for a, n in zip(score["ditto"], sizes, strict=True)) / sum(sizes))
    assert one["worst10"] == min(score["ditto"])
    difference = [a - b for a, b in zip(score["ditto"], score["local"], strict=True)]
    assert summary["ditto"]["gain"]["mean"] == pytest.approx(sum(difference) / 4)
    assert summary["ditto"]["gain"]["better"] == sum(d > 0 for d in difference)
    assert summary["ditto"]["gain"]["worse"] == sum(d < 0 for d in difference)


def test_without_the_baseline(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", baseline=False, **TINY)
    assert list(run.entries) == ["fedavg"]
    assert run.summary()[0]["gain"] is None


def test_a_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, _, err = call("run", "local", *WORDS, "-q")
        assert code == 0, err
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_divergence_ends_a_method_and_the_others_go_on(tmp_path, engine):
    settings = TINY | {"engine": engine}
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    code, out, err = call(
        "run", "fedavg", *words, "--lr", "1e6", "--weight-decay", "1", "--out", tmp_path / "run", "-q"
    )
    assert code == 1
    assert "FedAvg (diverged)" in out
    assert err.count("\n") == 1
    assert err.startswith("perfed: local: training diverged: too few clients of Local sent something usable in")
    assert "; fedavg: training diverged: " in err
    assert "it holds numbers that are not finite" in err
    assert "lr (now 1e+06)" in err
    result = json.loads((tmp_path / "run" / "fedavg" / "result.json").read_text())
    assert result["diverged"] in err
    assert (tmp_path / "run" / "report" / "summary.md").exists()
    code, out, again = call("resume", tmp_path / "run", "-q")  # nothing is done anew, and nothing is forgotten
    assert (code, again) == (1, err)


@pytest.mark.slow
def test_nothing_is_left_to_do_after_a_divergence(tmp_path):
    """Whoever diverged has a result that says so, and the methods and seeds after it are carried out."""
    words = [
        "fedavg",
        "ditto",
        "pgfed",
        "--lr",
        "100",
        "--rounds",
        "8",
        "--clients",
        "5",
        "--epochs",
        "1",
        "--hidden",
        "8",
    ]
    words += ["--engine", "sequential", "--no-baseline", "-q"]
    code, _, err = call("run", *words, "--out", tmp_path / "run")
    assert (code, err.count("\n")) == (1, 1)
    results = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "run").glob("*/result.json")}
    assert set(results) == {"fedavg", "ditto", "pgfed"}
    assert (
        {name for name, result in results.items() if result.get("diverged", "").startswith("training diverged")}
        == {name for name in results if f"{name}: training diverged" in err}
        >= {"ditto"}
    )
    logs = {path: path.read_bytes() for path in (tmp_path / "run").glob("*/rounds.jsonl")}
    assert call("resume", tmp_path / "run", "-q")[::2] == (1, err)
    assert {path: path.read_bytes() for path in logs} == logs
    words = ["ditto", "fedavg", *words[3:], "--seeds", "2", "--rounds", "3"]
    code, out, err = call("compare", *words, "--out", tmp_path / "both")
    assert (code, err.count("\n"), "Ditto (diverged)" in out) == (1, 1, True)
    assert "ditto: 2 of 2 seeds: training diverged" in err
    assert len(list((tmp_path / "both").glob("seed_?/*/result.json"))) == 4
    assert (tmp_path / "both" / "compare.md").exists()
    assert call("resume", tmp_path / "both", "-q")[::2] == (1, err)


def test_secrets_stay_outside(tmp_path, monkeypatch):
    """Nothing of the environment is written into a run folder."""
    canary = "tok_5f3c9a"
    monkeypatch.setenv("API_TOKEN", canary)
    run = perfed.run("local", out=tmp_path / "run", **TINY)
    assert not [path for path in run.path.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]


# ---------------------------------------------------------------------- the user's own data, network and method

NETWORK = """
from torch import nn

def make(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, classes))
"""
METHOD = '''"""Mine: FedAvg with a server that takes only a part of a step."""

from dataclasses import dataclass

from perfed import hyper
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    part: float = hyper(0.5, "part of a step", above=0, at_most=1)

    def aggregate(self, server, cohort):
        return server + self.part * cohort.mean
'''
USER = ["--rounds", "2", "--epochs", "2", "--engine", "sequential"]


def write_clients(folder, names="abc", samples=24):
    draw = np.random.default_rng(0)
    folder.mkdir()
    for at, name in enumerate(names):
        x = draw.normal(size=(samples, 4))
        np.savez(folder / f"{name}.npz", x=x, y=(x[:, at % 4] > 0).astype(int))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


FIXED = """
import torch
from torch import nn

def make(shape, classes):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[-1] * shape[-2], classes))
"""


def test_a_network_that_ignores_the_seed_is_named(here):
    """Of the methods, those whose models must differ at the start; others do not mind."""
    Path("net.py").write_text(FIXED)
    words = ["--model", "net.py:make", "--clients", "3", "--rounds", "1", "--epochs", "1"]
    code, _, err = call("run", "fedavg", "ifca", "pfedmb", *words, "--out", "run", "--json")
    assert code == 0, err
    told = " ".join(err.split())
    for method in ("ifca", "pfedmb"):
        assert f"{method} begins with several models that must differ" in told
    assert "fedavg begins" not in told
    Path("net.py").write_text(FIXED.replace("    torch.manual_seed(3)\n", ""))
    code, _, err = call("run", "ifca", *words, "--out", "other", "--json")
    assert "must differ" not in err


def test_data_network_and_method_of_the_user(here):
    write_clients(here / "data")
    Path("net.py").write_text(NETWORK)
    Path("mine.py").write_text(METHOD)
    words = ["--data", "folder", "--data-dir", "data", "--model", "net.py:make", "--part", "0.25"]
    code, out, err = call("run", "./mine.py", *USER, *words, "--out", "run", "--json")
    assert code == 0, err
    assert [one["method"] for one in last(out)["methods"]] == ["local", "mine"]
    config = read_toml(here / "run" / "config.toml")
    assert config["methods"] == ["local", "files/mine.py"]
    assert config["model"]["name"] == "files/net.py:make"
    assert config["method"]["mine"]["part"] == 0.25
    run = perfed.load("run")
    assert run.client("b").model().network[1].running_mean.abs().sum() > 0  # statistics are saved, too
    x = np.load("data/b.npz")["x"]
    expected = run.client("b").predict(x).tolist()

    # Everything of the user's goes away, and the run is elsewhere: it still loads, predicts and resumes.
    np.savez("x.npz", x=x)
    shutil.move("data", "elsewhere")
    Path("net.py").unlink()
    Path("mine.py").unlink()
    shutil.move("run", "moved")
    assert perfed.load("moved").client("b").predict(x).tolist() == expected
    code, out, err = call("predict", "moved", "--client", "b", "--input", "x.npz", "--json")
    assert code == 0, err
    labels = [str(number) for number in expected]
    assert last(out) == {"client": "b", "method": "mine", "predictions": expected, "labels": labels}


def test_resumed_from_another_folder(here, monkeypatch):
    """Relative paths of data, network and method mean what they meant when the run began."""
    write_clients(here / "data")
    Path("net.py").write_text(NETWORK)
    Path("mine.py").write_text(METHOD)
    words = ["--data", "folder", "--data-dir", "data", "--model", "net.py:make"]
    assert call("run", "./mine.py", *USER, *words, "--out", "run", "-q")[0] == 0
    expected = fingerprint(perfed.load("run"))
    shutil.rmtree("run/mine")
    Path("net.py").unlink()
    Path("mine.py").unlink()
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    code, _, err = call("resume", "../run", "-q")
    assert code == 0, err
    assert fingerprint(perfed.load("../run")) == expected


def test_compared_and_resumed_from_another_folder(here, monkeypatch):
    write_clients(here / "data")
    Path("net.py").write_text(NETWORK)
    Path("mine.py").write_text(METHOD)
    words = ["--data", "folder", "--data-dir", "data", "--model", "net.py:make", "--seeds", "2"]
    assert call("compare", "./mine.py", *USER, *words, "--out", "both", "-q")[0] == 0
    shutil.rmtree("both/seed_1")
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    code, _, err = call("resume", "../both", "-q")
    assert code == 0, err
    assert Path("../both/seed_1/mine/result.json").exists()


def test_a_network_and_a_method_in_files_of_one_name(here):
    """Their copies must not overwrite each other."""
    write_clients(here / "data")
    for folder, text in (("m", METHOD), ("n", NETWORK)):
        Path(folder).mkdir()
        Path(folder, "x.py").write_text(text)
    words = ["--data", "folder", "--data-dir", "data", "--model", "n/x.py:make"]
    assert call("run", "m/x.py", *USER, *words, "--out", "run", "-q")[0] == 0
    shutil.rmtree("run/x")
    code, _, err = call("resume", "run", "-q")
    assert code == 0, err
    assert perfed.load("run").client("a").predict(np.zeros((3, 4))).shape == (3,)


@pytest.mark.parametrize("name", ["my method.py", "a.b.py", "ünlü.py", "it's.py", 'quote".py', "😀.py", "del\x7f.py"])
def test_odd_names_of_method_files(here, name):
    Path(name).write_text(METHOD)
    code, _, err = call("run", f"./{name}", *WORDS, "--out", "run", "-q")
    assert code == 0, err
    again = perfed.load("run")
    assert list(again.entries) == ["local", name.removesuffix(".py")]
    assert again.config.method[name.removesuffix(".py")]["part"] == 0.5


def test_an_edited_method_is_read_again(here):
    """In one Python session, as in a notebook."""
    Path("mine.py").write_text(METHOD)
    first = perfed.run("./mine.py", out="first", **TINY)
    Path("mine.py").write_text(METHOD.replace("part", "piece").replace("0.5", "0.25"))
    second = perfed.run("./mine.py", out="second", piece=0.125, **TINY)
    assert first.config.method["mine"]["part"] == 0.5
    assert second.config.method["mine"]["piece"] == 0.125
    assert fingerprint(first) != fingerprint(second)


def test_clients_without_test_samples(here):
    """They have no accuracy; the others are measured as always."""
    draw = np.random.default_rng(0)
    (here / "data").mkdir()
    for name, count in (("a", 0), ("b", 8), ("c", 8)):
        x, y = draw.normal(size=(12, 4)), draw.integers(0, 2, 12)
        test = {"x_test": draw.normal(size=(count, 4)), "y_test": draw.integers(0, 2, count)}
        np.savez(here / "data" / f"{name}.npz", x_train=x, y_train=y, **test)
    code, out, err = call("run", "fedavg", *USER, "--data", "folder", "--data-dir", "data", "--out", "run", "--json")
    assert code == 0, err
    assert "NaN" not in out
    assert last(out)["methods"][1]["accuracy"]["mean"] is not None
    code, out, _ = call("models", "run", "--json")
    assert [one["accuracy"] is None for one in last(out)["models"]] == [True, False, False]
    assert next(csv.DictReader(Path("run/report/clients.csv").read_text().splitlines()))["fedavg"] == ""
    for path in Path("run").rglob("*.json*"):
        assert "NaN" not in path.read_text()


# ---------------------------------------------------------------------- names from outside

NAMES = ["../../x", "a/b", "/etc/passwd", "<script>alert(1)</script>", "x" * 300, "=cmd()", "+1", "-1", "@x", "a", "A",
         "..", "CON", "é", "[red]x[/red]", "a`b|c", 'say "hi"']  # fmt: skip


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A run on one table with a column of hostile names."""
    home = tmp_path_factory.mktemp("named")
    draw = np.random.default_rng(0)
    with (home / "table.csv").open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["client", "label", "u", "v"])
        for name in NAMES:
            for _ in range(12):
                u, v = draw.normal(size=2)
                write.writerow([name, int(u > v), u, v])
    settings = {"data": "folder", "data_dir": str(home / "table.csv"), "engine": "sequential", "rounds": 1, "epochs": 1}
    return perfed.run("fedavg", out=home / "inside" / "run", **settings)


def test_names_stay_inside_the_run_folder(named):
    home = named.path.parent.parent
    assert sorted(path.name for path in home.iterdir()) == ["inside", "table.csv"]
    assert [path.name for path in (home / "inside").iterdir()] == ["run"]
    assert len(list((named.path / "fedavg" / "clients").iterdir())) == len(NAMES)
    for path in named.path.rglob("*"):
        assert named.path in path.resolve().parents
        assert len(path.name) <= 60


def test_the_original_names_are_understood(named, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    code, out, err = call("models", named.path, "--json")
    assert code == 0, err
    assert sorted(one["client"] for one in last(out)["models"]) == sorted(NAMES)
    for name in NAMES:
        code, out, err = call("predict", named.path, f"--client={name}", "--input", tmp_path / "x.npy", "--json")
        assert code == 0, err
        assert last(out)["client"] == name
    code, out, err = call("models", named.path)
    assert code == 0, err
    assert all(name in out for name in NAMES if len(name) < 100)


def test_names_are_no_formulas_in_a_spreadsheet(named):
    rows = list(csv.DictReader(io.StringIO((named.path / "report" / "clients.csv").read_text())))
    names = [row["client"] for row in rows]
    assert not [name for name in names if name[:1] in "=+-@\t\r"]
    assert sorted(name.removeprefix("'") for name in names) == sorted(NAMES)
    assert clients_csv(named) == (named.path / "report" / "clients.csv").read_bytes().decode()


def test_names_are_no_markup_in_a_card(named):
    for client in named.clients():
        text = (client.path.parent / "card.md").read_text()
        title = text.splitlines()[0]
        assert title.count("`") == 2  # the name is one piece of code, whatever is in it
        assert f"client({client.about['folder']!r}" in text


def test_file_names_that_are_not_text(here):
    write_clients(here / "data")
    Path("data/c.npz").rename(os.fsdecode(b"data/\xff.npz"))
    code, _, err = call("run", "local", *USER, "--data", "folder", "--data-dir", "data", "--out", "run", "-q")
    assert code == 0, err
    assert len(perfed.load("run").clients()) == 3


def test_place_flags_and_the_api_agree(small):
    """The settings of Python and those of the resolved file make the same configuration."""
    made = from_dict(place_flags({**TINY, "lr": 0.2}, ["local", "fedavg", "ditto"]))
    again = small.config
    picked = dataclasses.replace(made.run, device="cpu")  # a run's own file names what `auto` meant
    assert (picked, again.methods) == (again.run, made.methods)
    for entry in made.entries():
        defaults = {name: f.default for name, f in entry.fields.items()}
        assert again.method[entry.name] == {**defaults, **made.settings(entry)}
