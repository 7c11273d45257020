"""Natural: by who the samples come from: people, writers, devices."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.pool import Pool


def rows(pool: Pool, config: DataConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the rows of each owner; with more owners than data.clients, of a random choice, in their order.

    Args:
        pool: all samples, with their owners.
        config: clients, at most this many; 0 is all.
        rng: draws the owners.

    Returns:
        The rows of each client.
    """
    if pool.owner is None:
        raise Problem(f"data set '{config.name}' does not say who its samples come from: choose another data.partition")
    order = np.argsort(pool.owner, kind="stable")
    _, start = np.unique(pool.owner[order], return_index=True)
    owners = np.split(order, start[1:])
    # The user's own files are all meant, whatever the number of clients is.
    limit = 0 if config.name == "folder" else config.clients
    if 0 < limit < len(owners):
        owners = [owners[index] for index in np.sort(rng.choice(len(owners), limit, replace=False))]
    return owners
