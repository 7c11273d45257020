"""Log-normal: log-normal sizes, labels are mixed alike: quantity skew."""

from __future__ import annotations

import numpy as np

from perfed.data.allocation import Shares, of_sizes
from perfed.data.config import DataConfig

READS = ("log_sigma", "min_samples")


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Size clients in proportion to draws from LogN(0, data.log_sigma); the first parameter cancels.

    Args:
        sizes: [classes], the samples of each class.
        config: clients, log_sigma and min_samples.
        rng: draws the sizes.

    Returns:
        How many samples each client gets, whatever their classes.
    """
    return of_sizes(rng.lognormal(0, config.log_sigma, config.clients), sizes, config.min_samples)
