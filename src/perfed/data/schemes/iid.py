"""IID: shuffled and dealt evenly."""

from __future__ import annotations

import numpy as np

from perfed.data.allocation import Shares
from perfed.data.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, _rng: np.random.Generator) -> Shares:
    """Give all samples away in pieces whose sizes differ by one at most.

    Args:
        sizes: [classes], the samples of each class.
        config: clients.

    Returns:
        How many samples each client gets, whatever their classes.
    """
    each, more = divmod(int(sizes.sum()), config.clients)
    return Shares((each + (np.arange(config.clients) < more))[None], sizes.sum(keepdims=True))
