"""Public samples: how many, whose, and that they are nobody's test samples."""

import dataclasses

import numpy as np
import pytest
import torch

from perfed.core.clients import SPLITS
from perfed.core.errors import Problem
from perfed.data import load
from perfed.data.catalog import public_folder
from perfed.data.config import DataConfig
from perfed.data.pool import TEST, Pool
from perfed.data.public import held_out


def pool(count=100, **more):
    y = np.arange(count) % 4
    return Pool(np.arange(count, dtype=np.float32)[:, None], y, 4, **more)


def chosen(samples, seed=0, **settings):
    return held_out(samples, DataConfig(normalise="none", **settings), seed)


def rows_of(split):
    return {row.numpy().tobytes() for row in split.x}


def test_a_share_or_a_number_of_samples_with_the_same_part_of_every_class():
    for public in (0.2, 20):
        rows = chosen(pool(), public=public)
        assert np.bincount(pool().y[rows]).tolist() == [5] * 4
        assert (np.diff(rows) > 0).all()
    assert chosen(pool(), public=0).tolist() == []
    assert (chosen(pool(), public=0.2) == chosen(pool(), public=0.2)).all()
    assert (chosen(pool(), public=0.2) != chosen(pool(), seed=1, public=0.2)).any()


def test_what_a_source_tests_on_stays_so():
    part = np.where(np.arange(100) < 60, -1, TEST)
    assert chosen(pool(part=part), public=0.5).max() < 60
    assert len(chosen(pool(part=part), public=0.5)) == 30


def test_rows_of_one_unit_stay_together():
    unit = np.arange(100) // 5
    rows = chosen(pool(unit=unit), public=0.3)
    assert len(rows) == 30
    assert np.bincount(unit[rows])[np.bincount(unit[rows]) > 0].tolist() == [5] * 6


def test_every_owner_gives_its_share_and_nobody_all():
    owner = np.repeat([0, 1, 2, 3], [60, 38, 1, 1])
    rows = chosen(pool(owner=owner), public=0.5, partition="natural")
    assert np.bincount(owner[rows], minlength=4)[:2].tolist() == [30, 19]
    rows = chosen(pool(owner=owner), public=99, partition="natural")
    assert set(owner) == set(np.delete(owner, rows))


def test_public_samples_are_no_clients():
    for settings in ({}, {"partition": "iid", "clients": 5}, {"partition": "classes"}):
        alone, with_public = load(DataConfig(**settings), 0), load(DataConfig(public=0.1, **settings), 0)
        assert with_public.public is not None
        count = with_public.public.size[0]
        assert count == len(with_public.public.y) == 180
        everybody = [rows_of(with_public.split(name)) for name in SPLITS]
        assert not rows_of(with_public.public) & set.union(*everybody)
        total = lambda clients: sum(len(clients.split(name).y) for name in SPLITS)
        if settings != {"partition": "classes"}:
            assert total(alone) == total(with_public) + count
        assert any("180 samples are public" in notice for notice in with_public.notices)
        assert alone.public is None


def test_a_table_is_prepared_as_the_clients_are(tmp_path):
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        lines = [f"{draw.normal(5, 2)},{draw.choice(['x', 'y', 'z'])},{draw.integers(2)}" for _ in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["size,kind,label", *lines]))
    other = tmp_path / "more"
    other.mkdir()
    (other / "c.csv").write_text((tmp_path / "a.csv").read_text())
    config = DataConfig(name="folder", dir=str(tmp_path))
    clients = load(dataclasses.replace(config, public=20), 0)
    assert clients.public is not None
    assert clients.public.x.shape == (20, *clients.shape)
    assert clients.public.x[:, 0].abs().max() < 4  # standardised
    assert (clients.public.x[:, 1:].sum(1) == 1).all()  # one-hot
    with pytest.raises(Problem, match="'local' gives every client a scale of its own"):
        load(dataclasses.replace(config, public=20, normalise="local"), 0)
    elsewhere = load(dataclasses.replace(config, public_data=str(other)), 0)
    assert elsewhere.public is not None
    assert elsewhere.public.labelled
    trained = rows_of(elsewhere.train)
    assert len(trained & rows_of(elsewhere.public)) > 20  # the same rows, prepared alike
    measured = rows_of(elsewhere.test) | rows_of(elsewhere.val)
    assert not measured & rows_of(elsewhere.public)
    left_out = elsewhere.test.size[0] + elsewhere.val.size[0]
    assert len(elsewhere.public.y) == 40 - left_out
    assert f"; {left_out} more are left out" in elsewhere.notices[-1]


