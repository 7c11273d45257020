"""Every client holds k classes and the same number of samples (pFedMB: "random 2 classes, same data size")."""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.training.config import DataConfig

ATTEMPTS = 1000


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Deal k classes to each client, then the same number of samples of each class it holds.

    A class gives the same to each of its holders; what the largest classes have too much stays unused.
    """
    clients, k = config.clients, config.classes_per_client
    if k > np.count_nonzero(sizes):
        raise Problem(f"data.classes_per_client is {k}, but there are only {np.count_nonzero(sizes)} classes")
    hands = deal(sizes, clients, k, rng)
    copies = np.bincount(hands.ravel(), minlength=len(sizes))
    quota = (sizes[copies > 0] // copies[copies > 0]).min()
    if quota == 0:
        raise Problem(
            f"{clients} clients of {k} classes are too many: some class has fewer samples than clients that hold it; "
            "lower data.clients or data.classes_per_client"
        )
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    counts[hands, np.arange(clients)[:, None]] = quota
    return Shares(counts, sizes)


def deal(counts: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The classes of each client, [clients, k]: each class equally often, none twice in a hand."""
    present = np.flatnonzero(counts)
    each, more = divmod(clients * k, len(present))
    # Where it does not come out even, the largest classes are held once more; equal ones in random order.
    largest = np.lexsort((rng.random(len(present)), -counts[present]))
    copies = np.full(len(present), each)
    copies[largest[:more]] += 1
    deck = np.repeat(present, copies)
    hands = rng.permutation(deck).reshape(clients, k)
    for _ in range(ATTEMPTS):
        if not _twice(hands).any():
            return hands
        hands = rng.permutation(deck).reshape(clients, k)
    return _repair(hands, len(counts), rng)


def _twice(hands: np.ndarray) -> np.ndarray:
    """Which hands hold a class more than once."""
    return (np.diff(np.sort(hands, axis=1), axis=1) == 0).any(axis=1)


def _repair(hands: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Swap cards until no class is twice in a hand: with many clients a whole deal almost never comes out right."""
    hands = hands.copy()
    held = np.stack([np.bincount(hand, minlength=classes) for hand in hands])
    stuck = 0
    while (bad := np.argwhere(held > 1)).size:
        i, c = bad[rng.integers(len(bad))]
        # Partners j without c, for a class d that they hold and i does not: both hands gain from the swap or stay.
        swaps = np.argwhere((held > 0) & (held[i] == 0) & (held[:, [c]] == 0))
        if not len(swaps):
            stuck += 1
            if stuck > ATTEMPTS:
                raise Problem("no way was found to deal different classes to every client: change data.clients")
            continue
        j, d = swaps[rng.integers(len(swaps))]
        hands[i, np.flatnonzero(hands[i] == c)[0]], hands[j, np.flatnonzero(hands[j] == d)[0]] = d, c
        held[[i, j], [c, d]] -= 1
        held[[i, j], [d, c]] += 1
    return hands
