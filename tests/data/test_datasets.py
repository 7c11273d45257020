"""Where data come from, and how each client's samples are split."""

from __future__ import annotations

import dataclasses
import io
import pickle
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from real_data import real

from perfed.core.errors import Problem
from perfed.data import catalog, load, npz, sources
from perfed.data.catalog import datasets
from perfed.data.config import DataConfig
from perfed.data.pool import TEST, TRAIN, VAL, Pool, checked, data_dir
from perfed.data.sources.mnist_usps import resized
from perfed.data.split import divide
from perfed.report.partition import heading
from perfed.training.config import from_dict


def rows(split, i):
    """Client i's part of a table."""
    return slice(split.start[i], split.start[i] + split.size[i])


def same(a, b):
    return a.names == b.names and all(
        torch.equal(a.split(s).x, b.split(s).x) and torch.equal(a.split(s).y, b.split(s).y)
        for s in ("train", "val", "test")
    )


# --- splits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 30))
def test_split_sizes(n):
    y = np.random.default_rng(n).integers(0, 3, n)
    part = divide(y, None, 0.25, 0.1, np.random.default_rng(0))
    train, val, test = (int((part == code).sum()) for code in (TRAIN, VAL, TEST))
    assert train >= 1
    assert test >= (n >= 3)
    assert abs(test - n * 0.25) <= 1
    assert abs(val - n * 0.1) <= 1


def test_split_is_stratified():
    y = np.repeat([0, 1, 2], [40, 100, 12])
    for seed in range(5):
        part = divide(np.random.default_rng(seed).permutation(y), None, 0.25, 0.1, np.random.default_rng(seed))
        y_ = np.random.default_rng(seed).permutation(y)
        tests, vals = (np.bincount(y_[part == code], minlength=3) for code in (TEST, VAL))
        assert abs(tests - np.array([10, 25, 3])).max() <= 1
        assert abs(vals - np.array([4, 10, 1.2])).max() <= 1.2


def test_split_keeps_units_whole():
    unit = np.repeat(np.arange(20), np.arange(1, 21))
    part = divide(unit % 4, unit, 0.25, 0.1, np.random.default_rng(0))
    assert all(len(np.unique(part[unit == u])) == 1 for u in range(20))
    assert {TRAIN, VAL, TEST} == set(part.tolist())
    assert (divide(np.zeros(9), np.zeros(9), 0.25, 0.1, np.random.default_rng(0)) == TRAIN).all()


def test_large_shares_leave_a_training_sample():
    assert (divide(np.zeros(3), None, 0.6, 0.39, np.random.default_rng(0)) == TRAIN).sum() == 1
    with pytest.raises(Problem, match=r"data.test \+ data.val must be below 1"):
        load(DataConfig(test=0.6, val=0.5), 0)


def test_split_at_random_does_not_look_at_classes():
    y = np.repeat([0, 1], 200)
    part = divide(y, None, 0.25, 0.1, np.random.default_rng(0), stratify=False)
    counts = [int((part == code).sum()) for code in (TRAIN, VAL, TEST)]
    assert counts == [260, 40, 100]
    tests = [(divide(y, None, 0.25, 0, np.random.default_rng(s), False)[:200] == TEST).sum() for s in range(40)]
    assert np.std(tests) == pytest.approx(4.3, abs=1.5)  # hypergeometric: sqrt(100 / 4 * 300 / 399)
    assert not same(load(DataConfig(), 0), load(DataConfig(stratify=False), 0))


# --- sources --------------------------------------------------------------------------------------------------------


def test_lists_need_no_torch():
    code = "import sys\nfrom perfed import data, models\nfrom perfed.data.catalog import datasets, partitions\n"
    code += "datasets(), partitions(), models.networks(), data.check(data.DataConfig())\n"
    code += "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name():
    with pytest.raises(Problem, match="there is no data set 'digit'; did you mean 'digits'"):
        load(DataConfig(name="digit"), 0)
    with pytest.raises(Problem, match="there is no partition 'idd'; did you mean 'iid'"):
        load(DataConfig(partition="idd"), 0)
    assert all("\n" not in line for line in datasets().values())


LINE = '''"""Line: two groups of points on a line."""

import numpy as np

from perfed.data.pool import Pool

ONLY_PARTITION = "natural"


def load(config, seed):
    x = np.random.default_rng(seed).normal(size=(40, 1)).astype(np.float32)
    return Pool(x, (x[:, 0] > 0).astype(np.int64), classes=2, owner=np.arange(40) % 4)
'''


def test_a_data_set_is_one_file(monkeypatch, tmp_path):
    (tmp_path / "line.py").write_text(LINE)
    monkeypatch.setattr(catalog, "SOURCES", tmp_path)
    monkeypatch.setattr(sources, "__path__", [str(tmp_path)])
    assert datasets() == {"line": "two groups of points on a line"}
    clients = load(DataConfig(name="line"), 0)
    assert (len(clients), clients.shape, clients.classes) == (4, (1,), 2)
    with pytest.raises(Problem, match="data set 'line' has clients of its own"):
        load(DataConfig(name="line", partition="iid"), 0)


