"""How one data set becomes clients, how they are skewed, and how uneven they end."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from perfed.core.clients import SPLITS
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.data import catalog, check, load, schemes
from perfed.data.allocation import in_proportion
from perfed.data.catalog import partitions, scheme
from perfed.data.config import DataConfig
from perfed.data.official import in_parts
from perfed.data.order import order
from perfed.data.partition import partition
from perfed.data.pool import TEST, TRAIN, VAL, Pool
from perfed.data.schemes.classes import _repair, deal
from perfed.data.unevenness import emd, gini, measures, wasserstein
from perfed.methods.pfedmt import PFedMT
from perfed.training.prepare import describe

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about names that click will rename
    from perfed.cli import app


def pool(counts=(100,) * 10, **more):
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int64)
    return Pool(np.arange(len(y), dtype=np.float32)[:, None], y, len(counts), **more)


def cut(pool, seed=0, **settings):
    return partition(pool, DataConfig(**settings), seed)


def tally(data, rows):
    """Samples of each class, [clients, classes]."""
    return np.stack([np.bincount(data.y[r], minlength=data.classes) for r in rows])


# --- schemes --------------------------------------------------------------------------------------------------------

ROWS_USED = dict.fromkeys(("iid", "dirichlet", "classes", "pairs", "powerlaw", "lognormal", "uneven"), 1000)
ROWS_USED["ring"] = 400  # nothing is left for more than 10 of each


@pytest.mark.parametrize("name", [name for name in partitions() if name not in ("natural", "domains")])
def test_rows_are_disjoint_sorted_and_repeat_with_the_seed(name):
    settings = {"classes_per_client": 5} if name == "uneven" else {}  # then every class has a holder here
    first, again, other = (cut(pool(), seed, partition=name, **settings) for seed in (3, 3, 4))
    rows = np.concatenate(first)
    assert len(first) == 20
    assert len(np.unique(rows)) == len(rows)
    assert all((np.diff(r) > 0).all() for r in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    if name in ROWS_USED:
        assert len(rows) == ROWS_USED[name]


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
        table = tally(data, rows)
        assert ((table > 0).sum(axis=1) == k).all()
        assert len(np.unique(table.sum(axis=1))) == 1
        copies = (table > 0).sum(axis=0)[np.array(counts) > 0]
        assert copies.max() - copies.min() <= 1
        assert len(np.unique(np.concatenate(rows))) == table.sum()


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


def test_pairs_of_the_pfedmb_experiment():
    data = pool()
    counts = tally(data, cut(data, partition="pairs", clients=10))
    for i, row in enumerate(counts):
        assert np.flatnonzero(row).tolist() == [i // 2 * 2, i // 2 * 2 + 1]
    assert (counts[counts > 0] == 50).all()
    fives = tally(data, cut(data, partition="pairs", clients=6, classes_per_client=5))
    assert [np.flatnonzero(row).tolist() for row in fives] == [list(range(5))] * 3 + [list(range(5, 10))] * 3
    assert (fives[fives > 0] == 33).all()  # the hundredth sample of each class stays unused


def test_pairs_problems():
    with pytest.raises(Problem, match=r"classes_per_client is 3, which does not divide the 10 classes"):
        cut(pool(), partition="pairs", classes_per_client=3)
    with pytest.raises(Problem, match=r"data.clients is 12, but 'pairs' needs a multiple of 5"):
        cut(pool(), partition="pairs", clients=12)
    with pytest.raises(Problem, match="20 clients are too many for 'pairs'"):
        cut(pool((3, 3, 90, 90)), partition="pairs", clients=20)


def test_uneven_parts_follow_the_drawn_weights():
    data = pool((5000,) * 20)
    counts = tally(data, cut(data, partition="uneven", clients=30, classes_per_client=6))
    assert ((counts > 0).sum(axis=1) == 6).all()
    for column in counts.T:
        parts = column[column > 0]
        assert parts.sum() == 5000
        assert parts.max() / parts.min() < 0.7 / 0.3 * 1.01
    holders = (counts > 0).sum(axis=0)
    assert holders.min() < holders.max()  # drawn, not dealt
    even = tally(data, cut(data, partition="uneven", clients=30, classes_per_client=6, share_low=0.5, share_high=0.5))
    assert all(np.ptp(column[column > 0]) <= 1 for column in even.T)


def test_uneven_leaves_classes_that_nobody_drew():
    data = pool((50,) * 100)
    counts = tally(data, cut(data, partition="uneven", clients=15, classes_per_client=20))
    unused = counts.sum(axis=0) == 0
    assert 0 < unused.sum() < 12  # 100 * 0.8^15 = 3.5 are expected
    assert (counts.sum(axis=0)[~unused] == 50).all()


def test_uneven_problems():
    with pytest.raises(Problem, match="classes_per_client is 11, but there are only 10 classes"):
        cut(pool(), partition="uneven", classes_per_client=11)
    with pytest.raises(Problem, match="some client would get no sample of a class that it holds"):
        cut(pool((3,) * 10), partition="uneven", classes_per_client=9)
    with pytest.raises(Problem, match=r"data.share_low 0.8 must not be above data.share_high 0.7"):
        check(DataConfig(share_low=0.8))


@pytest.mark.parametrize(("clients", "k", "times"), [(20, 2, 2), (50, 3, 1), (7, 2, 2)])
def test_ring_of_the_pfedmt_code(clients, k, times):
    data = pool((7000,) * 10)
    counts = tally(data, cut(data, partition="ring", clients=clients, classes_per_client=k))
    more = 0
    for u, row in enumerate(counts):
        labels = sorted((u + j) % 10 for j in range(k))
        assert np.flatnonzero(row).tolist() == labels
        extra = row[labels] - 10
        assert ((extra == 0) | (extra >= 300 * times)).all()
        assert (extra % times == 0).all()
        more += (extra > 0).sum()
    assert more > clients  # most got more than the first ten
    assert (counts.sum(axis=0) <= 7000).all()


def test_ring_problems():
    with pytest.raises(Problem, match=r"20 clients are too many for 'ring': they need 40 samples of class 1, not 39"):
        cut(pool((100, 39, *[100] * 8)), partition="ring")
    with pytest.raises(Problem, match="classes_per_client is 3, but there are only 2 classes"):
        cut(pool((500, 500)), partition="ring", classes_per_client=3)


def test_power_law_sizes():
    sizes = lambda **more: sorted(len(r) for r in cut(pool((110,)), partition="powerlaw", clients=3, **more))
    assert sizes(power_law=1, min_samples=3) == [20, 30, 60]  # 1, 1/2, 1/3 of 11/6
    assert sizes(power_law=1, min_samples=25) == [25, 28, 57]  # the rest as 2 to 1
    assert sizes(power_law=0) == [36, 37, 37]
    ranks = [[len(r) for r in cut(pool(), seed, partition="powerlaw", clients=5)] for seed in range(6)]
    assert len({sizes.index(max(sizes)) for sizes in ranks}) > 1  # not always the first client


def test_log_normal_sizes():
    data = pool((20_000,) * 10)
    sizes = np.array([len(r) for r in cut(data, partition="lognormal", clients=500, min_samples=3, log_sigma=1)])
    assert np.log(sizes).std() == pytest.approx(1, abs=0.1)
    assert {len(r) for r in cut(data, partition="lognormal", log_sigma=0)} == {10_000}


@pytest.mark.parametrize("name", ["powerlaw", "lognormal"])
def test_quantity_skew_leaves_labels_alone(name):
    data = pool((20_000,) * 10)
    rows = cut(data, partition=name, clients=10, min_samples=1000, log_sigma=1)
    assert emd(tally(data, rows)).max() < 0.15
    assert min(map(len, rows)) >= 1000
    assert max(map(len, rows)) > 2 * min(map(len, rows))
    with pytest.raises(Problem, match="20 clients with at least 60 samples each need 1200 samples, but there are 1000"):
        cut(pool(), partition=name, min_samples=60)


def test_sizes_in_proportion_are_whole_and_complete():
    draw = np.random.default_rng(0)
    for _ in range(50):
        weight, total, least = draw.lognormal(0, 2, 9), int(draw.integers(100, 2000)), int(draw.integers(0, 12))
        sizes = in_proportion(weight, total, least)
        assert sizes.sum() == total
        assert sizes.min() >= least
        free = sizes > least + 1
        exact = weight[free] / weight[free].sum() * sizes[free].sum()
        assert np.abs(sizes[free] - exact).max() < 2


def test_dirichlet_without_the_cap():
    data = pool()
    capped, free = (cut(data, partition="dirichlet", cap=cap, clients=10) for cap in (True, False))
    counts = tally(data, free)
    held_before = np.cumsum(counts, axis=1) - counts
    assert (counts[held_before >= 1000 / 10] > 0).any()
    assert counts.sum() == 1000
    assert any(not np.array_equal(a, b) for a, b in zip(capped, free, strict=True))


# --- official parts -------------------------------------------------------------------------------------------------


def official(train, test, classes=10):
    """A pool as large as you like, with an official test set."""
    y = np.concatenate([np.repeat(np.arange(classes), n // classes) for n in (train, test)])
    parts = np.repeat([TRAIN, TEST], [train, test])
    return Pool(np.zeros((len(y), 1), dtype=np.float32), y.astype(np.int64), classes, official=parts)


def in_three(pool, seed=0, **settings):
    """Samples of each class in each part, [parts, clients, classes]."""
    config = DataConfig(name="cifar10", split="official", **settings)
    data = in_parts(pool, config, seed)
    rows = partition(data, config, seed)
    assert len(np.unique(np.concatenate(rows))) == sum(map(len, rows))
    return np.stack([tally(data, [r[data.part[r] == part] for r in rows]) for part in (TRAIN, VAL, TEST)])


@pytest.mark.parametrize("name", [name for name in partitions() if name not in ("natural", "domains")])
def test_the_same_assignment_in_three_parts(name):
    pool = official(6000, 1500)
    counts = in_three(pool, partition=name, val=0.2, clients=20, min_samples=20)
    totals = np.array([480, 120, 150])
    if name in ("iid", "powerlaw", "lognormal"):  # these share out all classes together
        counts, totals = counts.sum(axis=2, keepdims=True), totals * 10
    share = counts / totals[:, None, None]
    assert (np.abs(share[1] - share[0]) <= 1 / totals[1] + 1e-9).all()
    assert (np.abs(share[2] - share[0]) <= 1 / totals[2] + 1e-9).all()
    assert counts[0].sum() > 0


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (dict(partition="pairs", clients=10), (4000, 1000, 1000)),
        (dict(partition="classes", clients=15), (2666, 666, 666)),
        (dict(partition="classes", clients=50), (800, 200, 200)),
    ],
)
def test_sizes_of_the_pfedmb_experiments(settings, sizes):
    counts = in_three(official(50_000, 10_000), val=0.2, **settings)
    assert (counts.sum(axis=2) == np.array(sizes)[:, None]).all()
    assert ((counts[0] > 0) == (counts[1] > 0)).all()
    assert ((counts[0] > 0) == (counts[2] > 0)).all()


def test_dirichlet_of_the_pfedmb_experiment():
    counts = in_three(official(50_000, 10_000), val=0.2, partition="dirichlet", alpha=0.4, clients=15)
    assert (counts.sum(axis=(1, 2)) == (40_000, 10_000, 10_000)).all()
    sizes = counts[0].sum(axis=1)
    assert 400 < sizes.min() < 2000
    assert 3000 < sizes.max() < 6000


def test_validation_of_an_official_training_set():
    pool = official(1000, 200)
    draw = lambda seed, **more: in_parts(pool, DataConfig(val=0.2, **more), seed).part
    per_class = lambda part: np.bincount(pool.y[part == VAL], minlength=10)
    assert (per_class(draw(0)) == 20).all()
    assert not (per_class(draw(0, stratify=False)) == 20).all()
    assert (draw(0, stratify=False) == VAL).sum() == 200
    assert np.array_equal(draw(0), draw(0))
    assert not np.array_equal(draw(0), draw(1))
    assert ((draw(0) == TEST) == (pool.official == TEST)).all()
    assert (in_parts(pool, DataConfig(val=0), 0).part != VAL).all()


def test_official_problems():
    with pytest.raises(Problem, match="data set 'digits' has no official test set; use 'client'"):
        load(DataConfig(split="official"), 0)
    with pytest.raises(Problem, match="'official' does not go with natural clients"):
        check(DataConfig(name="mnist", partition="natural", split="official"))


# --- natural clients ------------------------------------------------------------------------------------------------


def test_natural_keeps_owners_together_and_limits_their_number():
    owner = np.random.default_rng(0).integers(0, 7, 1000)
    data = pool(owner=owner)
    everyone = cut(data, partition="natural", clients=0)
    assert [np.unique(owner[r]).tolist() for r in everyone] == [[i] for i in range(7)]
    assert sum(map(len, everyone)) == 1000
    draws = [[int(owner[r[0]]) for r in cut(data, seed, partition="natural", clients=3)] for seed in range(9)]
    assert all(len(chosen) == 3 and chosen == sorted(chosen) for chosen in draws)
    assert len(set(map(tuple, draws))) > 1


def test_domains_have_clients_of_their_own():
    """Equally many, the first domains one more; inside, all of a domain is shared out unevenly."""
    owner = np.repeat([0, 1, 2], [500, 300, 200])
    data = pool(owner=owner)
    rows, again, other = (cut(data, seed, partition="domains", clients=8, min_samples=5) for seed in (3, 3, 4))
    assert [np.unique(owner[r]).tolist() for r in rows] == [[0]] * 3 + [[1]] * 3 + [[2]] * 2
    assert np.sort(np.concatenate(rows)).tolist() == list(range(1000))
    assert min(map(len, rows)) >= 5
    assert all((a == b).all() for a, b in zip(rows, again, strict=True))
    assert [r.tolist() for r in rows] != [r.tolist() for r in other]
    even = tally(data, cut(data, partition="domains", clients=6, alpha=1e6, cap=False))
    for domain in range(3):  # with a large alpha every client has its domain's mix
        whole = np.bincount(data.y[owner == domain], minlength=10)
        assert np.abs(even[2 * domain : 2 * domain + 2] - whole / 2).max() <= 1.5


def test_domains_in_three_parts():
    """A class of a domain gives a client the same fraction of each part."""
    data = official(6000, 1500)
    owner = np.random.default_rng(1).integers(0, 2, len(data.y))
    data = in_parts(dataclasses.replace(data, owner=owner), DataConfig(name="mnist", split="official", val=0.2), 0)
    rows = partition(data, DataConfig(name="mnist", partition="domains", clients=6, split="official"), 0)
    for domain, mine in ((0, rows[:3]), (1, rows[3:])):
        parts = [np.flatnonzero((owner == domain) & (data.part == part)) for part in (TRAIN, VAL, TEST)]
        totals = [np.bincount(data.y[part], minlength=10) for part in parts]
        share = [
            tally(data, [np.intersect1d(r, part) for r in mine]) / t for part, t in zip(parts, totals, strict=True)
        ]
        assert np.abs(share[1] - share[0]).max() <= 1 / totals[1].min() + 1e-9
        assert np.abs(share[2] - share[0]).max() <= 1 / totals[2].min() + 1e-9


def test_domains_problems():
    with pytest.raises(Problem, match="data set 'digits' does not say which domain its samples are from"):
        cut(pool(), partition="domains")
    with pytest.raises(Problem, match=r"domain 2 of 2: 3 clients with at least 30 samples each need 90 samples"):
        cut(pool(owner=(np.arange(1000) >= 950).astype(int)), partition="domains", clients=6, min_samples=30)
    with pytest.raises(Problem, match=r"data.clients is 2, but there are 3 domains"):
        cut(pool(owner=np.arange(1000) % 3), partition="domains", clients=2)


def test_natural_needs_owners():
    with pytest.raises(Problem, match="data set 'digits' does not say who its samples come from"):
        cut(pool(), partition="natural")


def test_default_schemes():
    assert scheme(DataConfig(name="digits")) == "dirichlet"
    assert scheme(DataConfig(name="mnist", partition="natural")) == "natural"
    assert {scheme(DataConfig(name=name)) for name in ("har", "synthetic", "folder")} == {"natural"}
    assert scheme(DataConfig(name="mnist-usps")) == "domains"


HALVES = '''"""Halves: the first client gets every other sample of each class."""

import numpy as np

from perfed.data.allocation import Shares

READS = ("alpha",)


def share(sizes, config, rng):
    counts = np.zeros((len(sizes), config.clients), dtype=np.int64)
    counts[:, 0] = sizes // 2
    counts[:, 1:] = (sizes // 2 // (config.clients - 1))[:, None]
    return Shares(counts, sizes)
'''


def test_a_scheme_is_one_file(monkeypatch, tmp_path):
    (tmp_path / "by_halves.py").write_text(HALVES)
    monkeypatch.setattr(catalog, "SCHEMES", tmp_path)
    monkeypatch.setattr(schemes, "__path__", [str(tmp_path)])
    assert partitions() == {"by-halves": "the first client gets every other sample of each class"}
    clients = load(DataConfig(partition="by-halves", clients=3, alpha=0.7), 0)
    assert clients.train.size[0] > 1.9 * clients.train.size[1]
    assert clients.partition["settings"] == {"alpha": 0.7}


def test_wrong_settings_are_problems():
    with pytest.raises(Problem, match="there is no partition 'dirichlett'; did you mean 'dirichlet'"):
        cut(pool(), partition="dirichlett")
    with pytest.raises(Problem, match=r"data set 'folder' has clients of its own: leave out data.partition 'iid'"):
        cut(pool(), name="folder", partition="iid")
    with pytest.raises(Problem, match=r"data.clients must be at least 1 with the partition 'iid'"):
        cut(pool(), partition="iid", clients=0)
    with pytest.raises(Problem, match=r"data.clients is 11, but there are only 10 samples"):
        cut(pool((5, 5)), partition="iid", clients=11)


ROWS = '''"""Bad: what a test wants."""

import numpy as np


def rows(pool, config, rng):
    return [np.array(mine) for mine in {rows}]
'''


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[0, 1], [2]], r"partition 'bad' deals rows to 2 clients, but data.clients is 3"),
        ([[0, 1], [2], []], r"partition 'bad' deals no rows to client 2"),
        ([[0, 1], [2, 1], [3]], r"partition 'bad' deals row 1 more than once, to the clients 0, 1"),
        ([[0, 0], [2], [3]], r"partition 'bad' deals row 0 more than once, to the clients 0, 0"),
        ([[0, 1], [2], [10]], r"deals row 10 to client 2, but rows are numbered from 0 to 9"),
        ([[0, -1], [2], [3]], r"deals row -1 to client 0, but rows are numbered from 0 to 9"),
        ([[0.0, 1.0], [2], [3]], r"deals float64 to client 0, but rows are whole numbers"),
    ],
)
def test_what_a_scheme_deals_is_looked_at(monkeypatch, tmp_path, rows, sentence):
    (tmp_path / "bad.py").write_text(ROWS.format(rows=rows))
    monkeypatch.setattr(catalog, "SCHEMES", tmp_path)
    monkeypatch.setattr(schemes, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "perfed.data.schemes.bad", raising=False)
    with pytest.raises(Problem, match=sentence):
        cut(pool((5, 5)), partition="bad", clients=3)


def test_rows_that_are_not_sorted_are_sorted(monkeypatch, tmp_path):
    (tmp_path / "bad.py").write_text(ROWS.format(rows=[[3, 1], [2], [0]]))
    monkeypatch.setattr(catalog, "SCHEMES", tmp_path)
    monkeypatch.setattr(schemes, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "perfed.data.schemes.bad", raising=False)
    assert [mine.tolist() for mine in cut(pool((5, 5)), partition="bad", clients=3)] == [[1, 3], [2], [0]]


# --- skews ----------------------------------------------------------------------------------------------------------


def pieces(clients, split):
    part = clients.split(split)
    return list(zip(part.x.split(list(part.size)), part.y.split(list(part.size)), strict=True))


def test_rotation_turns_every_part_of_a_client_alike():
    plain, turned = load(DataConfig(), 0), load(DataConfig(rotate="0, 90,180,270"), 0)
    assert turned.partition is not None
    degrees = turned.partition["skews"]["rotate"]
    assert sorted(degrees) == sorted([0, 90, 180, 270] * 5)
    for split in SPLITS:
        for angle, (x, y), (new_x, new_y) in zip(degrees, pieces(plain, split), pieces(turned, split), strict=True):
            assert torch.equal(new_x, torch.rot90(x, angle // 90, (2, 3)))
            assert torch.equal(new_y, y)
    other = load(DataConfig(rotate="0,90,180,270"), 1)
    assert other.partition is not None
    assert other.partition["skews"]["rotate"] != degrees


def test_noise_grows_with_the_client():
    plain, noisy = (load(DataConfig(partition="iid", clients=4, noise=noise), 0) for noise in (0.0, 0.8))
    assert noisy.partition is not None
    assert noisy.partition["skews"]["noise"] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    for split in ("train", "test"):
        for level, (x, _), (new, _) in zip(
            (0.2, 0.4, 0.6, 0.8), pieces(plain, split), pieces(noisy, split), strict=True
        ):
            assert float((new - x).std()) == pytest.approx(level, rel=0.05)
            assert float((new - x).mean()) == pytest.approx(0, abs=0.02)
    again = load(DataConfig(partition="iid", clients=4, noise=0.8), 0)
    assert torch.equal(noisy.train.x, again.train.x)


def test_noise_on_bytes_stays_bytes(tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.full((400, 1, 4, 4), 128, np.uint8), y=np.arange(400) % 2)
    x = load(DataConfig(name="folder", dir=str(tmp_path), noise=0.1), 0).train.x
    assert x.dtype == torch.uint8
    first, second = x.float().view(2, -1)
    assert float(first.std()) == pytest.approx(0.05 * 255, rel=0.05)
    assert float(second.std()) == pytest.approx(0.1 * 255, rel=0.05)


@pytest.mark.parametrize("by", ["permutation", "swap"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_groups_rename_labels_alike_in_every_part(by, share):
    settings = dict(relabel=share, relabel_by=by, relabel_groups=3)
    plain, renamed = load(DataConfig(), 0), load(DataConfig(**settings), 0)
    assert renamed.partition is not None
    about = renamed.partition["skews"]["relabel"]
    maps = torch.tensor(about["maps"])
    assert (maps.sort(dim=1).values == torch.arange(10)).all()
    assert len(maps.unique(dim=0)) == 3
    if by == "swap":
        moved = maps != torch.arange(10)
        assert (moved.sum(dim=1) == 2).all()
        assert (moved.sum(dim=0) <= 1).all()  # a label belongs to one pair
    assert sorted(about["groups"]) == sorted(i % 3 for i in range(20))
    for split in SPLITS:
        for group, (x, y), (new_x, new_y) in zip(
            about["groups"], pieces(plain, split), pieces(renamed, split), strict=True
        ):
            assert torch.equal(new_x, x)
            fits, same = new_y == maps[group][y], new_y == y
            assert (fits | same).all()
            count = int(len(y) * share + 0.5)
            assert int((~same).sum()) <= count <= int(fits.sum())


def test_skews_compose_and_do_not_move_each_other():
    settings = dict(rotate="0,180", noise=0.3, relabel=0.5)
    alone = [load(DataConfig(**{key: value}), 0).partition for key, value in settings.items()]
    together = load(DataConfig(**settings), 0).partition
    assert together is not None
    assert together["skews"] == {key: value for each in alone if each for key, value in each["skews"].items()}


def test_skew_problems(tmp_path):
    for wrong in ("45", "0,x", "0,,90"):
        with pytest.raises(Problem, match=r"data.rotate takes multiples of 90 with commas between, as 0,90,180,270"):
            check(DataConfig(rotate=wrong))
    with pytest.raises(Problem, match=r"data.rotate needs images .*, but 'synthetic' has samples \(60,\)"):
        load(DataConfig(name="synthetic", rotate="0,90"), 0)
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 1, 4, 6), np.uint8), y=np.arange(9) % 2)
    with pytest.raises(Problem, match="can turn images of 4x6 by 0 and 180 degrees only"):
        load(DataConfig(name="folder", dir=str(tmp_path), rotate="90"), 0)
    with pytest.raises(Problem, match=r"data.rotate makes 2 groups, but there are only 1 clients"):
        load(DataConfig(name="folder", dir=str(tmp_path), rotate="0,180"), 0)
    with pytest.raises(Problem, match=r"data.relabel_groups makes 21 groups, but there are only 20 clients"):
        load(DataConfig(relabel=1, relabel_groups=21), 0)
    with pytest.raises(Problem, match=r"data.relabel_groups is 6, but 10 labels make only 5 pairs to swap"):
        load(DataConfig(relabel=1, relabel_by="swap", relabel_groups=6), 0)
    with pytest.raises(Problem, match=r"data.normalise 'half' does not suit 'digits', .*: channel or none"):
        load(DataConfig(normalise="half"), 0)


# --- teams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("team_order", ["random", "labels", "groups"])
def test_another_order_has_the_same_clients(team_order):
    config = dict(rotate="0,90", noise=0.1, relabel=0.5, partition="classes")
    dealt, moved = load(DataConfig(**config), 0), load(DataConfig(**config, team_order=team_order), 0)
    assert moved.partition is not None
    assert sorted(moved.names) == list(dealt.names)
    assert moved.names != dealt.names
    assert [dealt.names[i] for i in moved.partition["dealt"]] == list(moved.names)
    for split in SPLITS:
        before = dict(zip(dealt.names, pieces(dealt, split), strict=True))
        for name, (x, y) in zip(moved.names, pieces(moved, split), strict=True):
            assert torch.equal(x, before[name][0])
            assert torch.equal(y, before[name][1])


def test_teams_of_like_labels():
    counts = np.eye(5, dtype=int)[np.random.default_rng(0).permutation(np.arange(20) % 5)] * 30 + 1
    places = order(counts, DataConfig(team_order="labels"), 0)
    method = PFedMT(Model(lambda: torch.nn.Linear(2, 2)), teams=5)
    team = method.init_server(20)["team"].numpy()
    kinds = counts.argmax(axis=1)[places]
    assert [len(set(kinds[team == t])) for t in range(5)] == [1] * 5
    alone = order(counts[:1], DataConfig(team_order="labels"), 0)
    assert alone.tolist() == [0]


# --- measures -------------------------------------------------------------------------------------------------------


def test_measures_by_hand():
    counts = np.array([[30, 10, 0], [0, 10, 10], [0, 20, 20]])  # all together: 0.3, 0.4, 0.3
    assert emd(counts).tolist() == pytest.approx([0.45 + 0.15 + 0.3, 0.3 + 0.1 + 0.2, 0.6])
    assert wasserstein(counts).tolist() == pytest.approx(np.sqrt(2) * np.array([0.75, 0.375, 0.375]))
    assert gini(np.array([40, 20, 40])) == pytest.approx((20 + 20 + 0) * 2 / 9 / (2 * 100 / 3))
    values = measures(counts)
    assert values["emd"] == pytest.approx(0.7)
    assert values["total_variation"] == pytest.approx(0.35)
    assert (values["smallest"], values["largest"], values["max_over_min"]) == (20, 40, 2)
    assert values["classes"] == [2, 2, 2]


def test_measures_of_clients_that_are_alike():
    values = measures(np.array([[5, 15], [5, 15]]))
    assert values["emd"] == values["wasserstein"] == values["gini"] == 0
    alone = measures(np.array([[5, 15]]))
    assert alone["wasserstein"] == 0


def test_wasserstein_is_the_cheapest_transport():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 30, (2, 4))
    p, q = counts / counts.sum(axis=1, keepdims=True)
    cost = np.sqrt(2) * (1 - np.eye(4))
    leave, arrive = np.kron(np.eye(4), np.ones(4)), np.kron(np.ones(4), np.eye(4))
    plan = linprog(cost.ravel(), A_eq=np.vstack([leave, arrive]), b_eq=np.concatenate([p, q]))
    assert wasserstein(counts) == pytest.approx([plan.fun, plan.fun])


# --- what is kept and shown -----------------------------------------------------------------------------------------


def test_a_run_keeps_how_its_clients_came_about():
    clients = load(DataConfig(partition="uneven", classes_per_client=4, rotate="0,180"), 5)
    about = json.loads(json.dumps(describe(clients)))["partition"]
    assert about["scheme"] == "uneven"
    assert about["settings"] == {"classes_per_client": 4, "share_low": 0.3, "share_high": 0.7}
    assert about["split"] == "client"
    assert about["measures"]["classes"] == [4] * 20
    assert len(about["measures"]["emd_per_client"]) == 20
    assert set(about["skews"]) == {"rotate"}


@pytest.fixture
def show(monkeypatch, capsys, tmp_path):
    """`show(*words)`: (exit code, standard output, standard error) of `perfed partition show WORDS`."""
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["perfed", "partition", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code, *capsys.readouterr()

    return command


def test_show_writes_a_table_pictures_and_counts(show, tmp_path):
    words = ("--partition", "pairs", "--clients", "10", "--rotate", "0,90", "--relabel", "0.5", "--noise", "0.1")
    code, out, err = show("show", *words, "--out", "p.png")
    assert (code, err) == (0, "")
    assert "client_09" in out
    assert "mean EMD" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with (tmp_path / "p.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["client", "part", *map(str, range(10))]
    assert len(lines) == 1 + 3 * 10
    clients = load(DataConfig(partition="pairs", clients=10, relabel=0.5), 0)
    assert sum(map(int, lines[1][2:])) == clients.train.size[0]
    counts = np.array([line[2:] for line in lines[1:] if line[1] == "train"], dtype=int)
    assert f"most frequent label {100 * (counts.max(1) / counts.sum(1)).mean():.1f} %" in out


def test_show_many_clients_and_classes(show):
    """More than bubbles can show: a heat map."""
    code, _, err = show("show", "--partition", "iid", "--clients", "90", "--out", "many.png")
    assert (code, err) == (0, "")


def test_names_are_not_read_as_formulas(show, tmp_path):
    lines = [
        f"{client},{label},{i}" for client in ("$x^{$", "[red]", "=1+1") for i, label in enumerate(["$a^{$", "b"] * 4)
    ]
    (tmp_path / "t.csv").write_text("client,label,u\n" + "\n".join(lines))
    code, out, err = show("show", "--data", "folder", "--data-dir", "t.csv", "--out", "p.png")
    assert (code, err) == (0, "")
    assert all(name in out for name in ("$x^{$", "[red]", "=1+1"))
    assert "'=1+1,train" in (tmp_path / "p.csv").read_text()


def test_show_as_json(show):
    code, out, err = show("show", "--partition", "classes", "--seed", "3", "--json")
    assert code == 0
    assert "training" in err  # the table, for people
    shown = json.loads(out)
    clients = load(DataConfig(partition="classes"), 3)
    assert shown["clients"][7]["name"] == "client_07"
    assert shown["clients"][7]["labels"]["test"] == torch.bincount(pieces(clients, "test")[7][1], minlength=10).tolist()
    assert shown["measures"]["gini"] == 0
    assert shown["files"] == []


def test_show_is_the_same_every_time(show, tmp_path):
    for name in "ab":
        assert show("show", "--clients", "3", "--out", f"{name}.png")[0] == 0
    for kind in ("png", "svg", "csv"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show", "--out", "p.jpg"), "--out must end in .png, not 'p.jpg'"),
        (("show", "--out", "nowhere/p.png"), "--out: there is no folder 'nowhere'"),
        (("show", "--partition", "pair"), "there is no partition 'pair'; did you mean 'pairs'?"),
        (("show", "--split", "offical"), "data.split must be one of client, official, not 'offical'"),
        (("show", "--rotate", "30"), "data.rotate takes multiples of 90"),
        (("show", "--relabel", "2"), "data.relabel must be at most 1, not 2"),
        (("shw",), "there is no command 'shw'; did you mean 'show'?"),
    ],
)
def test_show_says_what_is_wrong(show, words, sentence):
    code, out, err = show(*words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_partition_alone_says_what_it_can_do(show):
    code, out, _ = show()
    assert code == 0
    assert "show" in out
