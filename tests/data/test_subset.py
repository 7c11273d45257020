"""Fewer samples than a data set has: how many of what, and that everything after it sees these alone."""

import dataclasses
import json

import numpy as np
import pytest

from perfed import api
from perfed.cli import main
from perfed.core.clients import SPLITS
from perfed.core.errors import Problem
from perfed.data import load
from perfed.data.config import DataConfig
from perfed.data.pool import TEST, TRAIN, Pool, checked
from perfed.data.subset import subset
from perfed.training.settings import decisive


def pool(counts=(100,) * 4, **more):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    return Pool(np.arange(len(y), dtype=np.float32)[:, None], y, len(counts), **more)


def cut(samples, everything=None, seed=0, **settings):
    return subset(everything or pool(), DataConfig(samples=samples, partition="iid", **settings), seed)


def rows(chosen):
    return chosen.x[:, 0].astype(int).tolist()


def test_0_and_more_than_there_are_is_all():
    everything = pool()
    for samples in (0, 400, 401):
        assert cut(samples, everything) is everything


def test_classes_give_equally_many():
    assert np.bincount(cut(80).y).tolist() == [20] * 4
    assert sorted(np.bincount(cut(82).y)) == [20, 20, 21, 21]
    assert len({tuple(np.bincount(cut(82, seed=seed).y)) for seed in range(8)}) > 1  # who gives more is drawn
    assert "data.samples: 80 of the 400 samples of 'digits' are used, equally many of every class" in cut(80).notices[0]


def test_a_class_that_has_fewer_gives_all_it_has():
    chosen = cut(100, pool((300, 300, 10, 25)))
    assert len(chosen.y) == 100
    assert np.bincount(chosen.y)[2:].tolist() == [10, 25]
    assert sorted(np.bincount(chosen.y)[:2]) == [32, 33]


def test_rows_follow_the_seed_and_keep_their_order():
    assert rows(cut(60)) == rows(cut(60)) == sorted(rows(cut(60)))
    assert rows(cut(60)) != rows(cut(60, seed=1))
    assert (cut(60).y == pool().y[rows(cut(60))]).all()


def test_fewer_samples_than_classes_are_refused():
    with pytest.raises(Problem, match=r"data.samples is 3, but 'digits' has 4 classes"):
        cut(3)


def test_official_parts_keep_their_proportions():
    everything = pool(official=np.where(np.arange(400) < 320, TRAIN, TEST))
    chosen = cut(100, everything, split="official")
    assert chosen.official is not None
    for part, count in ((TRAIN, 80), (TEST, 20)):
        assert np.bincount(chosen.y[chosen.official == part]).tolist() == [count // 4] * 4
    assert (chosen.official == everything.official[rows(chosen)]).all()


def test_natural_clients_keep_their_proportions():
    owner = np.repeat([0, 1, 2], [200, 196, 4])
    y = np.where(owner == 0, np.arange(400) % 4 > 0, np.arange(400) % 2).astype(np.int64)
    everything = dataclasses.replace(pool(), y=y, classes=2, owner=owner)
    natural = DataConfig(samples=100, partition="natural")
    chosen = subset(everything, natural, 0)
    assert np.bincount(chosen.owner).tolist() == [50, 49, 1]
    assert abs(chosen.y[chosen.owner == 0].sum() - 37.5) <= 0.5
    assert abs(chosen.y[chosen.owner == 1].sum() - 24.5) <= 0.5
    assert "of every client its share" in chosen.notices[0]
    dealt = cut(100, everything)  # a partition that takes no notice of owners
    assert np.bincount(dealt.y).tolist() == [50, 50]
    with pytest.raises(Problem, match="are of 3 clients, and parts of theirs, that are to keep some"):
        subset(everything, dataclasses.replace(natural, samples=2), 0)


def test_what_a_source_has_split_stays_split():
    part = np.where(np.arange(400) < 100, TEST, TRAIN)
    owner = np.arange(400) % 2
    chosen = subset(pool(part=part, owner=owner), DataConfig(samples=40, partition="natural"), 0)
    for client in (0, 1):
        assert (chosen.part[chosen.owner == client] == TEST).sum() == 5
        assert (chosen.part[chosen.owner == client] == TRAIN).sum() == 15


def test_rows_of_one_unit_stay_together():
    y = np.repeat(np.arange(4), 100)
    unit = np.arange(400) // 5
    everything = dataclasses.replace(pool(), y=y, unit=unit)
    chosen = cut(62, everything)
    assert set(np.bincount(chosen.unit)) == {0, 5}
    assert len(chosen.y) == 60
    assert np.bincount(chosen.y).tolist() == [15] * 4


def test_other_tasks_keep_their_distribution():
    y = (np.arange(400) % 10 == 0).astype(np.float32)[:, None]
    everything = checked(dataclasses.replace(pool(), y=y, classes=1, task="binary"), "yes or no")
    chosen = cut(100, everything)
    assert len(chosen.y) == 100
    assert abs(chosen.y.sum() - 10) <= 1
    assert chosen.notices[0].endswith("samples of 'digits' are used")


def everybody(clients):
    return {row.numpy().tobytes() for split in SPLITS for row in clients.split(split).x}


def test_partition_split_and_public_samples_are_of_these_alone():
    clients = load(DataConfig(samples=200, partition="classes", classes_per_client=1, clients=10), 0)
    assert [sum(sizes) for sizes in zip(clients.train.size, clients.val.size, clients.test.size, strict=True)] == [
        20
    ] * 10
    with_public = load(DataConfig(samples=200, partition="iid", clients=4, public=0.25), 0)
    assert with_public.public is not None
    assert len(with_public.public.y) == 50
    assert np.bincount(with_public.public.y).tolist() == [5] * 10
    theirs = everybody(load(DataConfig(samples=200, partition="iid", clients=4), 0))
    assert everybody(with_public) < theirs
    assert {row.numpy().tobytes() for row in with_public.public.x} == theirs - everybody(with_public)
    assert any(notice.startswith("data.samples: 200 of the 1,797") for notice in clients.notices)


def test_every_data_set_that_is_here_can_be_cut():
    for name, samples in (("synthetic", 300), ("synthetic-multilabel", 300), ("diabetes", 100), ("digits", 100)):
        clients = load(DataConfig(name=name, samples=samples, clients=5, min_samples=3), 0)
        assert sum(len(clients.split(split).y) for split in SPLITS) == samples, name


def test_it_is_a_setting_of_every_run_and_follows_the_seed_of_the_partition(tmp_path, monkeypatch, capsys):
    settings = dict(rounds=1, epochs=1, clients=3, samples=90, partition="iid", baseline=False, partition_seed=3)
    first, other = (api.run("local", out=tmp_path / f"{seed}", seed=seed, **settings) for seed in (0, 1))
    assert first.about["digest"] == other.about["digest"]
    assert first.config.data.samples == 90
    entry = first.entries["local"]
    before, now = (
        decisive(dataclasses.replace(first.config, data=data), entry, first.about)
        for data in (first.config.data, dataclasses.replace(first.config.data, samples=80))
    )
    assert {key for key in before if before[key] != now[key]} == {"data.samples"}
    words = "perfed partition show --samples 90 --partition iid --clients 3 --seed 3 --json"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["clients"]) == 3
