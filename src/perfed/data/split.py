"""From a pool and its clients' rows to three tables; a client's train, val and test share one distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.errors import few
from perfed.core.task import KINDS, Task
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.data.normalise import normalised
from perfed.data.order import order
from perfed.data.partition import settings
from perfed.data.pool import TEST, TRAIN, UNDECIDED, VAL, Pool, label_tensor, spread
from perfed.data.preparation import words
from perfed.data.skew import Skews, draw, refuse_unfit
from perfed.data.targets import standardised
from perfed.data.unevenness import measures

_SPLIT = 2  # the random stream of this purpose


def assemble(
    pool: Pool,
    rows: Sequence[np.ndarray],
    config: DataConfig,
    seed: int,
    known: Mapping[str, Any] | None = None,
    public: Sequence[int] | np.ndarray = (),
) -> Clients:
    """Split every client's rows, skew its samples where asked to, and lay the clients one after another.

    Args:
        pool: all samples.
        rows: the rows of each client, as the partition dealt them.
        config: the split, the skews and the order of the clients.
        seed: what everything drawn here follows from.
        known: the preparation that models were trained with, for clients that come later.
        public: rows that are nobody's.

    Returns:
        The clients, in the order of data.team_order.
    """
    refuse_unfit(config, pool.task)
    rng = np.random.default_rng([seed, _SPLIT])
    parts = [_parts(pool, mine, config, rng) for mine in rows]
    skews = draw(config, len(rows), pool.classes, pool.x.shape[1:], seed)
    codes = (TRAIN, VAL, TEST)
    chosen = {code: [mine[part == code] for mine, part in zip(rows, parts, strict=True)] for code in codes}
    domains = _domains(pool, rows, config)
    names = _names(pool, rows, config, domains)
    by_name = lambda pieces: dict(zip(names, pieces, strict=True))
    stratum = pool.stratum
    prepared = by_name(rows) | ({"": np.asarray(public)} if len(public) else {})
    pool, preparation = normalised(pool, by_name(chosen[TRAIN]), prepared, config, known)
    pool, preparation = standardised(pool, by_name(chosen[TRAIN]), preparation, known)
    labels = {
        code: [skews.labels(pool.y[mine], client, code) for client, mine in enumerate(chosen[code])] for code in codes
    }
    kinds = labels[TRAIN] if pool.strata is None else [stratum[mine] for mine in chosen[TRAIN]]
    counts = np.stack([np.bincount(mine, minlength=pool.kinds) for mine in kinds])
    places = order(counts, config, seed, skews.kinds)
    tables = {}
    for name, code in zip(SPLITS, codes, strict=True):
        sizes = tuple(len(chosen[code][client]) for client in places)
        x = pool.x[np.concatenate([chosen[code][client] for client in places])]
        for client, size, end in zip(places, sizes, np.cumsum(sizes), strict=True):
            x[end - size : end] = skews.features(x[end - size : end], int(client), code)
        y = np.concatenate([labels[code][client] for client in places])
        tables[name] = Split(torch.from_numpy(x), label_tensor(y), sizes)
    scale = lambda values: None if values is None else torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
    about = _about(config, skews, places, measures(counts[places]), pool)
    classes = pool.task == "classification"
    unseen = [
        np.isin(mine, labels[TRAIN][client], invert=True).sum() * classes for client, mine in enumerate(labels[TEST])
    ]
    notices = _notices(names, counts.sum(axis=1), np.array(unseen), labels[TEST])
    if domains is not None:
        about["domains"] = [domains[client] for client in places]
    described = {"labels": pool.labels, "columns": _columns(pool, preparation), "partition": about}
    described |= {"notices": (*pool.notices, *(words(preparation) if preparation else ()), *notices)}
    described |= _task(pool, preparation)
    described |= {"mean": scale(pool.mean), "std": scale(pool.std), "preparation": preparation}
    if len(public):
        described["public"] = Split(torch.from_numpy(pool.x[public]), label_tensor(pool.y[public]), (len(public),))
        told = (
            f"{len(public):,} samples are public: known to the server, held out before the partition, and no client's"
        )
        described["notices"] += (told,)
    return Clients(tuple(names[client] for client in places), **tables, **described)


def _task(pool: Pool, preparation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how many classes there are, or what else is learned."""
    if pool.task == "classification":
        return {"classes": pool.classes}
    targets = (preparation or {}).get("targets", [])
    units = {"shift": tuple(t["mean"] for t in targets), "scale": tuple(t["std"] or 1.0 for t in targets)}
    task: Task = KINDS[pool.task](pool.classes, **(units if targets else {}))
    return {"task": task}


