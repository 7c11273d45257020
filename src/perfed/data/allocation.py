"""What a partition scheme decides: the number of samples that every client gets, of each class or of all.

It is drawn once. Where a data set comes in official parts (training, validation, test), it is drawn for the training
samples, and the same fractions are dealt from the other parts: a client has one distribution in all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfed.core.errors import Problem


@dataclass(frozen=True)
class Shares:
    """Whole numbers of samples, and what they are numbers of.

    Attributes:
        counts: [strata, clients]; strata are classes, or there is a single one where labels play no part.
        total: [strata], the samples there were to share out; not all need be used.
    """

    counts: np.ndarray
    total: np.ndarray

    def deal(self, strata: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Deal rows to clients, in random order within a stratum.

        Args:
            strata: rows, grouped as the counts are.
            rng: shuffles them.

        Returns:
            The rows of each client, in increasing order.
        """
        pieces = []
        for rows, counts, total in zip(strata, self.counts, self.total, strict=True):
            # Whole numbers all the way: the rows that were counted give exactly the counts, others the same fractions.
            ends = np.cumsum(counts) * len(rows) // max(int(total), 1)
            pieces.append(np.split(rng.permutation(rows), ends)[:-1])
        return [np.sort(np.concatenate(piece)) for piece in zip(*pieces, strict=True)]


def of_sizes(weights: np.ndarray, sizes: np.ndarray, least: int) -> Shares:
    """Share all samples out in proportion to the clients' weights, whatever the samples' classes."""
    return Shares(in_proportion(weights, int(sizes.sum()), least)[None], sizes.sum(keepdims=True))


def refuse_too_small(clients: int, least: int, total: int) -> None:
    """Refuse minimum sizes that cannot be."""
    if clients * least > total:
        raise Problem(
            f"{clients} clients with at least {least} samples each need {clients * least} samples, but there are "
            f"{total}: lower data.clients or data.min_samples"
        )


def in_proportion(weights: np.ndarray, total: int, least: int) -> np.ndarray:
    """Return whole sizes that sum to `total`, in proportion to `weights` but for what would fall below `least`.

    >>> in_proportion(np.array([8.0, 1.0, 1.0]), 100, 20).tolist()
    [60, 20, 20]
    """
    refuse_too_small(len(weights), least, total)
    low = np.zeros(len(weights), dtype=bool)
    while True:
        sizes = np.where(low, least, weights * ((total - least * low.sum()) / weights[~low].sum()))
        if not (sizes < least).any():
            break
        low |= sizes < least
    whole = np.floor(sizes + 1e-9).astype(np.int64)
    missing = total - whole.sum()
    whole[np.argsort(whole - sizes, kind="stable")[:missing]] += 1  # what lost most by rounding down gets the rest
    return whole