def test_another_data_set(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (30, 1, 8, 8)).astype(np.uint8)
    (tmp_path / "other").mkdir()
    np.savez(tmp_path / "other" / "one.npz", x=x, y=np.arange(30) % 3)
    digits = load(DataConfig(clients=4), 0)
    uint8 = digits.train.x.dtype == torch.uint8
    config = DataConfig(clients=4, public=0.5, public_data=str(tmp_path / "other"))
    if not uint8:
        with pytest.raises(Problem, match="are images of bytes"):
            load(config, 0)
    np.savez(tmp_path / "other" / "one.npz", x=np.float32(x), y=np.arange(30) % 3)
    clients = load(config, 0)
    assert clients.public is not None
    assert len(clients.public.y) == 15
    assert not clients.public.labelled  # three classes are not those ten
    assert (clients.public.y == -1).all()
    assert torch.equal(clients.train.x, digits.train.x)
    assert "so they have none" in clients.notices[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"public": 1.5}, "a share below 1 or a whole number"),
        ({"public": 1e9}, "there are only"),
        ({"public_data": "digit"}, "did you mean 'digits'"),
        ({"public_data": "har"}, None),
    ],
)
def test_what_cannot_be(settings, words):
    with pytest.raises(Problem, match=words):
        load(DataConfig(**settings), 0)


def test_public_targets_are_numbers_as_the_clients_are():
    clients = load(DataConfig(name="diabetes", clients=4, public=40), 0)
    assert clients.public is not None
    assert clients.public.y.dtype == clients.train.y.dtype == torch.float32


def test_the_clients_own_data_are_not_elsewhere(tmp_path):
    rows = "\n".join(f"{i / 7},{i % 2}" for i in range(40))
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(f"size,label\n{rows}\n")
    config = DataConfig(name="folder", dir=str(tmp_path))
    for same in (
        DataConfig(public_data="digits"),
        dataclasses.replace(config, public_data=f"{tmp_path}/../{tmp_path.name}"),
    ):
        with pytest.raises(Problem, match=r"the clients are from '.*' themselves"):
            load(same, 0)


def test_samples_that_clients_are_tested_on_are_never_public(tmp_path):
    draw = np.random.default_rng(0)
    (tmp_path / "own").mkdir()
    for name in ("a", "b"):
        np.savez(tmp_path / "own" / f"{name}.npz", x=draw.normal(size=(30, 3)).astype("float32"), y=np.arange(30) % 2)
    config = DataConfig(name="folder", dir=str(tmp_path / "own"), normalise="none")
    tests = load(config, 0).test.x.numpy()
    (tmp_path / "other").mkdir()
    np.savez(tmp_path / "other" / "c.npz", x=tests, y=np.arange(len(tests)) % 2)
    with pytest.raises(Problem, match=r"every sample of '.*' is one that a client is tested or validated on"):
        load(dataclasses.replace(config, public_data=str(tmp_path / "other")), 0)


def test_a_name_without_a_slash_is_that_of_a_data_set_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "mnist-usps", "more"):
        (tmp_path / name).mkdir()
    folders = {name: public_folder(DataConfig(public_data=name)) for name in ("", "digits", "mnist_usps", "more")}
    assert folders == {"": None, "digits": None, "mnist_usps": None, "more": tmp_path / "more"}
    assert public_folder(DataConfig(public_data="./digits")) == tmp_path / "digits"


def test_public_tokens_stay_tokens(tmp_path):
    draw = np.random.default_rng(0)

    def folder(name, x, y):
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "a.npz", x=x, y=y)
        return str(tmp_path / name)

    tokens = lambda count, largest: draw.integers(0, largest + 1, size=(count, 6))
    some, few, many = tokens(30, 6), tokens(12, 5), tokens(12, 400)
    some[0, 0], many[0, 0] = 6, 400
    own = DataConfig(name="folder", dir=folder("own", some[:, :-1], some[:, 1:]), client_column="")
    public = load(dataclasses.replace(own, public_data=folder("few", few[:, :-1], few[:, 1:])), 0).public
    assert public is not None
    assert public.x.dtype == torch.int64
    assert public.x.tolist() == few[:, :-1].tolist()
    for data, sentence in (
        (folder("many", many[:, :-1], many[:, 1:]), "has the token 400, and the clients' go from 0 to 6"),
        (folder("numbers", draw.normal(size=(12, 5)).astype("float32"), np.arange(12) % 2), "tokens go with tokens"),
    ):
        with pytest.raises(Problem, match=sentence):
            load(dataclasses.replace(own, public_data=data), 0)
