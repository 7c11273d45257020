"""From a pool and its clients' rows to three tables; a client's train, val and test share one distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from perfed.core.clients import SPLITS, Clients, Split
from perfed.data.order import order
from perfed.data.pool import TEST, TRAIN, UNDECIDED, VAL, Pool, spread
from perfed.data.schemes import SETTINGS, scheme
from perfed.data.skew import Skews, draw
from perfed.data.unevenness import measures
from perfed.training.config import DataConfig

_SPLIT = 2  # the random stream of this purpose


def assemble(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig, seed: int) -> Clients:
    """Split every client's rows, skew its samples where asked to, and lay the clients one after another."""
    rng = np.random.default_rng([seed, _SPLIT])
    parts = [_parts(pool, r, config, rng) for r in rows]
    skews = draw(config, len(rows), pool.classes, pool.x.shape[1:], seed)
    chosen = {code: [r[part == code] for r, part in zip(rows, parts, strict=True)] for code in (TRAIN, VAL, TEST)}
    labels = {code: [skews.labels(pool.y[r], i, code) for i, r in enumerate(chosen[code])] for code in chosen}
    counts = np.stack([np.bincount(y, minlength=pool.classes) for y in labels[TRAIN]])
    places = order(counts, config, seed)
    tables = {}
    for name, code in zip(SPLITS, (TRAIN, VAL, TEST), strict=True):
        size = tuple(len(chosen[code][i]) for i in places)
        x, end = pool.x[np.concatenate([chosen[code][i] for i in places])], np.cumsum(size)
        for i, n, stop in zip(places, size, end, strict=True):
            x[stop - n : stop] = skews.features(x[stop - n : stop], int(i), code)
        y = np.concatenate([labels[code][i] for i in places])
        tables[name] = Split(torch.from_numpy(x), torch.from_numpy(y), size)
    put = lambda a: None if a is None else torch.tensor(a, dtype=torch.float32).reshape(-1, 1, 1)
    source = _domains(pool, rows, config)
    names = _names(pool, rows, config, source)
    known = {"classes": pool.classes, "labels": pool.labels, "columns": pool.columns}
    known |= {"partition": _about(config, skews, places, measures(counts[places]), pool.note)}
    if source is not None:
        known["partition"]["domains"] = [source[i] for i in places]
    return Clients(tuple(names[i] for i in places), **tables, **known, mean=put(pool.mean), std=put(pool.std))


def _about(config: DataConfig, skews: Skews, places: np.ndarray, measured: dict[str, Any], note: str) -> dict[str, Any]:
    """How these clients came about, in plain values and in the order in which they stand."""
    name = scheme(config)
    return {
        "scheme": name,
        "settings": {key: getattr(config, key) for key in SETTINGS.get(name, ())},
        "split": config.split,
        "team_order": config.team_order,
        "dealt": places.tolist(),
        "skews": skews.about(places),
        "measures": measured,
        **({"note": note} if note else {}),
    }


def divide(
    y: np.ndarray, unit: np.ndarray | None, test: float, val: float, rng: np.random.Generator, stratify: bool = True
) -> np.ndarray:
    """TRAIN, VAL or TEST for each row of one client, stratified by class or not, units kept whole.

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
    if stratify:
        order = order[np.argsort(label[order], kind="stable")]
    least = 1 if len(y) >= 3 else 0
    tests = min(max(int(n * test + 0.5), least), n - 1)
    vals = min(int(n * val + 0.5), n - 1 - tests)
    part = np.full(n, TRAIN)
    part[order[spread(n, tests, rng)]] = TEST
    rest = order[part[order] == TRAIN]
    part[rest[spread(len(rest), vals, rng)]] = VAL
    return part[piece]


def _parts(pool: Pool, rows: np.ndarray, config: DataConfig, rng: np.random.Generator) -> np.ndarray:
    if pool.part is not None and (pool.part[rows] != UNDECIDED).all():
        return pool.part[rows]
    unit = None if pool.unit is None else pool.unit[rows]
    return divide(pool.y[rows], unit, config.test, config.val, rng, config.stratify)


def _names(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig, source: list[str] | None) -> tuple[str, ...]:
    if scheme(config) == "natural" and pool.owner is not None and pool.names is not None:
        return tuple(pool.names[pool.owner[r[0]]] for r in rows)
    width = max(2, len(str(len(rows) - 1)))
    return tuple(f"{kind}_{i:0{width}d}" for i, kind in enumerate(source or ["client"] * len(rows)))


def _domains(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig) -> list[str] | None:
    """Where each client's samples come from, in a partition by domains."""
    if scheme(config) != "domains" or pool.owner is None:
        return None
    owners = [int(pool.owner[r[0]]) for r in rows]
    return [f"domain{owner}" if pool.names is None else pool.names[owner] for owner in owners]