GOOD_X, GOOD_Y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
HOLES = np.array([[0, 0], [0, 0], [0, np.nan], [0, 0]], np.float32)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (dict(x=GOOD_X[:0], y=GOOD_Y[:0]), r"data set 'mine' has no samples"),
        (dict(y=GOOD_Y[:3]), r"y must have one number for each of the 4 rows of x, not \(3,\)"),
        (dict(y=GOOD_Y + 1), r"row 1 \(client 'b'\) has the label 2, but 2 classes are numbered from 0 to 1"),
        (dict(y=GOOD_Y - 1), r"row 0 \(client 'a'\) has the label -1, but 2 classes"),
        (dict(y=GOOD_Y.astype(np.int32)), r"y must be int64, not int32"),
        (dict(x=HOLES), r"row 2 \(client 'a'\) has nan in feature 1, which is not a finite number"),
        (dict(x=HOLES, columns=("age", "crp")), r"row 2 \(client 'a'\) has nan in column 'crp'"),
        (dict(x=GOOD_X, columns=("age",)), r"1 names of columns do not name 2 features"),
        (dict(x=GOOD_X.astype(np.float64)), r"x must be float32, or uint8 images .*, not float64 of shape \(4, 2\)"),
        (dict(x=GOOD_X.astype(np.uint8)), r"x must be float32, or uint8 images .*, not uint8 of shape \(4, 2\)"),
        (dict(x=GOOD_X[:, 0]), r"x must have the shape \[rows, ...\]"),
        (dict(owner=np.array([0, 1, 2, 0])), r"owner goes up to 2, but there are 2 names"),
        (dict(owner=np.array([0.0, 1, 1, 0])), r"owner must hold whole numbers from 0"),
        (dict(labels=("no",)), r"1 names of labels do not name 2 classes"),
    ],
)
def test_what_a_source_gives_is_looked_at(wrong, sentence):
    good = dict(x=GOOD_X, y=GOOD_Y, classes=2, owner=np.array([0, 1, 0, 1]), names=("a", "b"))
    assert checked(Pool(**good), "mine").classes == 2
    with pytest.raises(Problem, match=sentence) as caught:
        checked(Pool(**{**good, **wrong}), "mine")
    assert str(caught.value).startswith("data set 'mine'")


