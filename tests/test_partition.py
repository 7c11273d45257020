"""How one data set becomes clients."""

from __future__ import annotations

import numpy as np
import pytest

from perfed.config import DataConfig
from perfed.core.errors import Problem
from perfed.datasets.pool import Pool
from perfed.partition import PARTITIONS, SETTINGS, partition, scheme
from perfed.partition.classes import _repair, deal


def pool(counts=(100,) * 10, **more):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    return Pool(np.arange(len(y), dtype=np.float32)[:, None], y, len(counts), **more)


def cut(pool, seed=0, **settings):
    return partition(pool, DataConfig(**settings), seed)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "classes"])
def test_rows_are_disjoint_sorted_and_repeat_with_the_seed(name):
    first, again, other = (cut(pool(), seed, partition=name) for seed in (3, 3, 4))
    rows = np.concatenate(first)
    assert len(first) == 20
    assert len(np.unique(rows)) == len(rows)
    assert all((np.diff(r) > 0).all() for r in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len(rows) == 1000


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(r) for r in cut(pool((33, 34)), partition="iid", clients=10)]
    assert sorted(sizes) == [6] * 3 + [7] * 7


@pytest.mark.parametrize("alpha", [0.1, 0.3, 100.0])
def test_dirichlet_minimum_and_cap(alpha):
    data = pool()
    clients = cut(data, partition="dirichlet", alpha=alpha, min_samples=8)
    counts = np.stack([np.bincount(data.y[r], minlength=10) for r in clients])
    assert counts.sum(axis=1).min() >= 8
    assert counts.sum() == 1000
    held_before = np.cumsum(counts, axis=1) - counts
    assert (counts[held_before >= 1000 / 20] == 0).all()


def test_dirichlet_with_large_alpha_is_nearly_even():
    data = pool()
    counts = np.stack([np.bincount(data.y[r], minlength=10) for r in cut(data, alpha=1e6, clients=10)])
    assert abs(counts - 10).max() <= 2


def test_dirichlet_gives_up_with_a_hint():
    with pytest.raises(Problem, match=r"no Dirichlet\(0.001\) draw in 200 .* raise data.alpha"):
        cut(pool(), alpha=0.001)
    with pytest.raises(
        Problem, match="200 clients with at least 10 samples each need 2000 samples, but there are 1000"
    ):
        cut(pool(), clients=200)


def test_dirichlet_skips_classes_without_samples():
    assert sum(map(len, cut(pool((500, 0, 500)), clients=4))) == 1000


@pytest.mark.parametrize(
    ("counts", "clients", "k"),
    [
        ((600,) * 10, 15, 2),
        ((100,) * 10, 50, 2),  # the plain redraw needs about 100 deals
        ((100,) * 10, 100, 5),  # a plain redraw practically never succeeds
        ((30, 41, 35, 60, 33, 38, 0), 7, 3),  # 21 cards for 6 classes that occur
        ((40,) * 10, 3, 2),
        ((40,) * 4, 9, 4),
        ((50,) * 3, 5, 1),
    ],
)
def test_classes_have_equal_sizes_and_k_classes(counts, clients, k):
    data = pool(counts)
    for seed in range(3):
        rows = cut(data, seed, partition="classes", clients=clients, classes_per_client=k)
        held = np.stack([np.bincount(data.y[r], minlength=len(counts)) for r in rows])
        assert ((held > 0).sum(axis=1) == k).all()
        assert len(np.unique(held.sum(axis=1))) == 1
        copies = (held > 0).sum(axis=0)[np.array(counts) > 0]
        assert copies.max() - copies.min() <= 1
        assert len(np.unique(np.concatenate(rows))) == held.sum()


def test_classes_deal_of_the_pfedmb_experiment():
    hands = deal(np.full(10, 6000), 15, 2, np.random.default_rng(0))
    assert (np.bincount(hands.ravel()) == 3).all()
    rows = cut(pool((600,) * 10), partition="classes", clients=15)
    assert {len(r) for r in rows} == {400}


def test_repair_of_a_deal_keeps_the_cards():
    rng = np.random.default_rng(0)
    bad = np.sort(np.repeat(np.arange(20), 12)).reshape(24, 10)
    good = _repair(bad, 20, rng)
    assert (np.bincount(good.ravel()) == 12).all()
    assert all(len(set(hand)) == 10 for hand in good)


def test_classes_problems():
    with pytest.raises(Problem, match="classes_per_client is 3, but there are only 2 classes"):
        cut(pool((50, 50)), partition="classes", classes_per_client=3)
    with pytest.raises(Problem, match="too many: some class has fewer samples than clients that hold it"):
        cut(pool((5, 50)), partition="classes", clients=20)


def test_natural_keeps_owners_together_and_limits_their_number():
    owner = np.random.default_rng(0).integers(0, 7, 1000)
    data = pool(owner=owner)
    everyone = cut(data, partition="natural", clients=0)
    assert [np.unique(owner[r]).tolist() for r in everyone] == [[i] for i in range(7)]
    assert sum(map(len, everyone)) == 1000
    some = [[int(owner[r[0]]) for r in cut(data, seed, partition="natural", clients=3)] for seed in range(9)]
    assert all(len(chosen) == 3 and chosen == sorted(chosen) for chosen in some)
    assert len(set(map(tuple, some))) > 1


def test_natural_needs_owners():
    with pytest.raises(Problem, match="data set 'digits' does not say who its samples come from"):
        cut(pool(), partition="natural")


def test_default_schemes():
    assert scheme(DataConfig(name="digits")) == "dirichlet"
    assert scheme(DataConfig(name="mnist", partition="natural")) == "natural"
    assert {scheme(DataConfig(name=name)) for name in ("har", "synthetic", "folder")} == {"natural"}
    assert set(SETTINGS) < set(PARTITIONS)


def test_wrong_settings_are_problems():
    with pytest.raises(Problem, match="there is no partition 'dirichlett'; did you mean 'dirichlet'"):
        cut(pool(), partition="dirichlett")
    with pytest.raises(Problem, match=r"data set 'folder' has clients of its own: leave out data.partition 'iid'"):
        cut(pool(), name="folder", partition="iid")
    with pytest.raises(Problem, match=r"data.clients must be at least 1 with the partition 'iid'"):
        cut(pool(), partition="iid", clients=0)
    with pytest.raises(Problem, match=r"data.clients is 11, but there are only 10 samples"):
        cut(pool((5, 5)), partition="iid", clients=11)
    with pytest.raises(Problem, match="data set 'digits' has no samples"):
        cut(pool((0, 0)))
