"""The score that methods are judged by: accuracy, unless the data make it say little."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

import perfed
from perfed.core.errors import Problem
from perfed.report.tables import HEADINGS, headings, lines, on_terminal, remarks
from perfed.studies import measures, tune
from perfed.studies.compare import Comparison
from perfed.training.config import from_dict, place_flags
from perfed.training.prepare import describe, load_clients, prepare
from perfed.training.statistics import gain_with_test

FAST = dict(rounds=2, epochs=1, model="mlr", engine="sequential", data="folder")


def write(folder, **shares):
    """A site of 100 samples for each share of sick ones, who differ in both features."""
    folder.mkdir()
    for seed, (name, share) in enumerate(shares.items()):
        y = (np.arange(100) < 100 * share).astype(int)
        x = np.random.default_rng(seed).normal(size=(100, 2)) + 2 * y[:, None]
        np.savez(folder / f"{name}.npz", x=x.astype("float32"), y=np.array(["well", "sick"])[y])
    return str(folder)


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    home = tmp_path_factory.mktemp("rare")
    return perfed.run("ditto", out=home / "run", data_dir=write(home / "d", a=0.04, b=0.08, c=0.12), **FAST)


def test_a_rare_class_makes_balanced_accuracy_the_headline(rare):
    assert rare.headline == "balanced"
    assert rare.columns == ["accuracy", "f1", "auc"]
    table = dict(zip(headings(rare), lines(rare)[1], strict=True))
    found = {name: np.mean(rare.scores("ditto", metric)) for name, metric in (
        ("mean", "balanced_accuracy"), ("accuracy", "accuracy"), ("F1", "macro_f1"), ("AUC", "macro_auc"))}  # fmt: skip
    assert {name: table[name] for name in found} == {name: f"{value:.3f}" for name, value in found.items()}
    assert rare.gain("ditto") == gain_with_test(*(rare.scores(m, "balanced_accuracy") for m in ("local", "ditto")))
    assert on_terminal(rare) == 10  # no bytes
    (why,) = remarks(rare.summary())
    assert why == (
        "'well' is the label of 92.0% of all test samples and of more than 80% of those of 3 of 3 clients: accuracy "
        "alone says little; mean, weighted, worst tenth and gain are of balanced accuracy"
    )


def test_the_best_round_is_judged_by_the_headline(rare):
    best = rare.result("ditto")["best"]
    curve = measures.curves(rare, "ditto", metric="balanced_accuracy")  # in every round, although scores = "last"
    assert not np.isnan(curve.val).all(axis=1).any()
    mean = np.nanmean(curve.val, axis=1)
    assert (best["round"], best["validation"]) == (curve.rounds[mean.argmax()], pytest.approx(mean.max()))
    assert [line["validation"]["personal"] for line in rare.folder.method("ditto").rounds()] == pytest.approx(mean)
    assert mean.tolist() != np.nanmean(measures.curves(rare, "ditto").val, axis=1).tolist()  # not the accuracy


def test_files_have_the_headline_too(rare):
    text = (rare.path / "report" / "summary.md").read_text()
    assert "Balanced accuracy: last round" in text
    assert "Gain: balanced accuracy minus that of Local" in text
    assert "'well' is the label of" in text
    rows = list(csv.DictReader((rare.path / "report" / "clients.csv").read_text().splitlines()))
    balanced = [float(row["ditto balanced_accuracy"]) for row in rows]
    assert balanced == pytest.approx(rare.scores("ditto", "balanced_accuracy"), abs=1e-6)
    card = next((rare.path / "ditto" / "clients").glob("a/card.md")).read_text()
    assert "| method | balanced accuracy | accuracy | F1 | AUC |" in card
    assert "this client's samples of each: sick (4), well (96)" in card
    about = json.loads((rare.path / "clients.json").read_text())
    assert about["majority"] == {"label": "well", "pooled": pytest.approx(0.92, abs=0.01), "clients": 3}
    assert about["clients"][1]["labels"] == {"sick": 8, "well": 92}


@pytest.mark.parametrize("name", ["accuracy", "f1", "auc"])
def test_another_headline_can_be_named(rare, tmp_path, name):
    run = perfed.run("ditto", out=tmp_path / "run", headline=name, data_dir=rare.config.data.dir, **FAST)
    metric = {"accuracy": "accuracy", "f1": "macro_f1", "auc": "macro_auc"}[name]
    assert run.headline == name
    assert lines(run)[1][2] == f"{np.mean(run.scores('ditto', metric)):.3f}"
    assert run.summary()[1]["accuracy"] == rare.summary()[1]["accuracy"]  # nothing else is different


def test_a_rare_class_at_one_client_shows_other_scores(tmp_path):
    run = perfed.run("fedavg", out=tmp_path / "run", data_dir=write(tmp_path / "d", a=0.04, b=0.5), **FAST)
    assert (run.headline, run.columns) == ("accuracy", ["balanced", "f1", "auc"])
    assert remarks(run.summary()) == [
        "'well' is the label of 72.0% of all test samples and of more than 80% of those of 1 of 2 clients: accuracy "
        "alone says little"
    ]


def test_clients_of_few_labels_each_are_not_a_rare_class():
    """Where labels are uneven between clients, but no label is frequent overall, everything is as ever."""
    config = from_dict(place_flags({"alpha": 0.1, "clients": 15}, ["fedavg"]))
    majority = describe(load_clients(config.data, 0))["majority"]
    assert majority["pooled"] < 0.2
    run = object.__new__(perfed.training.results.Run)
    run.config, run.about = config, {"classes": 10, "majority": majority, "clients": []}
    assert (run.headline, run.columns, run.why) == ("accuracy", [], "")
    assert headings(run) == HEADINGS
    assert on_terminal(run) == 9


def test_scores_that_are_left_out_cannot_be_the_headline(rare, tmp_path):
    settings = {**FAST, "data_dir": rare.config.data.dir, "scores": "none"}
    with pytest.raises(Problem, match=r"run.headline = f1 needs scores that run.scores = none leaves out"):
        prepare(from_dict(place_flags({**settings, "headline": "f1"}, ["fedavg"])))
    run = perfed.run("fedavg", out=tmp_path / "run", **settings)
    assert (run.headline, run.columns) == ("accuracy", [])
    assert "accuracy alone says little" in remarks(run.summary())[0]


def test_a_comparison_is_judged_alike(rare, tmp_path, monkeypatch):
    settings = {**FAST, "data_dir": rare.config.data.dir}
    config = from_dict(place_flags(settings, ["fedavg"]))
    comparison = Comparison.create(config, 2, tmp_path / "c")
    result = perfed.api.compare(comparison, perfed.api.Console(quiet=True))
    judged = result["methods"][1]
    runs = [perfed.load(tmp_path / "c" / f"seed_{seed}") for seed in (0, 1)]
    means = [np.mean(run.scores("fedavg", "balanced_accuracy")) for run in runs]
    assert judged["spread"]["mean"]["mean"] == pytest.approx(np.mean(means))
    assert judged["headline"] == "balanced"
    text = (tmp_path / "c" / "compare.md").read_text()
    assert "mean test balanced accuracy" in text
    assert "| accuracy | F1 | AUC |" in text
    for run in runs[1:]:  # as if in this seed's split no class were frequent
        run.about["majority"] |= {"pooled": 0.5, "clients": 0}
    assert [run.judged for run in runs] == ["balanced_accuracy", "accuracy"]
    (_, same) = comparison.finish(runs)["methods"]
    assert (same["spread"], same["gain"]) == (judged["spread"], judged["gain"])
    monkeypatch.setattr(tune, "Run", lambda folder: next(run for run in runs if run.path == folder))
    score = tune._score([SimpleNamespace(diverged=False, folder=run.path, method="fedavg") for run in runs])
    found = [np.nanmean(measures.curves(run, "fedavg").val, axis=1).max() for run in runs]
    assert (score["metric"], score["validation"]) == ("accuracy", pytest.approx(np.mean(found)))
