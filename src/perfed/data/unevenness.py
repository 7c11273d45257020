"""Measures of how uneven clients are, from how many samples of each label each of them holds.

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
    """Return the EMD of every client's labels to all labels together; counts are [clients, classes].

    >>> emd(np.array([[4, 0], [0, 4]])).tolist()
    [1.0, 1.0]
    """
    return np.abs(_mix(counts) - counts.sum(axis=0) / counts.sum()).sum(axis=1)


def wasserstein(counts: np.ndarray) -> np.ndarray:
    """Return the mean 1-Wasserstein distance of every client's labels to those of the others; 0 for one client."""
    p, clients = _mix(counts), len(counts)
    # Per label, with r the rank: sum_j |p_i - p_j| = p_i (2 r - n) + sum of all - 2 sum of the r smaller: no pairs.
    order = np.argsort(p, axis=0, kind="stable")
    ranked = np.take_along_axis(p, order, axis=0)
    smaller = np.cumsum(ranked, axis=0) - ranked
    sums = ranked * (2 * np.arange(clients)[:, None] - clients) + ranked.sum(axis=0) - 2 * smaller
    distances = np.empty_like(p)
    np.put_along_axis(distances, order, sums, axis=0)
    return np.sqrt(2) / 2 * np.maximum(distances.sum(axis=1), 0) / max(clients - 1, 1)


def gini(sizes: np.ndarray) -> float:
    """Return the mean absolute difference of two sizes over twice their mean.

    >>> gini(np.array([1, 3]))
    0.25
    """
    ranked, clients = np.sort(sizes), len(sizes)
    return float(((2 * np.arange(1, clients + 1) - clients - 1) * ranked).sum() / (clients * ranked.sum()))


def measures(counts: np.ndarray) -> dict[str, Any]:
    """Return all measures as plain values: means over clients, and per client."""
    emds, distances, sizes = emd(counts), wasserstein(counts), counts.sum(axis=1)
    rounded = lambda values: [round(value, 6) for value in values.tolist()]
    return {
        "emd": round(float(emds.mean()), 6),
        "total_variation": round(float(emds.mean()) / 2, 6),
        "wasserstein": round(float(distances.mean()), 6),
        "gini": round(gini(sizes), 6),
        "largest": int(sizes.max()),
        "smallest": int(sizes.min()),
        "max_over_min": round(float(sizes.max() / max(sizes.min(), 1)), 6),
        "classes": (counts > 0).sum(axis=1).tolist(),
        "emd_per_client": rounded(emds),
        "wasserstein_per_client": rounded(distances),
    }


def _mix(counts: np.ndarray) -> np.ndarray:
    """Return label distributions, one row per client; a client without samples counts as all zeros."""
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
