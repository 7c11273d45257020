"""Quantity skew: sizes fall as a power of their rank, labels are mixed alike everywhere."""

from __future__ import annotations

import numpy as np

from perfed.data.allocation import Shares, in_proportion
from perfed.training.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Sizes in proportion to rank^-a, a = data.power_law; which client has which rank is drawn."""
    weight = rng.permutation(np.arange(1, config.clients + 1)) ** -config.power_law
    return Shares(in_proportion(weight, int(sizes.sum()), config.min_samples)[None], sizes.sum(keepdims=True))
