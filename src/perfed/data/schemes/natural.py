"""Every client is who the samples come from."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.pool import Pool
from perfed.training.config import DataConfig


def rows(pool: Pool, config: DataConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each owner; with more owners than data.clients, a random choice of them, in their order."""
    if pool.owner is None:
        raise Problem(f"data set '{config.name}' does not say who its samples come from: choose another data.partition")
    order = np.argsort(pool.owner, kind="stable")
    _, start = np.unique(pool.owner[order], return_index=True)
    owners = np.split(order, start[1:])
    # The user's own files are all meant; elsewhere 0 is all.
    limit = 0 if config.name == "folder" else config.clients
    if 0 < limit < len(owners):
        owners = [owners[i] for i in np.sort(rng.choice(len(owners), limit, replace=False))]
    return owners
