"""Classes: every client holds k classes and the same number of samples.

pFedMB: "random 2 classes, same data size".
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.config import DataConfig

READS = ("classes_per_client",)
BY_LABEL = True
ATTEMPTS = 1000


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Deal k classes to each client, then the same number of samples of each class it holds.

    A class gives the same to each of its holders; what the largest classes have too much stays unused.

    Args:
        sizes: [classes], the samples of each class.
        config: clients and classes_per_client.
        rng: shuffles the classes.

    Returns:
        How many samples of each class each client gets.
    """
    clients, per_client = config.clients, config.classes_per_client
    if per_client > np.count_nonzero(sizes):
        raise Problem(f"data.classes_per_client is {per_client}, but there are only {np.count_nonzero(sizes)} classes")
    hands = deal(sizes, clients, per_client, rng)
    holders = np.bincount(hands.ravel(), minlength=len(sizes))
    quota = (sizes[holders > 0] // holders[holders > 0]).min()
    if quota == 0:
        raise Problem(
            f"{clients} clients of {per_client} classes are too many: some class has fewer samples than clients that "
            "hold it; lower data.clients or data.classes_per_client"
        )
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    counts[hands, np.arange(clients)[:, None]] = quota
    return Shares(counts, sizes)


def deal(sizes: np.ndarray, clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Deal classes like cards: each class equally often, none twice in a hand.

    Args:
        sizes: [classes], the samples of each class; a class without samples is not dealt.
        clients: how many hands.
        per_client: classes in a hand.
        rng: shuffles the deck.

    Returns:
        The classes of each client, [clients, per_client].
    """
    present = np.flatnonzero(sizes)
    each, more = divmod(clients * per_client, len(present))
    # Where it does not come out even, the largest classes are held once more; equal ones in random order.
    largest = np.lexsort((rng.random(len(present)), -sizes[present]))
    copies = np.full(len(present), each)
    copies[largest[:more]] += 1
    deck = np.repeat(present, copies)
    hands = rng.permutation(deck).reshape(clients, per_client)
    for _ in range(ATTEMPTS):
        if not _holds_twice(hands).any():
            return hands
        hands = rng.permutation(deck).reshape(clients, per_client)
    return _repair(hands, len(sizes), rng)


def _holds_twice(hands: np.ndarray) -> np.ndarray:
    """Mark the hands that hold a class more than once."""
    return (np.diff(np.sort(hands, axis=1), axis=1) == 0).any(axis=1)


def _repair(hands: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Swap cards until no class is twice in a hand: with many clients a whole deal almost never comes out right."""
    hands = hands.copy()
    copies = np.stack([np.bincount(hand, minlength=classes) for hand in hands])  # [clients, classes]
    stuck = 0
    while (doubles := np.argwhere(copies > 1)).size:
        client, double = doubles[rng.integers(len(doubles))]
        # The partner lacks this class and holds another that the client lacks: no hand is worse after the swap.
        swaps = np.argwhere((copies > 0) & (copies[client] == 0) & (copies[:, [double]] == 0))
        if not len(swaps):
            stuck += 1
            if stuck > ATTEMPTS:
                raise Problem("no way was found to deal different classes to every client: change data.clients")
            continue
        partner, other = swaps[rng.integers(len(swaps))]
        hands[client, np.flatnonzero(hands[client] == double)[0]] = other
        hands[partner, np.flatnonzero(hands[partner] == other)[0]] = double
        copies[[client, partner], [double, other]] -= 1
        copies[[client, partner], [other, double]] += 1
    return hands
