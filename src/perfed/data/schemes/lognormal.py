"""Quantity skew: log-normal sizes, labels are mixed alike everywhere."""

from __future__ import annotations

import numpy as np

from perfed.data.allocation import Shares, in_proportion
from perfed.training.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Sizes in proportion to draws from LogN(0, data.log_sigma): the first parameter cancels."""
    weight = rng.lognormal(0, config.log_sigma, config.clients)
    return Shares(in_proportion(weight, int(sizes.sum()), config.min_samples)[None], sizes.sum(keepdims=True))