def test_digits():
    clients = load(DataConfig(), 0)
    assert clients.shape == (1, 8, 8)
    assert clients.train.x.dtype == torch.float32
    assert clients.train.y.dtype == torch.int64
    assert float(clients.train.x.max()) == 1
    assert clients.names == tuple(f"client_{i:02d}" for i in range(20))
    assert sum(len(clients.split(s).y) for s in ("train", "val", "test")) == 1797
    assert all(sum(clients.split(s).size) == len(clients.split(s).y) for s in ("train", "val", "test"))
    everything = torch.cat([clients.split(s).x for s in ("train", "val", "test")]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797
    assert same(clients, load(DataConfig(), 0))
    assert not same(clients, load(DataConfig(), 1))


def test_names_of_many_clients():
    assert load(DataConfig(partition="iid", clients=101), 0).names[7] == "client_007"


def test_each_client_is_tested_on_its_own_classes():
    clients = load(DataConfig(partition="classes"), 0)
    for i in range(len(clients)):
        labels = [set(s.y[rows(s, i)].tolist()) for s in (clients.train, clients.test)]
        assert labels[0] == labels[1]
        assert len(labels[0]) == 2
    assert len(set(clients.train.size)) == 1


def test_synthetic():
    config = DataConfig(name="synthetic", clients=12)
    clients = load(config, 0)
    sizes = np.add(np.add(clients.train.size, clients.val.size), clients.test.size)
    assert len(clients) == 12
    assert clients.shape == (60,)
    assert clients.classes == 10
    assert (sizes % 5 == 0).all()
    assert sizes.min() >= 250
    assert sizes.max() <= 10_000
    assert same(clients, load(config, 0))
    deviation = clients.train.x[rows(clients.train, 0)].std(dim=0)
    assert torch.allclose(deviation, torch.arange(1, 61) ** -0.6, rtol=0.35)
    with pytest.raises(Problem, match=r"data.clients must be at least 1 for 'synthetic'"):
        load(DataConfig(name="synthetic", clients=0), 0)
    with pytest.raises(Problem, match="'synthetic' has clients of its own"):
        load(DataConfig(name="synthetic", partition="iid"), 0)


def test_synthetic_without_difference_has_one_centre():
    spread = lambda b: np.std([rows_.mean() for rows_ in _inputs(b)])
    assert spread(0.0) < spread(3.0) / 3


def _inputs(b):
    clients = load(DataConfig(name="synthetic", synthetic_b=b), 0)
    return [clients.train.x[rows(clients.train, i)].numpy() for i in range(len(clients))]


def test_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    assert data_dir(DataConfig()) == tmp_path
    (tmp_path / "own").mkdir()
    assert data_dir(DataConfig(dir=str(tmp_path / "own"))) == tmp_path / "own"
    monkeypatch.delenv("PERFED_DATA")
    assert data_dir(DataConfig()) == Path.home() / ".cache" / "perfed"
    with pytest.raises(Problem, match=r"data.dir: there is no folder 'nowhere'"):
        load(DataConfig(name="mnist", dir="nowhere"), 0)


# --- images ---------------------------------------------------------------------------------------------------------


def plain_images(path, n=60, colour=False, **more):
    rng = np.random.default_rng(0)
    make = lambda k: rng.integers(0, 256, (k, 8, 8, 3) if colour else (k, 8, 8), dtype=np.uint8)
    arrays = dict(x_train=make(n), y_train=np.arange(n) % 10, x_test=make(20), y_test=np.arange(20) % 10)
    np.savez(path, **(arrays | more))
    return arrays


def test_plain_images(tmp_path):
    arrays = plain_images(tmp_path / "cifar10.npz", colour=True)
    clients = load(DataConfig(name="cifar10", dir=str(tmp_path), partition="iid", clients=4), 0)
    assert clients.shape == (3, 8, 8)
    assert clients.train.x.dtype == torch.uint8
    assert clients.mean is not None
    assert clients.std is not None
    assert clients.mean.shape == (3, 1, 1)
    pixels = arrays["x_train"] / 255
    assert np.allclose(clients.mean.flatten(), pixels.mean((0, 1, 2)))
    assert np.allclose(clients.std.flatten(), pixels.std((0, 1, 2)))
    assert sum(len(clients.split(s).y) for s in ("train", "val", "test")) == 80
    picture = clients.train.x[0].permute(1, 2, 0).numpy()
    assert any((picture == x).all() for x in np.concatenate([arrays["x_train"], arrays["x_test"]]))


def test_official_test_set_is_kept(tmp_path):
    arrays = plain_images(tmp_path / "mnist.npz", n=300)
    config = DataConfig(name="mnist", dir=str(tmp_path), partition="iid", clients=4, split="official", val=0.2)
    clients = load(config, 0)
    pictures = lambda x: {picture.tobytes() for picture in np.asarray(x)}
    assert pictures(clients.test.x) == pictures(arrays["x_test"])
    assert pictures(clients.train.x) | pictures(clients.val.x) == pictures(arrays["x_train"])
    assert clients.val.size == (15,) * 4
    assert torch.bincount(clients.val.y).tolist() == [6] * 10
    assert load(DataConfig(**(vars(config) | {"test": 0.9, "val": 0.5})), 0).test.size == (5,) * 4  # test plays no part


def test_normalisation_of_images(tmp_path):
    plain_images(tmp_path / "cifar10.npz", colour=True)
    made = lambda normalise: load(DataConfig(name="cifar10", dir=str(tmp_path), clients=2, normalise=normalise), 0)
    half, none = made("half"), made("none")
    assert half.mean is not None
    assert half.std is not None
    assert half.mean.flatten().tolist() == half.std.flatten().tolist() == [0.5] * 3
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(3).view(2, 3, 1, 1)
    assert half.ready(black_and_white, torch.float32).flatten().tolist() == [-1] * 3 + [1] * 3
    assert none.mean is None
    assert none.std is None


def test_writers_can_be_clients(tmp_path):
    writers = dict(writer_train=np.repeat([30, 7, 12], 20), writer_test=np.repeat([5, 99], 10))
    plain_images(tmp_path / "mnist.npz", **writers)
    config = DataConfig(name="mnist", dir=str(tmp_path), partition="natural", clients=0)
    assert load(config, 0).names == ("writer_0005", "writer_0007", "writer_0012", "writer_0030", "writer_0099")
    assert load(DataConfig(name="mnist", dir=str(tmp_path), clients=3), 0).names[0] == "client_00"
    plain_images(tmp_path / "mnist.npz")
    with pytest.raises(Problem, match="does not say who its samples come from"):
        load(config, 0)


def test_two_sources_of_digits_are_domains(tmp_path):
    """Images of the second are enlarged; names, files and the picture of the partition say who is whose."""
    first, second = plain_images(tmp_path / "mnist.npz", n=200), plain_images(tmp_path / "usps.npz", n=100)
    small = second["x_train"][:, ::2, ::2]  # 4x4
    np.savez(tmp_path / "usps.npz", **(second | {"x_train": small, "x_test": second["x_test"][:, ::2, ::2]}))
    config = DataConfig(name="mnist-usps", dir=str(tmp_path), clients=5, min_samples=5)
    clients = load(config, 0)
    assert clients.names == ("mnist_00", "mnist_01", "mnist_02", "usps_03", "usps_04")
    assert clients.partition["domains"] == ["mnist"] * 3 + ["usps"] * 2
    assert clients.shape == (1, 8, 8)
    sizes = np.sum([clients.split(s).size for s in ("train", "val", "test")], axis=0)
    assert (sizes[:3].sum(), sizes[3:].sum()) == (220, 120)
    known = {picture.tobytes() for picture in np.concatenate([first["x_train"], first["x_test"]])}
    theirs = np.repeat(np.array([True] * 3 + [False] * 2), clients.train.size)
    assert [picture.tobytes() in known for picture in clients.train.x[:, 0].numpy()] == theirs.tolist()
    expected = np.array([[0, 25, 75, 100]], dtype=np.uint8)  # bilinear, with the pixels' centres
    assert resized(np.array([[[[0, 100], [0, 100]]]], dtype=np.uint8), 4)[0, 0, 0].tolist() == expected[0].tolist()
    kept = load(dataclasses.replace(config, split="official", partition="domains"), 0)
    assert sum(kept.test.size) == 40
    plain = load(dataclasses.replace(config, partition="dirichlet"), 0)
    assert plain.names[0] == "client_00"
    assert "domains" not in plain.partition
    (tmp_path / "usps.npz").unlink()
    with pytest.raises(Problem, match=r"usps.npz does not exist"):
        load(config, 0)


def test_damaged_images(tmp_path):
    config = DataConfig(name="mnist", dir=str(tmp_path), clients=2)
    file = tmp_path / "mnist.npz"
    for more, sentence in (
        ({"x_train": np.zeros((60, 8, 8))}, "not uint8 images"),
        ({"y_train": np.full(60, 10)}, "one label from 0 to 9 for each of its 80 images"),
        ({"y_test": np.zeros(3, dtype=int)}, "one label from 0 to 9 for each of its 80 images"),
    ):
        plain_images(file, **more)
        with pytest.raises(Problem, match=sentence):
            load(config, 0)
    np.savez(file, x_train=np.zeros(3))
    with pytest.raises(Problem, match=r"mnist.npz has no array 'y_train' \(it has: x_train\)"):
        load(config, 0)


def strip(path, labels, colour):
    image = pytest.importorskip("PIL.Image")
    import io

    x = np.full((len(labels) * 32, 32, 3), colour, dtype=np.uint8)
    buffer = io.BytesIO()
    image.fromarray(x).save(buffer, "WEBP", lossless=True)
    data = np.frombuffer(buffer.getvalue(), np.uint8)
    key = "fine" if "cifar100" in path.name else "labels"
    np.savez(path, webp=data, offsets=np.array([0, len(data)]), **{key: np.asarray(labels)})


def test_strips(tmp_path):
    strip(tmp_path / "cifar100_train_6bit.npz", np.arange(30), 63)
    config = DataConfig(name="cifar100", dir=str(tmp_path), partition="iid", clients=4)
    with pytest.raises(Problem, match=r"cifar100_test_6bit.npz does not exist, though other parts"):
        load(config, 0)
    strip(tmp_path / "cifar100_test_6bit.npz", np.arange(10), 0)
    clients = load(config, 0)
    assert clients.classes == 100
    assert clients.shape == (3, 32, 32)
    assert set(clients.train.x.unique().tolist()) == {0, 255}
    assert heading(clients, config) == "cifar100, 4 clients, iid, pixels rounded to 6 bits"
    np.savez(tmp_path / "cifar100_test_6bit.npz", webp=np.zeros(9, np.uint8), offsets=[0, 9], fine=np.arange(10))
    with pytest.raises(Problem, match="holds a strip of images that cannot be read"):
        load(config, 0)


def test_strips_and_labels_must_agree(tmp_path):
    strip(tmp_path / "cifar100_train_6bit.npz", np.arange(3), 63)
    strip(tmp_path / "cifar100_test_6bit.npz", np.arange(3), 63)
    with np.load(tmp_path / "cifar100_test_6bit.npz") as arrays:
        changed = dict(arrays) | {"fine": np.arange(5)}
    np.savez(tmp_path / "cifar100_test_6bit.npz", **changed)
    with pytest.raises(Problem, match="holds 3 images for 5 labels"):
        load(DataConfig(name="cifar100", dir=str(tmp_path)), 0)


# --- fetching -------------------------------------------------------------------------------------------------------


def hub(load_dataset):
    module = types.ModuleType("datasets")
    module.__dict__["load_dataset"] = load_dataset
    return module


def test_fetch_once_and_keep(monkeypatch, tmp_path):
    asked = []

    def load_dataset(repository):
        asked.append(repository)
        part = lambda n: {"img": [np.full((32, 32, 3), i, np.uint8) for i in range(n)], "fine_label": list(range(n))}
        return {"train": part(40), "test": part(10)}

    monkeypatch.setitem(sys.modules, "datasets", hub(load_dataset))
    config = DataConfig(name="cifar100", dir=str(tmp_path), partition="iid", clients=2)
    assert same(load(config, 0), load(config, 0))
    assert asked == ["uoft-cs/cifar100"]
    assert [file.name for file in tmp_path.iterdir()] == ["cifar100.npz"]


def test_fetch_problems(monkeypatch, tmp_path):
    config = DataConfig(name="mnist", dir=str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Problem, match=r"mnist.npz does not exist; to fetch it: pip install 'perfed\[data\]'"):
        load(config, 0)

    def offline(repository):
        raise ConnectionError("no network\nand more lines")

    monkeypatch.setitem(sys.modules, "datasets", hub(offline))
    with pytest.raises(Problem, match=r"'ylecun/mnist' could not be fetched .*: no network$"):
        load(config, 0)
    assert not list(tmp_path.iterdir())


def test_har_without_file(tmp_path):
    with pytest.raises(Problem, match=r"uci_har.npz does not exist; .* UCI repository"):
        load(DataConfig(name="har", dir=str(tmp_path)), 0)


# --- the user's own folder ------------------------------------------------------------------------------------------


def own(folder, normalise="none", **settings):
    return load(DataConfig(name="folder", dir=str(folder), normalise=normalise, **settings), 0)


def two(n=20, d=3, seed=0):
    rng = np.random.default_rng(seed)
    return dict(x=rng.normal(size=(n, d)), y=np.arange(n) % 2)


def test_ready_splits_are_used_exactly(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for client, sizes in {"b": (5, 2, 3), "a": (4, 0, 1), "c": (1, 3, 0)}.items():
        x = [rng.normal(size=(n, 2, 3)).astype(np.float32) for n in sizes]
        y = [rng.integers(0, 4, n) for n in sizes]
        arrays[client] = dict(x_train=x[0], x_val=x[1], x_test=x[2], y_train=y[0], y_val=y[1], y_test=y[2])
        saved = {key: value for key, value in arrays[client].items() if client != "a" or "val" not in key}
        np.savez(tmp_path / f"{client}.npz", **saved)
    clients = own(tmp_path, clients=1)  # all files count, whatever data.clients is
    assert clients.names == ("a", "b", "c")
    assert clients.val.size == (0, 2, 3)
    for i, client in enumerate("abc"):
        for name in ("train", "val", "test"):
            split = clients.split(name)
            assert np.array_equal(split.x[rows(split, i)].numpy(), arrays[client][f"x_{name}"])
            assert np.array_equal(split.y[rows(split, i)].numpy(), arrays[client][f"y_{name}"])


def test_files_to_be_split_beside_ready_ones(tmp_path):
    np.savez(tmp_path / "a.npz", **two())
    np.savez(tmp_path / "b.npz", x_train=np.ones((2, 3)), y_train=[1, 1], x_test=np.zeros((1, 3)), y_test=[4])
    clients = own(tmp_path)
    assert clients.train.size == (13, 2)
    assert clients.test.size == (5, 1)
    assert clients.labels == ("0", "1", "4")


def test_bytes_stay_only_where_they_are_images(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.full((6, 1, 4, 4), 255, np.uint8), y=np.arange(6) % 2)
    assert own(tmp_path).train.x.dtype == torch.uint8
    np.savez(tmp_path / "b.npz", x=np.ones((6, 1, 4, 4)), y=np.arange(6) % 2)
    with pytest.raises(Problem, match=r"client 'b' \(b.npz\) has float64 samples .* but client 'a' has uint8 samples"):
        own(tmp_path)
    (tmp_path / "b.npz").unlink()
    np.savez(tmp_path / "a.npz", x=np.full((6, 4), 200, np.uint8), y=np.arange(6) % 2)
    assert float(own(tmp_path).train.x.max()) == 200.0


def test_one_csv_per_client(tmp_path):
    (tmp_path / "b.csv").write_text(
        "u,label,v\n" + "".join(f"{i},{'cat' if i % 2 else 'dog'},{-i}\n" for i in range(9))
    )
    (tmp_path / "a.csv").write_text("\ufefflabel,v,u\nemu,5,6\n\ncat,7,8\nemu,9,10\n", encoding="utf-8")
    clients = own(tmp_path)
    assert clients.names == ("a", "b")
    assert clients.classes == 3
    table = torch.cat([clients.split(s).x[rows(clients.split(s), 0)] for s in ("train", "val", "test")])
    assert sorted(table.tolist()) == [[5, 6], [7, 8], [9, 10]]  # columns in the order of the first file: v, u
    labels = torch.cat([clients.split(s).y[rows(clients.split(s), 1)] for s in ("train", "val", "test")])
    assert torch.bincount(labels).tolist() == [4, 5]  # cat, dog; client b holds no emu


@pytest.mark.parametrize("as_file", [True, False])
def test_one_table(tmp_path, as_file):
    lines = [f"{i % 3},{'xyz'[i % 3]} ,{i}.5" for i in range(30)]
    (tmp_path / "all.csv").write_text("kind,who,u\n" + "\n".join(lines))
    settings = dict(client_column="who", label_column="kind")
    clients = own(tmp_path / "all.csv" if as_file else tmp_path, **settings)
    assert clients.names == ("x", "y", "z")
    assert clients.shape == (1,)
    assert clients.classes == 3
    for name in ("train", "val", "test"):
        split = clients.split(name)
        for i in range(3):
            assert (split.y[rows(split, i)] == i).all()
            assert ((split.x[rows(split, i)] - 0.5) % 3 == i).all()


def test_names_are_only_labels(tmp_path):
    names = ["../../x", "/etc/x", "n" * 300, "CON", "é", "A", "a"]
    (tmp_path / "t.csv").write_text(
        "client,label,u\n" + "".join(f"{n},0,1\n{n},1,2\n" for n in names), encoding="utf-8"
    )
    assert sorted(own(tmp_path).names) == sorted(names)
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("form", ["pickle as npz", "object array", "pickle beside", "only objects in y"])
def test_pickles_are_never_opened(tmp_path, form):
    canary, folder = tmp_path / "canary", tmp_path / "data"
    folder.mkdir()
    bomb = np.array([Canary(canary)] * 4, dtype=object)
    if form == "pickle as npz":
        (folder / "a.npz").write_bytes(pickle.dumps(Canary(canary)))
    elif form == "object array":
        np.savez(folder / "a.npz", x=bomb, y=np.zeros(4))
    elif form == "pickle beside":
        np.savez(folder / "a.npz", **two())
        (folder / "b.pkl").write_bytes(pickle.dumps(Canary(canary)))
    else:
        np.savez(folder / "a.npz", x=np.zeros((4, 2)), y=bomb)
    with pytest.raises(Problem, match=r"never opened|can run code") as caught:
        own(folder)
    assert "allow_pickle" not in str(caught.value)
    assert not canary.exists()


def bomb(path, count, shape=None):
    """A small archive of `count` zeros, whose header may declare another shape."""
    header = io.BytesIO()
    about = {"descr": "<f8", "fortran_order": False, "shape": shape or (count, 1)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        member.write(header.getvalue())
        for _ in range(count // 1_000_000):
            member.write(bytes(8_000_000))


def test_a_small_file_that_holds_very_much_is_not_read(tmp_path, monkeypatch):
    """Neither one that does, nor one that says it does: the header is enough to know."""
    path = tmp_path / "a.npz"
    monkeypatch.setattr(npz, "USUAL_LIMIT", 7_000_000)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("it was read"))
    bomb(path, 1_000_000)
    with pytest.raises(Problem, match=r"a.npz of 0.0 MB declares 0.0 GB of arrays, and at most .* set PERFED_NPZ_GB"):
        npz.read_npz(path)
    for shape in ((10**9, 10**9), (-1, 5), (2_000_000, 1)):
        bomb(path, 1_000_000, shape)
        with pytest.raises(Problem, match=r"cannot be read as .npz .*damaged"):
            npz.read_npz(path)
    monkeypatch.undo()
    bomb(path, 1_000_000)
    assert npz.read_npz(path)["x"].shape == (1_000_000, 1)
    monkeypatch.setenv(npz.LIMIT, "0.007")
    with pytest.raises(Problem, match="set PERFED_NPZ_GB to more"):
        npz.read_npz(path)
    monkeypatch.setenv(npz.LIMIT, "much")
    with pytest.raises(Problem, match="PERFED_NPZ_GB must be a number of gigabytes, not 'much'"):
        npz.read_npz(path)


X, Y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
INF = np.array([[0, 0], [0, 0], [0, np.inf], [0, 0]])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (dict(x=X), r"b.npz has no array 'y' \(it has: x\)"),
        (dict(), r"b.npz has no array 'x' \(it has: nothing\)"),
        (dict(x_train=X, y_train=Y), r"b.npz has no array 'x_test'"),
        (dict(x_train=X, y_train=Y, x_test=X, y_test=Y, x_val=X), r"b.npz has no array 'y_val'"),
        (dict(x_train=X, y_train=Y, x_test=X, y_test=Y, x=X), r"b.npz has both x and x_train"),
        (dict(x=X, y=Y[:3]), r"client 'b' \(b.npz\): x has shape \(4, 2\) and y has shape \(3,\)"),
        (dict(x=X, y=Y[:, None]), r"client 'b' \(b.npz\): x has shape \(4, 2\) and y has shape \(4, 1\)"),
        (dict(x=Y, y=Y), r"client 'b' \(b.npz\): x must be numbers \[n, ...\], not int64 of shape \(4,\)"),
        (dict(x=X.astype(str), y=Y), r"client 'b' \(b.npz\): x must be numbers"),
        (dict(x=X, y=Y * 1j), r"client 'b' \(b.npz\): labels must be whole numbers or text, not complex128"),
        (dict(x=INF, y=Y), r"client 'b', row 2 of x in b.npz: a feature is not a finite number"),
        (dict(x=X + 1e300, y=Y), r"client 'b', row 0 of x in b.npz: a feature is not a finite number"),
        (
            dict(x_train=X, y_train=Y, x_test=INF, y_test=Y),
            r"client 'b', row 2 of x_test in b.npz: a feature is not a finite number",
        ),
        (dict(x=X, y=[0, 1, -1, 0]), r"client 'b', row 2 of y in b.npz: the label -1 is not a whole number from 0"),
        (dict(x=X, y=[0, 0.5, 1, 0]), r"client 'b', row 1 of y in b.npz: the label 0.5 is not a whole number"),
        (dict(x=X, y=[0, 1, 2, 10_000]), r"row 3 of y in b.npz: the label 10000 is not a whole number from 0 to 9999"),
        (dict(x=X, y=[np.nan, 1, 2, 1]), r"row 0 of y in b.npz: the label nan is not a whole number"),
        (
            dict(x_train=X, y_train=Y, x_test=X, y_test=-Y),
            r"client 'b', row 1 of y_test in b.npz: the label -1 is not",
        ),
        (dict(x=X[:, :1], y=Y), r"client 'b' \(b.npz\) has float64 samples of shape \(1,\), but client 'a' has"),
    ],
)
def test_wrong_npz(tmp_path, arrays, sentence):
    np.savez(tmp_path / "a.npz", **two(d=2))
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(Problem, match=sentence):
        own(tmp_path)


def test_damaged_npz(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **two(n=500))
    whole = (tmp_path / "a.npz").read_bytes()
    magic = b"PJ" + whole[2:]  # numpy itself takes such a file for a pickle
    for damaged in (whole[: len(whole) // 2], whole[:300] + b"\0" * 100 + whole[400:], b"", b"hello", magic, b"\0" * 9):
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(Problem, match=r"a.npz cannot be read as .npz .*damaged"):
            own(tmp_path)
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(Problem, match=r"a.npz cannot be read as .npz"):
        own(tmp_path)


GOOD = "label,u\n0,1\n1,2\n0,3\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("u\n1\n", r"b.csv has no column 'label' \(it has: u\)"),
        ("label,u,client\n0,1,x\n", r"b.csv has the column 'client' though each of the files here is one client"),
        ("label,v\n0,1\n", r"b.csv does not have the same columns as a.csv: u, v"),
        ("label,u,u\n0,1,2\n", r"b.csv has two columns named 'u'"),
        ("label,u\n0,1\n1,2,3\n", r"b.csv, line 3: 3 values for 2 columns"),
        ("label,u\n0,1\n,2\n", r"b.csv, line 3: the column 'label' is empty"),
        ("label,u\n0,1\n\n1,two\n", r"client 'b', line 4 in b.csv: 'two' in column 'u' is not a number"),
        (
            "label,u\n0,1\n1,12 mmHg\n",
            r"line 3 in b.csv: '12 mmHg' in column 'u' is not a number, though '1'",
        ),
        ("label,u\n0,1\n1,inf\n", r"client 'b', line 3 in b.csv: a feature is not a finite number"),
        ("label,u\n0,1\n-2,1\n", r"client 'b', line 3 in b.csv: the label -2 is not a whole number"),
        ("label,u\n0,1\n1.5,1\n", r"client 'b', line 3 in b.csv: the label 1.5 is not a whole number"),
        ("", r"b.csv is empty"),
        (b"label,u\n0,\xff\xfe\n", r"b.csv cannot be read as CSV text"),
    ],
)
def test_wrong_csv(tmp_path, text, sentence):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Problem, match=sentence):
        own(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD, r"t.csv has no column 'client' \(it has: label, u\)"),
        ("client,label\na,0\n", r"t.csv has no feature column beside client, label"),
        ("client,label,u\na,0,1\n,0,1\n", r"t.csv, line 3: the column 'client' is empty"),
        ("client,label,u\na,0,1\nb,0,inf\n", r"client 'b', line 3 in t.csv: a feature is not a finite number"),
    ],
)
def test_wrong_table(tmp_path, text, sentence):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(Problem, match=sentence):
        own(tmp_path)


