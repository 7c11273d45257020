"""Power law: sizes fall as a power of their rank, labels are mixed alike: quantity skew."""

from __future__ import annotations

import numpy as np

from perfed.data.allocation import Shares, of_sizes
from perfed.data.config import DataConfig

READS = ("power_law", "min_samples")


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Size clients in proportion to rank^-a, a = data.power_law.

    Args:
        sizes: [classes], the samples of each class.
        config: clients, power_law and min_samples.
        rng: draws which client has which rank.

    Returns:
        How many samples each client gets, whatever their classes.
    """
    ranks = rng.permutation(np.arange(1, config.clients + 1))
    return of_sizes(ranks**-config.power_law, sizes, config.min_samples)
