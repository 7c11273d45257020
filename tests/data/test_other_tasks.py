"""Tasks beyond classification: data sets, labels of own files, what stands for classes where samples are dealt."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import torch
from real_data import real

from perfed.core.errors import Problem
from perfed.core.task import IGNORED, Binary, Multilabel, NextToken, Regression
from perfed.data import load
from perfed.data.config import DataConfig
from perfed.data.pool import Pool, checked
from perfed.data.preparation import words
from perfed.data.sources.shakespeare import windows
from perfed.data.strata import strata, stratum_counts, stratum_names
from perfed.report import partition as report

DRAW = np.random.default_rng(0)


def write(path, header, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def table(path, labels, answer, rows=40):
    """A table of two clients with the features u, v, and for each row `answer(u, v)`."""
    u, v = np.random.default_rng(1).normal(size=(2, rows)).round(3)
    lines = [[f"c{i % 2}", a, b, *answer(i, a, b)] for i, (a, b) in enumerate(zip(u, v, strict=True))]
    return write(path, ["client", "u", "v", *labels], lines)


def own(path, **settings):
    return DataConfig(name="folder", dir=str(path), **settings)


# --- data sets ------------------------------------------------------------------------------------------------------


def test_diabetes_is_standardised_by_its_training_rows():
    clients = load(DataConfig(name="diabetes", clients=10), 0)
    assert isinstance(clients.task, Regression)
    assert clients.labels == ("progression",)
    assert clients.classes == 0
    assert clients.shape == (10,)
    assert clients.train.y.shape == (sum(clients.train.size), 1)
    assert clients.train.y.mean().abs() < 1e-6
    assert (clients.train.y.std(correction=0) - 1).abs() < 1e-5
    told = torch.cat([clients.task.predicted(clients.split(s).y.double()) for s in ("train", "val", "test")])
    from sklearn.datasets import load_diabetes

    expected = torch.from_numpy(load_diabetes(scaled=False).target)
    torch.testing.assert_close(told.sort().values, expected.sort().values, atol=1e-4, rtol=0)


def test_targets_are_traffic_as_columns_are():
    plain = load(DataConfig(name="diabetes", clients=10), 0).preparation
    other = load(DataConfig(name="diabetes", clients=10, normalise="none"), 0).preparation
    assert plain is not None
    assert other is not None
    assert plain["targets"] == other["targets"]
    assert other["traffic"] == {"up_mean": (1 + 3) * 8 * 10, "up_own": 0, "down_shared": 2 * 8 * 10}
    assert plain["traffic"]["up_mean"] - other["traffic"]["up_mean"] == (1 + 3 * 10) * 8 * 10
    assert any("the numbers to predict (480 bytes" in line for line in words(other))


def test_a_target_that_never_changes_is_said(tmp_path):
    path = table(tmp_path / "t.csv", ["label"], lambda *_: [2.5])
    clients = load(own(path, task="regression"), 0)
    assert any("nothing to learn, as all training rows have the same 'label'" in line for line in clients.notices)
    assert clients.task == Regression(1, (2.5,), (1.0,))
    assert not clients.train.y.any()


def test_multilabel_data_follow_the_seed_and_differ_between_clients():
    config = DataConfig(name="synthetic-multilabel", clients=8, synthetic_samples=200)
    clients, again, other = load(config, 0), load(config, 0), load(config, 1)
    assert isinstance(clients.task, Multilabel)
    assert clients.train.y.shape[1] == clients.task.outputs == 5
    assert torch.equal(clients.train.y, again.train.y)
    assert not torch.equal(clients.train.x, other.train.x)
    assert clients.train.y.dtype == torch.float32
    assert set(clients.train.y.unique().tolist()) == {0, 1}
    share = torch.stack([y.mean(0) for y in clients.train.y.split(list(clients.train.size))])
    alike = load(dataclasses.replace(config, synthetic_a=0, synthetic_b=0), 0)
    same = torch.stack([y.mean(0) for y in alike.train.y.split(list(alike.train.size))])
    assert share.std(0).mean() > 1.5 * same.std(0).mean()


def test_school_and_landmine_have_clients_of_their_own():
    school = load(DataConfig(name="school", dir=real("school.npz"), clients=0), 0)
    assert len(school) == 139
    assert school.shape == (28,)
    assert isinstance(school.task, Regression)
    assert sum(sum(school.split(s).size) for s in ("train", "val", "test")) == 15_362
    mines = load(DataConfig(name="landmine", dir=real("landmine_small.npz"), clients=0), 0)
    assert len(mines) == 29
    assert mines.task == Binary(1)
    assert mines.labels == ("mine",)
    assert stratum_counts(mines, "train", "val", "test").sum(axis=0).tolist() == [1464 - 89, 89]


def test_shakespeare_speaks_by_role():
    config = DataConfig(name="shakespeare", dir=real("shakespeare_roles.npz"), clients=0, min_samples=200)
    clients = load(config, 0)
    assert isinstance(clients.task, NextToken)
    assert clients.task.outputs == 72 == len(clients.labels or ())
    assert clients.train.x.dtype == clients.train.y.dtype == torch.int64
    assert clients.shape == (80,)
    assert torch.equal(clients.ready(clients.train.x[:3], torch.float32), clients.train.x[:3])
    letters = np.array(clients.labels)
    place = clients.names.index("HAMLET (The Tragedy of Hamlet, Prince of Denmark)")
    mine = slice(clients.train.start[place], clients.train.start[place] + clients.train.size[place])
    assert any("Horatio" in "".join(letters[row]) for row in clients.train.x[mine])
    assert torch.equal(clients.train.x[mine][:, 1:], clients.train.y[mine][:, :-1].where(
        clients.train.y[mine][:, :-1] != IGNORED, 0))  # fmt: skip
    assert sum(len(y) for y in (clients.train.y, clients.val.y, clients.test.y)) >= 200 * len(clients)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_windows_follow_one_another(length):
    for count in range(9):
        tokens = np.arange(5, 5 + count)
        x, y = windows(tokens, length)
        known = y != IGNORED
        assert x[known].tolist() == tokens[:-1].tolist()
        assert y[known].tolist() == tokens[1:].tolist()
        assert known.sum() == max(count - 1, 0)
        assert not len(x) or known[-1].any()


def test_an_absent_file_says_where_it_goes(tmp_path):
    for name in ("school", "landmine", "shakespeare"):
        with pytest.raises(Problem, match=rf"{tmp_path}.*npz does not exist; make it \(arrays .*https://"):
            load(DataConfig(name=name, dir=str(tmp_path)), 0)


def test_the_task_of_a_data_set_is_its_own():
    with pytest.raises(Problem, match=r"data\.task is for files of your own .* 'digits' is classification"):
        load(DataConfig(task="regression"), 0)
    assert load(DataConfig(name="diabetes", clients=4, task="regression"), 0).task.kind == "regression"
    assert DataConfig(task="next-token").task == "next_token"


# --- labels of own files --------------------------------------------------------------------------------------------


def test_numbers_are_told_from_classes(tmp_path):
    path = table(tmp_path / "t.csv", ["label"], lambda _i, u, v: [round(3 * u - v, 3)])
    clients = load(own(path), 0)
    assert clients.task.kind == "regression"
    assert any("the task is regression" in line for line in clients.notices)
    many = load(own(table(tmp_path / "m.csv", ["label"], lambda i, *_: [i], rows=120)), 0)
    assert many.task.kind == "regression"
    assert any("120 different numbers" in line for line in many.notices)
    few = load(own(table(tmp_path / "f.csv", ["label"], lambda i, *_: [i % 90], rows=180)), 0)
    assert few.task.kind == "classification"
    assert few.classes == 90
    assert load(own(tmp_path / "f.csv", task="regression"), 0).task.kind == "regression"
    assert load(own(tmp_path / "m.csv", task="classification"), 0).classes == 120


def test_several_label_columns(tmp_path):
    path = table(tmp_path / "t.csv", ["wet", "cold"], lambda _i, u, v: ["yes" if u > 0 else "no", int(v > 0)])
    clients = load(own(path, label_column="wet,cold"), 0)
    assert clients.task == Multilabel(2)
    assert clients.labels == ("wet", "cold")
    assert clients.columns == ("u", "v")
    y = clients.train.y
    assert torch.equal(y[:, 0], (clients.train.x[:, 0] > clients.train.x[:, 0][y[:, 0] == 0].max()).float())
    path = table(tmp_path / "n.csv", ["a", "b"], lambda _i, u, v: [2 * u, 10 * v + 3])
    clients = load(own(path, label_column="a,b"), 0)
    assert clients.task.kind == "regression"
    assert clients.labels == ("a", "b")
    assert clients.train.y.shape[1] == 2
    units = clients.task.predicted(clients.train.y.double())
    x = clients.train.x.double()  # standardised, so a line through it
    assert np.corrcoef(units[:, 1], x[:, 1])[0, 1] > 0.999999


def test_labels_that_few_have_are_said(tmp_path):
    path = table(tmp_path / "t.csv", ["a", "b", "c"], lambda i, *_: [i % 3 == 0, i in (2, 4), 0])
    notices = load(own(path, label_column="a,b,c"), 0).notices
    assert "no sample has the label 'c'" in notices
    assert any(line.startswith("a single client has the label 'b' (client 'c0', 2 samples)") for line in notices)


def test_arrays_of_several_labels(tmp_path):
    x = DRAW.normal(size=(30, 3)).astype("float32")
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, :2] > 0).astype(int))
    assert load(own(tmp_path), 0).task == Multilabel(2)
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=x[:, :2] * 3)
    assert load(own(tmp_path), 0).task.kind == "regression"
    tokens = DRAW.integers(0, 7, size=(30, 6))
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=tokens[:, :-1], y=tokens[:, 1:])
    clients = load(own(tmp_path), 0)
    assert clients.task == NextToken(7)
    assert clients.train.x.dtype == torch.int64


def test_a_binary_label_is_one_output(tmp_path):
    path = table(tmp_path / "t.csv", ["label"], lambda _i, u, _v: ["sick" if u > 0 else "healthy"])
    assert load(own(path), 0).classes == 2
    clients = load(own(path, task="binary"), 0)
    assert clients.task == Binary(1)
    assert clients.labels == ("sick",)
    assert clients.train.y.shape[1:] == (1,)


@pytest.mark.parametrize(
    ("labels", "answer", "settings", "sentence"),
    [
        (
            ["a", "b"],
            lambda i, *_: [1, "x" if i == 3 else 0],
            {},
            "2 labels for each sample must hold 0 and 1, or numb",
        ),
        (["a", "b"], lambda i, *_: [0.5, "" if i == 2 else 1], {}, "t.csv, line 4: the column 'b' is empty"),
        (
            ["a", "b"],
            lambda i, *_: [0.5, "na" if i == 2 else 1],
            {"task": "regression"},
            "label 'b' is 'na', which is n",
        ),
        (
            ["a", "b"],
            lambda i, *_: [1, 2 if i == 2 else 1],
            {"task": "multilabel"},
            "label 'b' is '2', which is not 0 or",
        ),
        (["a", "b"], lambda *_: [0, 1], {"task": "classification"}, "one label for each sample, not 2 labels"),
        (["a", "b"], lambda *_: [0, 1], {"task": "next-token"}, "needs whole numbers x and y .* in an .npz file"),
        (["a,b"], lambda i, *_: [i % 3], {"task": "binary"}, "'binary' needs two labels, and there are 3: 0, 1, 2"),
        (["a,b"], lambda i, *_: [i % 3 if i else 0.5], {}, "label 0.5 is not a whole number .*--task regression"),
        (["a"], lambda *_: [0], {}, r"has no column 'b' \(it has"),
    ],
)
def test_labels_that_are_none(tmp_path, labels, answer, settings, sentence):
    path = table(tmp_path / "t.csv", labels, answer)
    with pytest.raises(Problem, match=sentence):
        load(own(path, label_column="a,b", **settings), 0)


# --- what stands for classes ----------------------------------------------------------------------------------------


def test_numbers_are_binned_by_quantiles():
    y = DRAW.normal(size=(1000, 1))
    bins = strata("regression", y, None, 10)
    assert bins is not None
    assert np.bincount(bins.of(y)).tolist() == [100] * 10
    assert len(bins.names) == 10
    order = np.argsort(y[:, 0])
    assert (np.diff(bins.of(y)[order]) >= 0).all()
    alike = strata("regression", np.repeat([[1.0], [2.0]], [900, 100], axis=0), ("y",), 10)
    assert alike is not None
    assert alike.names == ("..1.5", "1.5..")
    assert strata("classification", np.zeros(3), None, 10) is None


def test_bins_have_names_of_their_own_however_close_their_ends_are():
    y = np.arange(100_010, 100_910, 10)[:, None] * 1.0
    for numbers in (y, 1 + y * 1e-15):
        bins = strata("regression", numbers, None, 10)
        assert bins is not None
        assert len(bins.ends) > 2
        assert len(set(bins.names)) == len(bins.names) == len(bins.ends) + 1


def test_samples_go_by_their_rarest_label():
    y = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], dtype=np.float32)
    told = strata("multilabel", y, ("a", "b", "c"), 10)
    assert told is not None
    assert [told.names[s] for s in told.of(y)] == ["b", "a", "c", "none", "b"]


def test_a_pathological_partition_of_numbers():
    config = DataConfig(name="diabetes", partition="classes", clients=10, classes_per_client=2, bins=5)
    clients = load(config, 0)
    held = stratum_counts(clients, "train") > 0
    assert held.shape == (10, 5)
    assert (held.sum(axis=1) == 2).all()
    assert clients.partition is not None
    assert clients.partition["measures"]["emd"] > 1
    even = load(dataclasses.replace(config, partition="iid"), 0)
    assert even.partition is not None
    assert even.partition["measures"]["emd"] < 0.7


def test_splits_are_stratified_by_bins():
    clients = load(DataConfig(name="diabetes", partition="iid", clients=2, val=0.25), 0)
    parts = [stratum_counts(clients, s) for s in ("train", "val", "test")]
    for part in parts[1:]:
        assert np.abs(part - parts[0] / 2).max() <= 1.5
    mixed = load(DataConfig(name="diabetes", partition="iid", clients=2, val=0.25, stratify=False), 0)
    assert np.abs(stratum_counts(mixed, "test") - stratum_counts(mixed, "train") / 2).max() > 2


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(Problem, match=r"data\.relabel renames classes, and the task of 'diabetes' is regression"):
        load(DataConfig(name="diabetes", relabel=0.5), 0)
    tokens = Pool(np.zeros((9, 2), dtype=np.int64), np.zeros((9, 2), dtype=np.int64), 3, task="next_token")
    tokens = checked(tokens, "talk")
    from perfed.data.partition import partition

    with pytest.raises(Problem, match="'dirichlet' deals samples by their labels, and nothing tells those of 'digits'"):
        partition(tokens, DataConfig(clients=2), 0)
    assert len(partition(tokens, DataConfig(clients=2, partition="iid"), 0)) == 2
    x = DRAW.integers(0, 5, size=(30, 6))
    np.savez(tmp_path / "a.npz", x=x, y=x)
    for settings, sentence in (
        ({"noise": 1.0}, "samples of 'folder' are tokens"),
        ({"normalise": "local"}, "tokens of"),
    ):
        with pytest.raises(Problem, match=sentence):
            load(own(tmp_path, task="next-token", **settings), 0)
    clients = load(own(tmp_path, task="next-token", normalise="federated"), 0)  # as early run folders have it
    assert "data.normalise = federated leaves tokens as they are" in clients.notices


@pytest.mark.parametrize(
    ("y", "task", "sentence"),
    [
        (np.zeros((3, 1), np.float32), "regression", "y must be float64 for the task 'regression'"),
        (np.array([[0], [np.nan], [0]]), "regression", "row 1 has nan in label 0, which is not a finite number"),
        (np.full((3, 1), 2, np.float32), "binary", "row 0 has 2.0 in label 0, which is not 0 or 1"),
        (np.zeros((3, 2), np.float32), "multilabel", r"y has the shape \(3, 2\), not \[rows, 1\]"),
        (np.zeros(3), "regression", r"y has the shape \(3,\), not \[rows, 1\]"),
    ],
)
def test_a_source_is_checked(y, task, sentence):
    with pytest.raises(Problem, match=sentence):
        checked(Pool(np.zeros((3, 2), np.float32), y, 1, task=task), "mine")


def test_the_report_shows_bins():
    data = DataConfig(name="diabetes", clients=5, bins=4)
    clients = load(data, 0)
    assert report.heading(clients, data).endswith("by 4 bins of 'progression'")
    header, rows = report.lines(clients)
    assert header[4:6] == ("bins", "training bins")
    assert len(rows) == 5
    assert report.summary(clients)[0].startswith("bins     mean EMD")
    assert report.counts_csv(clients).startswith(f"client,part,{','.join(stratum_names(clients))}")
    assert set(report.pictures(clients, data)) == {"png", "svg"}
    assert report.label_table(clients)[0][0] == "samples by 4 bins of 'progression'"