def test_clients_without_training_samples(tmp_path):
    """Whoever has test samples alone is a client; a file without samples is none, and both are said."""
    np.savez(tmp_path / "a.npz", **two(d=2))
    np.savez(tmp_path / "b.npz", x_train=X[:0], y_train=Y[:0], x_test=X, y_test=Y)
    np.savez(tmp_path / "c.npz", x=X[:0], y=Y[:0])
    clients = own(tmp_path)
    assert clients.names == ("a", "b")
    assert (clients.train.size[1], clients.test.size[1]) == (0, 4)
    assert clients.notices == (
        "client 'c' has no samples: it is left out",
        "without training samples: 'b'; 1 of 2 clients do not train and predict with the server's model",
    )
    (tmp_path / "a.npz").unlink()
    with pytest.raises(Problem, match="no client has a training sample"):
        own(tmp_path)


def test_a_table_without_lines_is_no_client(tmp_path):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(",label,u\n")
    clients = own(tmp_path)
    assert clients.names == ("a",)
    assert "client 'b' has no samples: it is left out" in clients.notices
    (tmp_path / "b.csv").unlink()
    (tmp_path / "a.csv").write_text("client,label,u\n")
    with pytest.raises(Problem, match="no client has a training sample"):
        own(tmp_path / "a.csv")


