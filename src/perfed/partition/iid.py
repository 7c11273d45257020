"""Every client draws from the same distribution."""

from __future__ import annotations

import numpy as np

from perfed.config import DataConfig
from perfed.datasets.pool import Pool


def rows(pool: Pool, config: DataConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """All rows, shuffled and cut into pieces whose sizes differ by one at most."""
    return [np.sort(piece) for piece in np.array_split(rng.permutation(len(pool.y)), config.clients)]
