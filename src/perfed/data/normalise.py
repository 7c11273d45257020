"""What data.normalise asks for: a pool's samples become what networks get, images and tables alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from perfed.core.errors import Problem, few
from perfed.data.catalog import usual_normalise
from perfed.data.config import DataConfig
from perfed.data.images import moments
from perfed.data.pool import Pool
from perfed.data.preparation import NUMBER, Preparation, join, own, sums
from perfed.data.records import Records

IMAGES, TABLES = ("channel", "half", "none", "federated"), ("federated", "local", "none")
AS_THEY_ARE = ("channel", "none")  # samples of numbers with more than one axis


def choose(pool: Pool, config: DataConfig) -> str:
    """Return how the samples of a pool are normalised; refuse what does not suit them."""
    table, image = pool.x.ndim == 2, pool.x.dtype == np.uint8
    if config.normalise == "auto":
        return resolve(config, pool.x.shape[1:], pool.task)
    allowed = TABLES if table else IMAGES if image else AS_THEY_ARE
    if config.normalise not in allowed:
        kind = "is a table" if table else "has images of bytes" if image else "has samples that stay as they are"
        suits = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise Problem(f"data.normalise '{config.normalise}' does not suit '{config.name}', which {kind}: {suits}")
    return config.normalise


def resolve(config: DataConfig, sample: tuple[int, ...], task: str) -> str:
    """Return how samples of a shape are normalised: what data.normalise says, or what `auto` means for them."""
    if config.normalise != "auto":
        return config.normalise
    if task == "next_token":
        return "none"
    return usual_normalise(config) if len(sample) == 1 else "channel"


def normalised(
    pool: Pool,
    training: Mapping[str, np.ndarray],
    rows: Mapping[str, np.ndarray],
    config: DataConfig,
    known: Mapping[str, Any] | None = None,
) -> tuple[Pool, dict[str, Any] | None]:
    """Make samples of a pool's rows, with statistics of training rows alone.

    Args:
        pool: all rows.
        training: each client's training rows, by its name.
        rows: all rows of each client.
        config: says how.
        known: the preparation that models were trained with, which newcomers share; None: it is made here.

    Returns:
        The pool with other samples, or other means and deviations; the preparation as plain values, where one is made.
    """
    if pool.task == "next_token":
        written = config.name == "folder" and config.normalise == "federated"  # as early run folders have it
        if config.normalise not in ("auto", "none") and not written:
            raise Problem(f"data.normalise '{config.normalise}' does not suit the tokens of '{config.name}'")
        notices = ("data.normalise = federated leaves tokens as they are",) if written else ()
        return replace(pool, notices=(*pool.notices, *notices)), None
    known = known if known and "columns" in known else None
    chosen = choose(pool, config)
    if pool.x.ndim == 2:
        return _table(pool, training, rows, chosen, known)
    if pool.x.dtype != np.uint8 or chosen == "channel":
        return pool, None
    channels = pool.x.shape[1]
    if chosen == "federated":
        mean, std = moments(pool.x[np.concatenate(list(training.values()))])
        traffic = {"up_mean": 3 * NUMBER * channels, "up_own": 0, "down_shared": 2 * NUMBER * channels}
        traffic = {way: size * len(training) for way, size in traffic.items()}
        return replace(pool, mean=mean, std=np.where(std > 0, std, 1.0)), {"normalise": chosen, "traffic": traffic}
    half = np.full(channels, 0.5) if chosen == "half" else None
    return replace(pool, mean=half, std=half), None


def _table(
    pool: Pool,
    training: Mapping[str, np.ndarray],
    rows: Mapping[str, np.ndarray],
    chosen: str,
    known: Mapping[str, Any] | None,
) -> tuple[Pool, dict[str, Any] | None]:
    texts = pool.texts or (None,) * pool.x.shape[1]
    if known is None and chosen == "none" and set(texts) == {None} and np.isfinite(pool.x.sum(dtype=np.float64)):
        return replace(pool, x=pool.x.astype(np.float32, copy=False)), None  # no client has anything to sum up
    sums_of = lambda values, texts: {
        name: sums(Records(values[mine].astype(np.float64), texts)) for name, mine in training.items()
    }
    if chosen == "local" and (untrained := [name for name, mine in training.items() if not len(mine)]):
        raise Problem(
            f"data.normalise 'local' needs training rows of every client, and there are none of: {few(untrained)}"
        )
    if known is None:
        values, plain = pool.x, join(sums_of(pool.x, texts), pool.columns, chosen)
        if plain is None:
            return replace(pool, x=pool.x.astype(np.float32, copy=False)), None
    else:
        shared = Preparation.of(known)
        if shared.named != (pool.columns is not None):
            other = "have no names there" if shared.named else "have names there"
            raise Problem(f"the new clients' files are of another kind than the run's: columns {other}")
        gaps = [column.name for column in shared.columns if column.flag]
        values, notes = shared.align(Records(pool.x, texts, pool.columns), "the new clients' data", (), gaps)
        each = sums_of(values, (None,) * len(shared.columns))
        about = {name: mine for name, client in each.items() if (mine := own(shared, client))}
        plain = {**{key: known[key] for key in ("normalise", "columns", "named")}, "clients": about, "notes": notes}
    shared = Preparation.of(plain)
    x = np.zeros((len(values), len(shared.features)), dtype=np.float32)
    for name, mine in rows.items():
        x[mine] = Preparation.of(plain, name).apply(torch.from_numpy(values[mine])).numpy()
    return replace(pool, x=x), plain
