"""Every client holds k random classes, of each an uneven part: pFedMB, "random 20 classes with different size"."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.training.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Client i gets u_ic / sum_j u_jc of class c, over the clients j that hold it; u ~ U(share_low, share_high).

    Classes that nobody drew stay unused, as in the paper's text.
    """
    clients, k, present = config.clients, config.classes_per_client, np.flatnonzero(sizes)
    if k > len(present):
        raise Problem(f"data.classes_per_client is {k}, but there are only {len(present)} classes")
    holds = np.zeros((clients, len(sizes)), dtype=bool)
    for row in holds:
        row[rng.choice(present, k, replace=False)] = True
    u = np.where(holds, rng.uniform(config.share_low, config.share_high, holds.shape), 0.0).T
    held = u.sum(axis=1, keepdims=True)
    ends = np.floor(np.cumsum(u, axis=1) / np.where(held > 0, held, 1) * sizes[:, None] + 1e-6).astype(np.int64)
    counts = np.diff(ends, axis=1, prepend=0)
    if (counts[holds.T] == 0).any():
        raise Problem(
            f"{clients} clients of {k} classes are too many: some client would get no sample of a class that it holds; "
            "lower data.clients or data.classes_per_client"
        )
    return Shares(counts, sizes)
