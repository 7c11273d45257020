"""Labels round the ring, log-normal sizes: what pFedMT's (and pFedMe's) code does with MNIST."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.training.config import DataConfig

FIRST, LOW, HIGH, SPREAD = 10, 300, 600, 2.0  # as in the code; made for the 7,000 images per class of MNIST
FEW = 20  # so many clients or fewer get twice as much


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Client u holds the k labels from u on: 10 samples of each, then log-normal share + U{300..600} while they last.

    The log-normal shares of a class are normalised over all clients and places, though a class is held by a few only:
    so the uniform number makes up most of a size. This is the code's, and kept.
    """
    clients, k, classes = config.clients, config.classes_per_client, len(sizes)
    if k > classes:
        raise Problem(f"data.classes_per_client is {k}, but there are only {classes} classes")
    labels = (np.arange(clients)[:, None] + np.arange(k)) % classes  # [clients, k]
    counts = np.zeros((classes, clients), dtype=np.int64)
    np.add.at(counts, (labels, np.arange(clients)[:, None]), FIRST)
    used = counts.sum(axis=1)
    if (used > sizes).any():
        c = int(np.argmax(used > sizes))
        raise Problem(
            f"{clients} clients are too many for 'ring': they need {used[c]} samples of class {c}, not {sizes[c]}"
        )
    drawn = rng.lognormal(0, SPREAD, (classes, clients, k))
    drawn *= np.maximum(sizes - clients, 0)[:, None, None] / drawn.sum(axis=(1, 2), keepdims=True)
    lap = max(clients // classes, 1)
    for u in range(clients):
        for j, c in enumerate(labels[u]):
            more = int(drawn[c, u // lap, j]) + int(rng.integers(LOW, HIGH + 1))
            more *= 2 if clients <= FEW else 1
            if used[c] + more < sizes[c]:
                counts[c, u] += more
                used[c] += more
    return Shares(counts, sizes)