def test_classes_that_training_samples_lack_are_counted(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X, y_test=[0, 2, 2, 1])
    np.savez(tmp_path / "b.npz", x_train=X, y_train=Y + 1, x_test=X, y_test=[1, 2, 2, 1])
    (notice,) = own(tmp_path).notices[-1:]
    text = "2 of 8 test samples are of classes that their client's training samples lack: 'a' (1 of 2 clients)"
    assert notice == text


# --- labels ---------------------------------------------------------------------------------------------------------


def labelled(folder, **clients):
    for name, labels in clients.items():
        (folder / f"{name}.csv").write_text("u,label\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    return folder


def classes_of(clients, i):
    """The names of the labels of client i."""
    y = torch.cat([clients.split(s).y[rows(clients.split(s), i)] for s in ("train", "val", "test")])
    return sorted(clients.labels[number] for number in y.tolist())


def test_classes_are_the_labels_that_occur(tmp_path):
    clients = own(labelled(tmp_path, a=["0", "900", "900.0"] * 3, b=["900", "0"] * 3))
    assert (clients.classes, clients.labels) == (2, ("0", "900"))
    assert classes_of(clients, 0) == ["0"] * 3 + ["900"] * 6
    np.savez((tmp_path / "n").mkdir() or tmp_path / "n" / "a.npz", x=X, y=[2.0, 10, 10, 2])
    assert own(tmp_path / "n").labels == ("2", "10")  # by value, not as text


def test_two_alphabets_are_refused_until_they_are_mapped(tmp_path):
    folder = labelled(tmp_path, a=["yes", "no"] * 4, b=["0", "1", "0", "0"] * 2)
    sentence = (
        r"client 'a' has the labels no, yes, client 'b' has 0, 1: no task has both; say what means what with --labels "
        r"'no=0,yes=1' \(or --labels '0=0,1=1,no=no,yes=yes' if they are different classes\)"
    )
    with pytest.raises(Problem, match=sentence):
        own(folder)
    clients = own(folder, labels="yes=1, no=0")
    assert clients.labels == ("0", "1")
    assert classes_of(clients, 0) == ["0"] * 4 + ["1"] * 4
    assert classes_of(clients, 1) == ["0"] * 6 + ["1"] * 2
    assert clients.notices == ()
    assert own(folder, labels="0=0,1=1,no=no,yes=yes").classes == 4


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        (dict(a=["Yes", "no"], b=["yes", "no"]), r"'Yes' \(client 'a'\) and 'yes' \(client 'b'\) are one word in two"),
        (dict(a=["grade 1", "no"], b=["Grade_1", "no"]), r"are one word in two spellings: rename one with --labels"),
        (dict(a=["yes", "no"], b=["true", "false"]), r"with --labels 'false=no,true=yes'"),
        (dict(a=["Positive", "Negative"], b=["pos", "neg"]), r"with --labels 'neg=Negative,pos=Positive'"),
        (
            dict(a=["tumour", "healthy"], b=["1", "2"]),
            r"client 'a' has the labels healthy, tumour, client 'b' has 1, 2",
        ),
    ],
)
def test_labels_that_cannot_be_of_one_task(tmp_path, clients, sentence):
    with pytest.raises(Problem, match=sentence):
        own(labelled(tmp_path, **{name: labels * 4 for name, labels in clients.items()}))


