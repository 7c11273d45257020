"""Pairs: classes two by two (k by k), each pair for as many clients that follow one another.

pFedMB, Table 1.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.config import DataConfig

READS = ("classes_per_client",)
BY_LABEL = True


def share(sizes: np.ndarray, config: DataConfig, _rng: np.random.Generator) -> Shares:
    """Give the first k classes to the first clients, evenly, and so on; what does not come out even stays unused.

    Args:
        sizes: [classes], the samples of each class.
        config: clients and classes_per_client.

    Returns:
        How many samples of each class each client gets.
    """
    clients, per_client, present = config.clients, config.classes_per_client, np.flatnonzero(sizes)
    if len(present) % per_client:
        raise Problem(
            f"data.classes_per_client is {per_client}, which does not divide the {len(present)} classes into groups"
        )
    groups = len(present) // per_client
    if clients % groups:
        raise Problem(
            f"data.clients is {clients}, but 'pairs' needs a multiple of {groups}: there are {groups} groups of "
            f"{per_client} classes, each for the same number of clients"
        )
    holders = clients // groups
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for index, label in enumerate(present):
        first = index // per_client * holders
        counts[label, first : first + holders] = sizes[label] // holders
    if (counts.sum(axis=0) == 0).any():
        raise Problem(
            f"{clients} clients are too many for 'pairs': a class has fewer samples than clients that hold it"
        )
    return Shares(counts, sizes)
