"""From a pool and its clients' rows to three tables; a client's train, val and test share one distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from perfed.config import DataConfig
from perfed.core.clients import Clients, Split
from perfed.datasets.pool import TEST, TRAIN, UNDECIDED, VAL, Pool

_SPLIT = 2  # the random stream of this purpose


def assemble(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig, seed: int) -> Clients:
    """Split every client's rows and lay the clients one after another."""
    rng = np.random.default_rng([seed, _SPLIT])
    parts = [_parts(pool, r, config, rng) for r in rows]
    tables = {}
    for name, code in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        chosen = [r[part == code] for r, part in zip(rows, parts, strict=True)]
        index = np.concatenate(chosen)
        x, y = torch.from_numpy(pool.x[index]), torch.from_numpy(pool.y[index])
        tables[name] = Split(x, y, tuple(len(c) for c in chosen))
    put = lambda a: None if a is None else torch.tensor(a, dtype=torch.float32).reshape(-1, 1, 1)
    names = _names(pool, rows, config)
    known = {"classes": pool.classes, "labels": pool.labels, "columns": pool.columns}
    return Clients(names, **tables, **known, mean=put(pool.mean), std=put(pool.std))


def divide(y: np.ndarray, unit: np.ndarray | None, test: float, val: float, rng: np.random.Generator) -> np.ndarray:
    """TRAIN, VAL or TEST for each row of one client, stratified by class, units kept whole.

    >>> divide(np.zeros(8), None, 0.25, 0.125, np.random.default_rng(0)).tolist().count(TEST)
    2
    """
    if unit is None:
        label, piece = y, np.arange(len(y))
    else:
        _, first, piece = np.unique(unit, return_index=True, return_inverse=True)
        label = y[first]
    n = len(label)
    order = rng.permutation(n)
    order = order[np.argsort(label[order], kind="stable")]
    least = 1 if len(y) >= 3 else 0
    tests = min(max(int(n * test + 0.5), least), n - 1)
    vals = min(int(n * val + 0.5), n - 1 - tests)
    part = np.full(n, TRAIN)
    part[order[_spread(n, tests, rng)]] = TEST
    rest = order[part[order] == TRAIN]
    part[rest[_spread(len(rest), vals, rng)]] = VAL
    return part[piece]


def _spread(n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Choose k of n places at equal distances: in a list sorted by class, every class gives its share."""
    if k == 0:
        return np.empty(0, dtype=np.int64)
    return np.minimum(((np.arange(k) + rng.random()) * (n / k)).astype(np.int64), n - 1)


def _parts(pool: Pool, rows: np.ndarray, config: DataConfig, rng: np.random.Generator) -> np.ndarray:
    if pool.part is not None and (pool.part[rows] != UNDECIDED).all():
        return pool.part[rows]
    return divide(pool.y[rows], None if pool.unit is None else pool.unit[rows], config.test, config.val, rng)


def _names(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig) -> tuple[str, ...]:
    from perfed.partition import scheme

    if scheme(config) == "natural" and pool.owner is not None and pool.names is not None:
        return tuple(pool.names[pool.owner[r[0]]] for r in rows)
    width = max(2, len(str(len(rows) - 1)))
    return tuple(f"client_{i:0{width}d}" for i in range(len(rows)))
