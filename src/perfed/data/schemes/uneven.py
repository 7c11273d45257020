"""Uneven: every client holds k random classes, of each an uneven part.

pFedMB: "random 20 classes with different size".
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.config import DataConfig

READS = ("classes_per_client", "share_low", "share_high")
BY_LABEL = True


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Give client i u_ic / sum_j u_jc of class c, over the clients j that hold it; u ~ U(share_low, share_high).

    Classes that nobody drew stay unused, as in the paper's text.

    Args:
        sizes: [classes], the samples of each class.
        config: clients, classes_per_client, share_low and share_high.
        rng: draws the classes and the weights.

    Returns:
        How many samples of each class each client gets.
    """
    clients, per_client, present = config.clients, config.classes_per_client, np.flatnonzero(sizes)
    if per_client > len(present):
        raise Problem(f"data.classes_per_client is {per_client}, but there are only {len(present)} classes")
    holds = np.zeros((clients, len(sizes)), dtype=bool)
    for row in holds:
        row[rng.choice(present, per_client, replace=False)] = True
    weights = np.where(holds, rng.uniform(config.share_low, config.share_high, holds.shape), 0.0).T
    totals = weights.sum(axis=1, keepdims=True)
    fractions = np.cumsum(weights, axis=1) / np.where(totals > 0, totals, 1)
    counts = np.diff(np.floor(fractions * sizes[:, None] + 1e-6).astype(np.int64), axis=1, prepend=0)
    if (counts[holds.T] == 0).any():
        raise Problem(
            f"{clients} clients of {per_client} classes are too many: some client would get no sample of a class that "
            "it holds; lower data.clients or data.classes_per_client"
        )
    return Shares(counts, sizes)
