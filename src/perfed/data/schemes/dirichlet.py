"""Dirichlet: each class is shared out by Dirichlet(alpha) proportions: uneven classes and sizes.

As MOON and PGFed do it.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares, refuse_too_small
from perfed.data.config import DataConfig

READS = ("alpha", "min_samples", "cap")
BY_LABEL = True
ATTEMPTS = 200


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Draw until every client has data.min_samples; a small alpha with many clients may have no such draw.

    Args:
        sizes: [classes], the samples of each class.
        config: clients, alpha, min_samples and cap.
        rng: draws the proportions.

    Returns:
        How many samples of each class each client gets.
    """
    clients, least = config.clients, config.min_samples
    refuse_too_small(clients, least, int(sizes.sum()))
    for _ in range(ATTEMPTS):
        counts = _draw(sizes, clients, config.alpha, config.cap, rng)
        if counts is not None and counts.sum(axis=0).min() >= least:
            return Shares(counts, sizes)
    raise Problem(
        f"no Dirichlet({config.alpha:g}) draw in {ATTEMPTS} gave each of {clients} clients at least {least} samples: "
        "raise data.alpha, or lower data.clients or data.min_samples"
    )


def _draw(sizes: np.ndarray, clients: int, alpha: float, cap: bool, rng: np.random.Generator) -> np.ndarray | None:
    """Draw samples per class and client, [classes, clients]; None when only full clients drew a share of some class."""
    totals = np.zeros(clients, dtype=np.int64)
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for label, size in enumerate(sizes):
        drawn = rng.dirichlet(np.full(clients, alpha))
        if cap:
            drawn = np.where(totals < sizes.sum() / clients, drawn, 0.0)  # a client with its fair part gets no more
        if drawn.sum() <= 0:
            return None
        ends = (np.cumsum(drawn / drawn.sum()) * size).astype(np.int64)
        ends[np.flatnonzero(drawn)[-1] :] = size  # a sample lost by rounding must not go to a full client
        counts[label] = np.diff(ends, prepend=0)
        totals += counts[label]
    return counts
