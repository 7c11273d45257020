"""Runs whose score is better where it is lower, or is no accuracy: what is judged, saved, shown and predicted."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_diabetes
from torch import nn

import perfed
from perfed.cli import main
from perfed.core.errors import Problem
from perfed.report.picture import picture
from perfed.studies import measures
from perfed.training.statistics import gain_over, gain_with_test, spread

SMALL = dict(data="diabetes", clients=4, model="linear", epochs=1, engine="sequential", lr=0.02)


@pytest.fixture(scope="module")
def diabetes(tmp_path_factory):
    out = tmp_path_factory.mktemp("diabetes") / "run"
    return perfed.run("fedavg", "ditto", out=out, rounds=8, patience=7, scores="every", **SMALL)


def test_gains_and_the_worst_where_less_is_better():
    errors, baseline = np.array([1.0, 5.0, np.nan, 2.0]), np.array([2.0, 4.0, 1.0, 2.0 + 1e-9])
    assert spread(errors, np.ones(4), -1)["worst10"] == 5.0
    gain = gain_with_test(baseline, errors, sign=-1)
    assert (gain["better"], gain["worse"], gain["clients"]) == (1, 1, 3)
    assert gain["mean"] == pytest.approx(0.0, abs=1e-6)
    assert gain_over(baseline[:1], errors[:1], sign=-1) == {"mean": 1.0, "std": 0.0, "positive": 1.0}
    tiny = gain_with_test(baseline * 1e-9, errors * 1e-9, sign=-1)
    assert (tiny["better"], tiny["worse"]) == (1, 1)  # errors have the size of their unit
    rounds, mean = np.array([1, 2, 3]), np.array([9.0, 4.0, 1.0])
    assert measures.first_round(rounds, mean, 4.0, -1) == 2
    assert measures.first_round(rounds, mean * 1e-12, 4e-12, -1) == 2


def test_one_client_with_an_enormous_error_makes_nobody_a_tie():
    baseline, errors = np.array([1e7, 2.0, 2.0, 3.0, np.inf, 1.0]), np.array([1e7, 1.0, 2.0, 4.0, 1.0, np.inf])
    gain = gain_with_test(baseline, errors, sign=-1)
    assert (gain["better"], gain["worse"], gain["clients"], gain["mean"]) == (1, 1, 4, 0.0)


def test_regression_is_judged_by_its_error(diabetes):
    run = diabetes
    assert (run.headline, run.judged, run.sign) == ("absolute_error", "absolute_error", -1)
    assert run.columns == ["squared_error", "r2"]
    assert run.about["task"]["kind"] == "regression"
    for name in run.entries:
        result, curve = run.result(name), measures.curves(run, name)
        mean = np.nanmean(curve.val, axis=1)
        assert result["best"]["validation"] == pytest.approx(mean.min())
        assert result["saved_round"] == result["best"]["round"] == curve.rounds[mean.argmin()]
    gain = run.gain("ditto")
    errors = {name: run.scores(name, "absolute_error") for name in ("local", "ditto")}
    assert gain["mean"] == pytest.approx((errors["local"] - errors["ditto"]).mean())
    assert 10 < errors["ditto"].mean() < 200  # in units of the label, 25 to 346
    assert gain["better"] == (errors["ditto"] < errors["local"]).sum()


def test_what_is_shown_says_that_less_is_better(diabetes):
    summary = (diabetes.path / "report" / "summary.md").read_text()
    assert "Gain: Local's absolute error minus that of the method" in summary
    assert "gain are of absolute error, of which less is better" in summary
    assert (diabetes.path / "report" / "absolute_error.png").exists()
    assert picture(diabetes).startswith(b"\x89PNG")
    rows = list(csv.DictReader((diabetes.path / "report" / "clients.csv").read_text().splitlines()))
    assert float(rows[0]["ditto"]) == pytest.approx(diabetes.scores("ditto", "absolute_error")[0], abs=1e-5)
    _, scores = diabetes.curve("ditto")
    assert scores[0] > scores[-1]
    last = json.loads((diabetes.path / "ditto" / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["absolute_error"]["personal"] == scores[-1]
    (entry,) = [each for each in diabetes.summary() if each["method"] == "ditto"]
    assert "accuracy" not in entry
    assert entry["absolute_error"]["worst10"] == pytest.approx(diabetes.scores("ditto", "absolute_error").max())


def test_a_prediction_is_in_units_of_the_label(diabetes):
    client = diabetes.client("client_00", "ditto")
    x, y = load_diabetes(return_X_y=True, scaled=False)
    predicted = client.predict(x)
    assert predicted.shape == y.shape
    assert np.abs(predicted - y).mean() < np.abs(y.mean() - y).mean()
    assert client.accuracy is None
    card = (client.path.parent / "card.md").read_text()
    task = diabetes.task
    words = f"a prediction is {task.scale[0]:.6g} output + {task.shift[0]:.6g}"
    assert f"- task: regression of 1 target; outputs are standardised: {words}\n" in card
    out = client.logits(x)[:, 0]
    assert np.allclose(out * task.scale[0] + task.shift[0], predicted, rtol=1e-4)
    assert client.score == diabetes.scores("ditto", "absolute_error")[0]


def test_small_errors_get_better_too(tmp_path):
    """Labels in a tiny unit: what is better does not depend on it."""
    for seed in range(2):
        x = np.random.default_rng(seed).normal(size=(60, 3)).astype("float32")
        np.savez(tmp_path / f"{seed}.npz", x=x, y=x.sum(1).astype(float) * 1e-10)
    settings = {key: value for key, value in SMALL.items() if key != "clients"}
    settings |= {"data": "folder", "data_dir": str(tmp_path), "baseline": False}
    run = perfed.run("fedavg", out=tmp_path / "run", rounds=3, patience=2, task="regression", **settings)
    assert run.result("fedavg")["best"]["round"] == 3


def test_a_headline_of_another_task_is_refused(tmp_path):
    words = "run.headline = f1 is no score of regression of 1 target: it has absolute_error, squared_error, r2"
    with pytest.raises(Problem, match=words):
        perfed.run("fedavg", out=tmp_path / "run", rounds=1, headline="f1", **SMALL)
    with pytest.raises(Problem, match="weighs classes, and the task is regression"):
        perfed.run("fedavg", out=tmp_path / "run", rounds=1, class_weights="balanced", **SMALL)
    with pytest.raises(Problem, match="fedrod balances classes, which only classification has"):
        perfed.run("fedrod", out=tmp_path / "run", rounds=1, **SMALL)


def test_the_headline_may_be_a_score_of_all_outputs(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", rounds=3, patience=3, headline="r2", baseline=False, **SMALL)
    curve = measures.curves(run, "fedavg", metric="r2")
    assert run.result("fedavg")["best"]["validation"] == pytest.approx(np.nanmean(curve.val, axis=1).max())


def test_rare_labels_make_auc_the_headline(tmp_path):
    small = dict(rounds=2, epochs=1, clients=4, engine="sequential", model="linear", scores="last")
    run = perfed.run("fedavg", data="synthetic-multilabel", out=tmp_path / "run", **small)
    y = run.about["majority"]
    assert y["label"] in ("absent", "there")
    judged = "auc" if y["pooled"] > 0.8 else "accuracy"
    assert run.judged == judged
    lines = [json.loads(line) for line in (run.path / "fedavg" / "metrics.jsonl").read_text().splitlines()]
    rounds = {line["round"] for line in lines if "auc" in line["personal"]["val"]}
    assert rounds == ({1, 2} if judged == "auc" else {2})


def test_tune_looks_for_the_lowest_error(tmp_path, monkeypatch, capsys):
    words = ["tune", "fedavg", "--grid", "lr=0.0001,0.02", "--data", "diabetes", "--clients", "4", "--model", "linear"]
    words += ["--rounds", "3", "--epochs", "1", "--out", str(tmp_path / "tune"), "--json"]
    monkeypatch.setattr("sys.argv", ["perfed", *words])
    with pytest.raises(SystemExit):
        main()
    result = json.loads(capsys.readouterr().out)
    best, tried = result["best"], {trial["settings"]["lr"]: trial["validation"] for trial in result["tried"]}
    assert best["validation"] == min(tried.values())
    assert (best["settings"]["lr"], best["metric"]) == (0.02, "absolute_error")


# ---------------------------------------------------------------------- models that are trees

PROTOTYPES = '''
from dataclasses import dataclass

import torch

from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Prototypes(FedAvg):
    """Prototypes: a network's outputs, moved by how far they are off on average over the training samples."""

    evaluates = "adapted"

    def off(self, batch, w):
        each = self.model.apply(w, batch.x)[0] - torch.nn.functional.one_hot(batch.y, 10)
        weight = torch.ones_like(each[:, 0]) if batch.weight is None else batch.weight
        return (weight[:, None] * each).sum(0) / weight.sum()

    def personalise(self, client, down, data):
        w = down.shared
        return {"personal": {"nets": [w], "off": data.mean(self.off, w)}, "global": w}

    def predict(self, model, x):
        if isinstance(model, torch.Tensor):
            return self.model.apply(model, x)[0]
        return self.model.apply(model["nets"][0], x)[0] - model["off"]
'''


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers"])
def test_trees_are_saved_and_predict(tmp_path, engine):
    (tmp_path / "prototypes.py").write_text(PROTOTYPES)
    settings = dict(clients=4, rounds=2, epochs=1, model="mlr", engine=engine, baseline=False, save_models="all")
    run = perfed.run(str(tmp_path / "prototypes.py"), out=tmp_path / "run", workers=2, **settings)
    assert run.check() > 4
    client = run.client("client_00")
    module = client.model()
    assert isinstance(module, nn.Module)
    assert not module.training
    assert set(module.state_dict()) == {"model/nets/0", "model/off"}
    assert set(load_file(client.path)) == {"model/nets/0", "model/off"}
    x = np.random.default_rng(0).uniform(0, 16, (5, *client.sample)).astype("float32")
    out = client.logits(x)
    assert torch.equal(client.logits(x).argmax(1), torch.from_numpy(client.predict(x)))
    network = run.network()
    network.load_state_dict(load_file(client.path.with_name("global.safetensors")))
    assert torch.allclose(network(torch.from_numpy(x)).detach() - load_file(client.path)["model/off"], out, atol=1e-5)
    card = (client.path.parent / "card.md").read_text()
    assert "Prototypes" in card