@pytest.mark.parametrize(
    ("clients", "notices"),
    [
        (dict(a=["cat", "dog"], b=["emu", "fox"]), 1),  # words of different classes
        (dict(a=["0", "1"], b=["2", "3"]), 1),
        (dict(a=["a", "A"], b=["A", "b"]), 1),  # letters, which a client tells apart
        (dict(a=["A", "A-"], b=["A", "A-"]), 0),
        (dict(a=["yes", "no"], b=["yes"]), 1),
        (dict(a=["0", "1", "unknown"], b=["0", "1"]), 1),
    ],
)
def test_labels_that_can_be_of_one_task(tmp_path, clients, notices):
    assert len(own(labelled(tmp_path, **{name: labels * 4 for name, labels in clients.items()})).notices) == notices


def test_a_label_of_a_single_client_is_said(tmp_path):
    clients = own(labelled(tmp_path, a=["cat", "dog"] * 4, b=["cat", "dgo", "dog"] * 4))
    assert clients.notices == (
        "a single client has the label 'dgo' (client 'b', 4 samples): nobody else can learn it, or it is spelled "
        "differently",
    )
    assert own(tmp_path, labels="dgo=dog").notices == ()
    assert own(tmp_path, labels="dgo=dog,fish=dog").notices == (
        "data.labels renames 'fish', but no client has this label (they have: cat, dgo, dog)",
    )


