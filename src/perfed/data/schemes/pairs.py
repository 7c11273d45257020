"""Classes two by two (or k by k), each pair of classes for a pair of clients: pFedMB, Table 1."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.training.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, _rng: np.random.Generator) -> Shares:
    """The first k classes go to the first clients, evenly, and so on; what does not come out even stays unused."""
    clients, k, present = config.clients, config.classes_per_client, np.flatnonzero(sizes)
    if len(present) % k:
        raise Problem(f"data.classes_per_client is {k}, which does not divide the {len(present)} classes into groups")
    groups = len(present) // k
    if clients % groups:
        raise Problem(
            f"data.clients is {clients}, but 'pairs' needs a multiple of {groups}: there are {groups} groups of "
            f"{k} classes, each for the same number of clients"
        )
    holders = clients // groups
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for at, c in enumerate(present):
        first = at // k * holders
        counts[c, first : first + holders] = sizes[c] // holders
    if (counts.sum(axis=0) == 0).any():
        raise Problem(
            f"{clients} clients are too many for 'pairs': a class has fewer samples than clients that hold it"
        )
    return Shares(counts, sizes)
