"""Ring: client u holds the labels u, u + 1, ... (k of them) in log-normal numbers; made for MNIST.

What pFedMT's (and pFedMe's) code does.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.config import DataConfig

READS = ("classes_per_client",)
BY_LABEL = True
FIRST, LOW, HIGH, SPREAD = 10, 300, 600, 2.0  # as in the code; made for the 7,000 images per class of MNIST
FEW = 20  # so many clients or fewer get twice as much


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Give client u 10 samples of each of its labels, then log-normal share + U{300..600} while they last.

    The log-normal shares of a class are normalised over all clients and places, though a class is held by a few only:
    so the uniform number makes up most of a size. This is the code's, and kept.

    Args:
        sizes: [classes], the samples of each class.
        config: clients and classes_per_client.
        rng: draws the numbers of samples.

    Returns:
        How many samples of each class each client gets.
    """
    clients, per_client, classes = config.clients, config.classes_per_client, len(sizes)
    if per_client > classes:
        raise Problem(f"data.classes_per_client is {per_client}, but there are only {classes} classes")
    labels = (np.arange(clients)[:, None] + np.arange(per_client)) % classes  # [clients, per_client]
    counts = np.zeros((classes, clients), dtype=np.int64)
    np.add.at(counts, (labels, np.arange(clients)[:, None]), FIRST)
    used = counts.sum(axis=1)
    if (used > sizes).any():
        label = int(np.argmax(used > sizes))
        raise Problem(
            f"{clients} clients are too many for 'ring': they need {used[label]} samples of class {label}, "
            f"not {sizes[label]}"
        )
    drawn = rng.lognormal(0, SPREAD, (classes, clients, per_client))
    drawn *= np.maximum(sizes - clients, 0)[:, None, None] / drawn.sum(axis=(1, 2), keepdims=True)
    lap = max(clients // classes, 1)
    for client in range(clients):
        for place, label in enumerate(labels[client]):
            more = int(drawn[label, client // lap, place]) + int(rng.integers(LOW, HIGH + 1))
            more *= 2 if clients <= FEW else 1
            if used[label] + more < sizes[label]:
                counts[label, client] += more
                used[label] += more
    return Shares(counts, sizes)
