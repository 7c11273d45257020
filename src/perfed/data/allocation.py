"""What a scheme decides: how many samples every client gets, of each class or of all.

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
    """Whole numbers of samples, and what they are numbers of."""

    counts: np.ndarray  # [classes, clients], or [1, clients] where labels play no part
    total: np.ndarray  # [classes] or [1]: the samples there were to share out; not all need be used

    def deal(self, strata: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """The rows of each client from rows that are grouped as the counts are; in random order within a group."""
        pieces = []
        for rows, counts, total in zip(strata, self.counts, self.total, strict=True):
            # Whole numbers all the way: the rows that were counted give exactly the counts, others the same fractions.
            ends = np.cumsum(counts) * len(rows) // max(int(total), 1)
            pieces.append(np.split(rng.permutation(rows), ends)[:-1])
        return [np.sort(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]


def enough(clients: int, least: int, total: int) -> None:
    """Refuse minimum sizes that cannot be."""
    if clients * least > total:
        raise Problem(
            f"{clients} clients with at least {least} samples each need {clients * least} samples, but there are "
            f"{total}: lower data.clients or data.min_samples"
        )


def in_proportion(weight: np.ndarray, total: int, least: int) -> np.ndarray:
    """Whole sizes that sum to `total`, in proportion to `weight` but for those that would fall below `least`.

    >>> in_proportion(np.array([8.0, 1.0, 1.0]), 100, 20).tolist()
    [60, 20, 20]
    """
    enough(len(weight), least, total)
    low = np.zeros(len(weight), dtype=bool)
    while True:
        size = np.where(low, least, weight * ((total - least * low.sum()) / weight[~low].sum()))
        if not (size < least).any():
            break
        low |= size < least
    whole = np.floor(size + 1e-9).astype(np.int64)
    short = total - whole.sum()
    whole[np.argsort(whole - size, kind="stable")[:short]] += 1  # who lost most by rounding down gets the rest
    return whole
