"""How uneven clients are, from how many samples of each label each of them holds.

p_i is client i's label distribution and p that of all samples together.

- EMD_i = sum_y |p_i(y) - p(y)|, from 0 (as all together) to 2; total variation is half of it
- 1-Wasserstein distance of two clients' label distributions. The ground metric is the Euclidean distance of one-hot
  labels: sqrt(2) between any two labels. All mass that moves then moves as far, so W_1 = sqrt(2) * total variation
- Gini coefficient of the sizes: 0 where all are equal, near 1 where one client has almost everything
"""

from __future__ import annotations

from typing import Any

import numpy as np


def emd(counts: np.ndarray) -> np.ndarray:
    """EMD of every client's labels to all labels together; counts are [clients, classes].

    >>> emd(np.array([[4, 0], [0, 4]])).tolist()
    [1.0, 1.0]
    """
    return np.abs(_mix(counts) - counts.sum(axis=0) / counts.sum()).sum(axis=1)


def wasserstein(counts: np.ndarray) -> np.ndarray:
    """The mean 1-Wasserstein distance of every client's labels to those of each other client; 0 for one client."""
    p, n = _mix(counts), len(counts)
    # Per label, sum_j |p_i - p_j| = p_i (2 r - n) + sum of all - 2 sum of the r smaller ones: no loop over pairs.
    order = np.argsort(p, axis=0, kind="stable")
    ranked = np.take_along_axis(p, order, axis=0)
    smaller = np.cumsum(ranked, axis=0) - ranked
    sums = ranked * (2 * np.arange(n)[:, None] - n) + ranked.sum(axis=0) - 2 * smaller
    apart = np.empty_like(p)
    np.put_along_axis(apart, order, sums, axis=0)
    return np.sqrt(2) / 2 * np.maximum(apart.sum(axis=1), 0) / max(n - 1, 1)


def gini(sizes: np.ndarray) -> float:
    """Mean absolute difference of two sizes over twice their mean.

    >>> gini(np.array([1, 3]))
    0.25
    """
    ranked, n = np.sort(sizes), len(sizes)
    return float(((2 * np.arange(1, n + 1) - n - 1) * ranked).sum() / (n * ranked.sum()))


def measures(counts: np.ndarray) -> dict[str, Any]:
    """All measures as plain values: means over clients, and per client."""
    far, apart, sizes = emd(counts), wasserstein(counts), counts.sum(axis=1)
    short = lambda values: [round(v, 6) for v in values.tolist()]
    return {
        "emd": round(float(far.mean()), 6),
        "total_variation": round(float(far.mean()) / 2, 6),
        "wasserstein": round(float(apart.mean()), 6),
        "gini": round(gini(sizes), 6),
        "largest": int(sizes.max()),
        "smallest": int(sizes.min()),
        "max_over_min": round(float(sizes.max() / max(sizes.min(), 1)), 6),
        "classes": [int(v) for v in (counts > 0).sum(axis=1)],
        "emd_per_client": short(far),
        "wasserstein_per_client": short(apart),
    }


def _mix(counts: np.ndarray) -> np.ndarray:
    """Label distributions, one row per client; a client without samples counts as all zeros."""
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
