"""A pool becomes clients: the rows that a partition scheme gives to each."""

from __future__ import annotations

import math

import numpy as np

from perfed.core.errors import Problem
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.data.pool import TEST, TRAIN, VAL, Pool
from perfed.discover import load_member

_PARTITION = 1  # the random stream of this purpose


def partition(pool: Pool, config: DataConfig, seed: int) -> list[np.ndarray]:
    """Deal the rows of a pool to clients.

    Where the pool's rows are in parts, the scheme is drawn for the training rows and applied to every part alike.

    Args:
        pool: all samples.
        config: names the scheme and holds its settings.
        seed: what the scheme's draws follow from.

    Returns:
        The rows of each client, in increasing order; every row has at most one client.
    """
    name = scheme(config)
    rng = np.random.default_rng([seed, _PARTITION])
    module = load_member("perfed.data.schemes", name)
    if hasattr(module, "rows"):
        return _checked(module.rows(pool, config, rng), len(pool.y), config, name)
    codes = (TRAIN, VAL, TEST)
    parts = [np.arange(len(pool.y))] if pool.part is None else [np.flatnonzero(pool.part == code) for code in codes]
    if config.clients == 0:
        raise Problem(f"data.clients must be at least 1 with the partition '{name}'")
    if pool.kinds == 1 and getattr(module, "BY_LABEL", False):
        raise Problem(
            f"partition '{name}' deals samples by their labels, and nothing tells those of '{config.name}' apart "
            f"(task '{pool.task}'): use iid, powerlaw or lognormal"
        )
    if config.clients > len(parts[0]):
        raise Problem(f"data.clients is {config.clients}, but there are only {len(parts[0])} samples")
    strata, shape = module.strata(pool, config) if hasattr(module, "strata") else (pool.stratum, (pool.kinds,))
    sizes = np.bincount(strata[parts[0]], minlength=math.prod(shape)).reshape(shape)
    shares = module.share(sizes, config, rng)
    strata = strata if len(shares.total) == sizes.size else np.zeros_like(strata)
    grouped = lambda rows: [rows[strata[rows] == stratum] for stratum in range(len(shares.total))]
    dealt = [shares.deal(grouped(rows), rng) for rows in parts]
    return _checked([np.concatenate(pieces) for pieces in zip(*dealt, strict=True)], len(pool.y), config, name)


def _checked(rows: list[np.ndarray], count: int, config: DataConfig, name: str) -> list[np.ndarray]:
    """Return what a scheme dealt, each client's rows in increasing order; refuse what is no partition.

    Args:
        rows: the rows of each client.
        count: how many rows there are.
        config: the number of clients; the natural ones are as many as there are.
        name: the scheme.
    """
    scheme = f"partition '{name}'"
    if name != "natural" and len(rows) != config.clients:
        raise Problem(f"{scheme} deals rows to {len(rows)} clients, but data.clients is {config.clients}")
    rows = [np.asarray(mine) for mine in rows]
    for client, mine in enumerate(rows):
        if mine.ndim != 1 or not len(mine):
            raise Problem(f"{scheme} deals no rows to client {client}: each needs a list of at least one row")
        if mine.dtype.kind != "i":
            raise Problem(f"{scheme} deals {mine.dtype} to client {client}, but rows are whole numbers")
        if mine.min() < 0 or mine.max() >= count:
            row = mine.min() if mine.min() < 0 else mine.max()
            raise Problem(f"{scheme} deals row {row} to client {client}, but rows are numbered from 0 to {count - 1}")
    times = np.bincount(np.concatenate(rows), minlength=count)
    if times.max() > 1:
        row = int(np.argmax(times))
        owners = [str(client) for client, mine in enumerate(rows) for _ in range(int((mine == row).sum()))]
        raise Problem(f"{scheme} deals row {row} more than once, to the clients {', '.join(owners)}")
    return [np.sort(mine) for mine in rows]


def settings(config: DataConfig) -> dict[str, object]:
    """Return what `config` says of the settings that its scheme reads."""
    reads = getattr(load_member("perfed.data.schemes", scheme(config)), "READS", ())
    return {name: getattr(config, name) for name in reads}
