"""How far two rankings agree, and how sure a difference is."""

from __future__ import annotations

from itertools import combinations

import numpy as np

RESAMPLES, LEVEL = 2000, 0.95


def ranks(values: np.ndarray) -> np.ndarray:
    """Return places from 1 for the smallest; equal values share the mean of their places.

    >>> ranks(np.array([3.0, 1.0, 3.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    below = (values[:, None] > values).sum(1)
    equal = (values[:, None] == values).sum(1)
    return below + (equal + 1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Correlate the ranks; None where one of the two does not rank at all."""
    return correlation(ranks(a), ranks(b))


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return Pearson's correlation; None where one of the two is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum() / size) if size else None


def kendall(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return Kendall's tau-b: pairs in the same order minus pairs in the opposite one, with ties taken care of."""
    signs = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i, j in combinations(range(len(a)), 2)]
    x, y = np.array(signs).T
    size = float(np.sqrt((x != 0).sum() * (y != 0).sum()))
    return float((x * y).sum() / size) if size else None


def same_order(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Count the pairs in the same order, and the pairs that `a` orders.

    >>> same_order(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    (2, 3)
    """
    pairs = [(a[i] - a[j], b[i] - b[j]) for i, j in combinations(range(len(a)), 2) if a[i] != a[j]]
    return sum(bool(x * y > 0) for x, y in pairs), len(pairs)


def interval(differences: np.ndarray, crossed: bool, seed: int = 0) -> tuple[float, float]:
    """Bootstrap the mean of paired differences, with seeds and clients both drawn with replacement.

    Args:
        differences: [seeds, clients]; NaN counts nowhere.
        crossed: the clients are the same under every seed, so they are drawn once for all seeds; otherwise each seed
            draws its own.
        seed: of the draws.

    Returns:
        The ends of the percentile interval.
    """
    draw = np.random.default_rng(seed)
    S, N = differences.shape
    known, value = ~np.isnan(differences), np.nan_to_num(differences)
    means = np.empty(RESAMPLES)
    for resample in range(RESAMPLES):
        of_seeds = draw.multinomial(S, np.full(S, 1 / S))
        of_clients = draw.multinomial(N, np.full(N, 1 / N), size=1 if crossed else S)
        weight = of_seeds[:, None] * of_clients * known
        means[resample] = (weight * value).sum() / max(weight.sum(), 1)
    low, high = np.percentile(means, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