def _about(
    config: DataConfig, skews: Skews, places: np.ndarray, measured: dict[str, Any], pool: Pool
) -> dict[str, Any]:
    """Return what made these clients, in plain values and in the order in which they stand."""
    return {
        "scheme": scheme(config),
        "settings": settings(config),
        "split": config.split,
        "team_order": config.team_order,
        "dealt": places.tolist(),
        "skews": skews.about(places),
        "measures": measured,
        **({"note": pool.note} if pool.note else {}),
        **({"strata": pool.strata.plain()} if pool.strata is not None else {}),
    }


def _notices(names: Sequence[str], train: np.ndarray, unseen: np.ndarray, test: Sequence[np.ndarray]) -> list[str]:
    """Say which clients cannot train, and whose test samples are of classes that their training samples lack.

    Args:
        names: of the clients.
        train: [clients], their training samples.
        unseen: [clients], their test samples of classes that their training samples lack.
        test: the test labels of each.
    """
    named = lambda flags: few([f"'{name}'" for name, flag in zip(names, flags, strict=True) if flag])
    notices = []
    if (train == 0).any():
        notices.append(
            f"without training samples: {named(train == 0)}; {(train == 0).sum()} of {len(names)} clients do not train "
            "and predict with the server's model"
        )
    apart = (unseen > 0) & (train > 0)
    if apart.any():
        notices.append(
            f"{unseen[apart].sum()} of {sum(map(len, test))} test samples are of classes that their client's training "
            f"samples lack: {named(apart)} ({apart.sum()} of {len(names)} clients)"
        )
    return notices


def divide(
    y: np.ndarray, unit: np.ndarray | None, test: float, val: float, rng: np.random.Generator, stratify: bool = True
) -> np.ndarray:
    """Divide a client's rows into training, validation and test.

    >>> divide(np.zeros(8), None, 0.25, 0.125, np.random.default_rng(0)).tolist().count(TEST)
    2

    Args:
        y: [rows], the labels.
        unit: [rows]; rows with the same number stay in one part. None: every row by itself.
        test: the share of test rows.
        val: the share of validation rows.
        rng: draws the rows.
        stratify: give every class the same shares.

    Returns:
        TRAIN, VAL or TEST for each row.
    """
    if unit is None:
        label, piece = y, np.arange(len(y))
    else:
        _, first, piece = np.unique(unit, return_index=True, return_inverse=True)
        label = y[first]
    count = len(label)
    shuffled = rng.permutation(count)
    if stratify:
        shuffled = shuffled[np.argsort(label[shuffled], kind="stable")]
    least = 1 if len(y) >= 3 else 0
    tests = min(max(int(count * test + 0.5), least), count - 1)
    vals = min(int(count * val + 0.5), count - 1 - tests)
    part = np.full(count, TRAIN)
    part[shuffled[spread(count, tests, rng)]] = TEST
    rest = shuffled[part[shuffled] == TRAIN]
    part[rest[spread(len(rest), vals, rng)]] = VAL
    return part[piece]


def _parts(pool: Pool, rows: np.ndarray, config: DataConfig, rng: np.random.Generator) -> np.ndarray:
    if pool.part is not None and (pool.part[rows] != UNDECIDED).all():
        return pool.part[rows]
    unit = None if pool.unit is None else pool.unit[rows]
    return divide(pool.stratum[rows], unit, config.test, config.val, rng, config.stratify)


def _names(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig, domains: list[str] | None) -> tuple[str, ...]:
    if scheme(config) == "natural" and pool.owner is not None and pool.names is not None:
        return tuple(pool.names[pool.owner[mine[0]]] for mine in rows)
    width = max(2, len(str(len(rows) - 1)))
    return tuple(f"{kind}_{index:0{width}d}" for index, kind in enumerate(domains or ["client"] * len(rows)))


def _columns(pool: Pool, preparation: dict[str, Any] | None) -> tuple[str, ...] | None:
    """Return what the columns are called, in the order in which they were prepared."""
    if pool.columns is None or preparation is None or "columns" not in preparation:
        return pool.columns
    return tuple(column["name"] for column in preparation["columns"])


def _domains(pool: Pool, rows: Sequence[np.ndarray], config: DataConfig) -> list[str] | None:
    """Name the domain that each client's samples come from, in a partition by domains."""
    if scheme(config) != "domains" or pool.owner is None:
        return None
    owners = [int(pool.owner[mine[0]]) for mine in rows]
    return [f"domain{owner}" if pool.names is None else pool.names[owner] for owner in owners]