@pytest.mark.parametrize("text", ["yes", "yes=", "=1", "yes=1,", "yes=1,no"])
def test_wrong_labels_setting(tmp_path, text):
    with pytest.raises(Problem, match=r"data.labels takes old=new with commas between, as yes=1,no=0, not"):
        own(labelled(tmp_path, a=["yes", "no"] * 4), labels=text)
    with pytest.raises(Problem, match=r"data.labels is for files of your own \(data set 'folder'\), not for 'digits'"):
        load(DataConfig(labels="0=1"), 0)


# --- images and tables that others wrote ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_channels_last_are_moved(tmp_path, kind):
    x = np.random.default_rng(0).integers(0, 255, (9, 6, 6, 3)).astype(kind)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(9) % 2, x_test=x, y_test=np.arange(9) % 2)
    clients = own(tmp_path)
    assert clients.shape == (3, 6, 6)
    assert np.array_equal(clients.train.x.numpy(), x.transpose(0, 3, 1, 2))
    assert clients.notices == ("images [6, 6, 3] have their channels last: they are read as [3, 6, 6]",)


@pytest.mark.parametrize(
    ("shape", "read"),
    [
        ((3, 6, 6), (3, 6, 6)),
        ((3, 6, 8), (3, 6, 8)),
        ((6, 8, 3), (3, 6, 8)),
        ((6, 8, 1), (1, 6, 8)),
        ((1, 4, 4), (1, 4, 4)),  # both ends may be channels: images are square
        ((4, 4, 3), (3, 4, 4)),
        ((9, 6, 6), (9, 6, 6)),
        ((9, 6, 7), (9, 6, 7)),  # as the documentation says
        ((6, 6, 6), (6, 6, 6)),
        ((3, 6, 3), None),
        ((3, 3, 3), None),
        ((6, 6, 9), None),
    ],
)
def test_which_axis_has_the_channels(tmp_path, shape, read):
    np.savez(tmp_path / "a.npz", x=np.zeros((9, *shape), np.uint8), y=np.arange(9) % 2)
    if read is not None:
        clients = own(tmp_path)
        assert clients.shape == read
        assert len(clients.notices) == (read != shape)
        return
    a, b, c = shape
    sentence = rf"client 'a' \(a.npz\): .* may have {a} channels of {b}x{c}, or {c} channels of {a}x{b}: say it with"
    with pytest.raises(Problem, match=sentence):
        own(tmp_path)
    assert own(tmp_path, channels="first").shape == shape
    assert own(tmp_path, channels="last").shape == (c, a, b)


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_the_index_of_pandas_is_no_feature(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},u,label\n" + "".join(f"{i},{i / 2},{i % 2}\n" for i in range(9)))
    (tmp_path / "b.csv").write_text("u,label\n" + "".join(f"{i / 2},{i % 2}\n" for i in range(9)))
    clients = own(tmp_path)
    assert clients.columns == ("u",)
    shown = f"column '{name}'" if name else "column without a name"
    assert clients.notices == (f"the {shown} only counts the rows: it is no feature (a.csv)",)


