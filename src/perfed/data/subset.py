"""Fewer samples than a data set has, chosen before anything else is done with them."""

from __future__ import annotations

import dataclasses

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import in_proportion
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.data.pool import Pool

_SUBSET = 11  # the random stream of this purpose


def subset(pool: Pool, config: DataConfig, seed: int) -> Pool:
    """Return a pool of at most data.samples rows; of all, where that is 0 or more than there are.

    Official parts give rows in proportion to their sizes, and so do the natural clients of a partition that keeps
    them. Within each of these, classes give equally many rows, as far as they have them; natural clients keep their
    own proportions of classes, and so do samples of other tasks than classification. Rows of one unit stay together.
    """
    count = len(pool.y)
    if not 0 < config.samples < count:
        return pool
    natural, owned = scheme(config) == "natural", scheme(config) in ("natural", "domains") and pool.owner is not None
    even = pool.task == "classification" and not natural
    if even and config.samples < pool.classes:
        raise Problem(f"data.samples is {config.samples}, but '{config.name}' has {pool.classes} classes")
    parts = pool.official if config.split == "official" else pool.part
    keys = np.stack([array if array is not None else np.zeros(count, dtype=np.int64)
                     for array in (pool.owner if owned else None, parts)])  # fmt: skip
    _, group, sizes = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    if config.samples < len(sizes):
        what = "clients, and parts of theirs," if natural else "parts"
        raise Problem(f"data.samples is {config.samples}, but the samples of '{config.name}' are of {len(sizes)} {what}"
                      " that are to keep some")  # fmt: skip
    rng = np.random.default_rng([seed, _SUBSET])
    quotas = in_proportion(sizes.astype(np.float64), config.samples, 1)
    order = np.argsort(group, kind="stable")
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    chosen = [_first(pool, rows, quota, even, rng) for rows, quota in zip(pieces, quotas, strict=True)]
    rows = np.sort(np.concatenate(chosen))
    manner = ", equally many of every class as far as there are" if even else ""
    manner += ", of every client its share" if natural else ""
    told = f"data.samples: {len(rows):,} of the {count:,} samples of '{config.name}' are used{manner}"
    return dataclasses.replace(pool.only(rows), notices=(*pool.notices, told))


def _first(pool: Pool, rows: np.ndarray, quota: int, even: bool, rng: np.random.Generator) -> np.ndarray:
    """Choose at most `quota` of some rows, in whole units, but one unit at least.

    Units stand in a row by how much of their class is before them: in rows where classes are to be `even`, else in
    shares of the class. The first ones are chosen.
    """
    unit = rows if pool.unit is None else pool.unit[rows]
    _, first, piece, size = np.unique(unit, return_index=True, return_inverse=True, return_counts=True)
    label = pool.stratum[rows[first]]
    shuffled = rng.permutation(len(first))
    by_class = shuffled[np.argsort(label[shuffled], kind="stable")]
    before = np.cumsum(size[by_class]) - size[by_class]
    in_class = np.bincount(label, weights=size, minlength=pool.kinds)
    before = before - (np.cumsum(in_class) - in_class)[label[by_class]]
    turn = rng.random(pool.kinds)[label[by_class]]  # of classes that are equal so far
    place = before if even else (before + turn * size[by_class]) / in_class[label[by_class]]
    queue = by_class[np.lexsort((turn, place))]
    taken = max(1, int(np.searchsorted(np.cumsum(size[queue]), quota, side="right")))
    keep = np.zeros(len(first), dtype=bool)
    keep[queue[:taken]] = True
    return rows[keep[piece.reshape(-1)]]