def test_a_column_without_a_name_that_does_not_count_is_a_feature(tmp_path):
    (tmp_path / "a.csv").write_text(",u,label,client\n" + "".join(f"{9 - i},{i / 2},{i % 2},a\n" for i in range(9)))
    assert own(tmp_path).columns == ("", "u")


def test_wrong_folder(tmp_path):
    with pytest.raises(Problem, match=r"data set 'folder' needs --data-dir"):
        load(DataConfig(name="folder"), 0)
    with pytest.raises(Problem, match=r"data.dir: there is no folder '.*nowhere'"):
        own(tmp_path / "nowhere")
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / ".hidden.npz").write_text("not looked at")
    with pytest.raises(Problem, match=r"holds no .npz and no .csv file"):
        own(tmp_path)
    with pytest.raises(Problem, match=r"must be a folder or one .csv file, not '.*README.md'"):
        own(tmp_path / "README.md")
    np.savez(tmp_path / "a.npz", **two())
    with pytest.raises(Problem, match=r"has clients of its own: leave out data.partition 'dirichlet'"):
        own(tmp_path, partition="dirichlet")
    (tmp_path / "b.csv").write_text(GOOD)
    with pytest.raises(Problem, match=r"holds both .npz and .csv files"):
        own(tmp_path)


# --- real files -----------------------------------------------------------------------------------------------------


def test_real_har_segments_stand_on_one_side():
    folder = real("uci_har.npz")
    clients = load(DataConfig(name="har", dir=folder, clients=0), 0)
    assert clients.names[6] == "person_07"
    assert len(clients) == 30
    assert clients.shape == (9, 128)
    with np.load(Path(folder) / "uci_har.npz") as raw:
        x, segment = raw["x"], raw["segment"]
        scale = np.float32(raw["scale"][0])
    segment_of = {row.tobytes(): int(s) for row, s in zip(x, segment, strict=True)}
    sides = []
    for name in ("train", "val", "test"):
        back = np.rint(clients.split(name).x.numpy() * scale).astype(np.int16)
        sides.append({segment_of[row.tobytes()] for row in back})
        assert min(clients.split(name).size) > 0
    assert len(sides[0]) + len(sides[1]) + len(sides[2]) == len(sides[0] | sides[1] | sides[2])
    assert sum(len(clients.split(s).y) for s in ("train", "val", "test")) == 10299
    shares = np.array(clients.test.size) / np.add(np.add(clients.train.size, clients.val.size), clients.test.size)
    assert 0.15 < shares.min() <= shares.max() < 0.35


def test_real_digits_of_two_sources():
    clients = load(DataConfig(name="mnist-usps", dir=real("usps.npz"), clients=10, alpha=1.0), 0)
    sizes = np.sum([clients.split(s).size for s in ("train", "val", "test")], axis=0)
    assert (sizes[:5].sum(), sizes[5:].sum()) == (70_000, 9_298)
    assert clients.shape == (1, 28, 28)
    assert load(DataConfig(name="usps", dir=real("usps.npz")), 0).shape == (1, 16, 16)


def test_real_mnist_writers():
    config = DataConfig(name="mnist", dir=real("mnist.npz"), partition="natural", clients=0)
    clients = load(config, 0)
    assert len(clients) == 836
    assert clients.shape == (1, 28, 28)
    assert clients.mean is not None
    assert float(clients.mean) == pytest.approx(0.1307, abs=1e-4)
    assert min(clients.test.size) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "mean", "std", "within"),
    [
        (
            "cifar10",
            "cifar10_test.npz",
            (0.49139968, 0.48215841, 0.44653091),
            (0.24703223, 0.24348513, 0.26158784),
            1e-6,
        ),
        (
            "cifar100",
            "cifar100_test_6bit.npz",
            (0.50707516, 0.48654887, 0.44091784),
            (0.26733429, 0.25643846, 0.27615047),
            2e-3,  # its pixels are rounded
        ),
    ],
)
def test_real_cifar(name, file, mean, std, within):
    clients = load(DataConfig(name=name, dir=real(file), partition="iid"), 0)
    labels = torch.cat([clients.split(s).y for s in ("train", "val", "test")])
    assert (torch.bincount(labels) == 60_000 // clients.classes).all()
    assert clients.mean is not None
    assert clients.std is not None
    assert clients.mean.flatten().tolist() == pytest.approx(mean, abs=within)
    assert clients.std.flatten().tolist() == pytest.approx(std, abs=within)


@pytest.mark.slow
def test_real_cifar10_in_the_papers_partitions():
    folder = real("cifar10_test.npz")
    pairs = load(DataConfig(name="cifar10", dir=folder, partition="pairs", clients=10, split="official", val=0.2), 0)
    assert (set(pairs.train.size), set(pairs.val.size), set(pairs.test.size)) == ({4000}, {1000}, {1000})
    settings = dict(partition="dirichlet", clients=25, min_samples=40, test=0.25, val=0, stratify=False)
    pooled = load(DataConfig(name="cifar10", dir=folder, normalise="half", **settings), 1)
    sizes = np.add(pooled.train.size, pooled.test.size)
    assert sizes.sum() == 60_000
    assert 40 <= sizes.min() < 1200
    assert 3000 < sizes.max() < 7000
    assert np.abs(np.array(pooled.test.size) / sizes - 0.25).max() < 0.02


def test_names_may_have_underscores_for_dashes():
    assert DataConfig(name="fashion_mnist") == DataConfig(name="fashion-mnist")
    assert from_dict({"data": {"name": "mnist_usps"}}).data.name == "mnist-usps"
