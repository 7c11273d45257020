"""Statistics over clients: how a number per client is spread, and what a method gains over a baseline.

Accuracies are shares, not percent. A client without samples has no score: its number is NaN, and counts nowhere. Where
less is better (errors, perplexity), `sign` is -1: the worst clients have the largest numbers, and a gain is what falls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SPREAD = ("mean", "pooled", "std", "variance", "p10", "worst10", "jain")


def means(values: np.ndarray) -> np.ndarray:
    """Average each row over its numbers that are not NaN; NaN where a row has no others."""
    known = ~np.isnan(values)
    return np.where(known, values, 0).sum(1) / np.where(known.any(1), known.sum(1), np.nan)


def tenth(clients: int) -> int:
    """Return how many of so many clients are a tenth: rounded, a half upwards, and at least one.

    >>> [tenth(clients) for clients in (4, 14, 15, 20, 25)]
    [1, 1, 2, 2, 3]
    """
    return max(1, (clients + 5) // 10)


def spread(scores: np.ndarray, samples: np.ndarray, sign: int = 1) -> dict[str, float]:
    """Describe how scores are spread over clients.

    Args:
        scores: a number for each client.
        samples: the samples that each client's number was measured on.
        sign: -1 where less is better.

    Returns:
        `mean`, `std` and `variance` over clients; `pooled`, the mean over all samples; `p10`, the 10th percentile from
        the worst; `worst10`, the mean of the worst tenth of the clients (see `tenth`); `jain`, Jain's index of
        fairness. All of them are NaN where no client has a score.

    >>> numbers = spread(np.array([0.5, 1.0]), np.array([30, 10]))
    >>> numbers["mean"], numbers["pooled"], numbers["std"], numbers["jain"]
    (0.75, 0.625, 0.25, 0.9)
    """
    known = ~np.isnan(scores)
    a, n = scores[known], samples[known]
    if not len(a):
        return dict.fromkeys(SPREAD, float("nan"))
    worst = sign * np.sort(sign * a)[: tenth(len(a))]
    squares = float((a**2).sum())
    return {
        "mean": float(a.mean()),
        "pooled": float((a * n).sum() / n.sum()),
        "std": float(a.std()),
        "variance": float(a.var()),
        "p10": float(np.percentile(a, 10 if sign > 0 else 90)),
        "worst10": float(worst.mean()),
        "jain": float(a.sum() ** 2 / (len(a) * squares)) if squares else 1.0,  # all alike: fair, however bad
    }


def gain_over(baseline: np.ndarray, scores: np.ndarray, *, sign: int = 1) -> dict[str, float]:
    """Describe what clients gain over a baseline.

    Args:
        baseline: the baseline's score for each client.
        scores: a method's score for each client.
        sign: -1 where less is better.

    Returns:
        `mean` and `std` over clients of what they gain, and `positive`, the share of the clients that gain.
    """
    gain, rounded = _gains(baseline, scores, sign)
    return {"mean": float(gain.mean()), "std": float(gain.std()), "positive": float((rounded > 0).mean())}


def gain_with_test(baseline: np.ndarray, scores: np.ndarray, *, sign: int = 1) -> dict[str, Any]:
    """Describe what clients gain over a baseline, with Wilcoxon's signed-rank test.

    Args:
        baseline: the baseline's score for each client.
        scores: a method's score for each client.
        sign: -1 where less is better.

    Returns:
        `mean` and `std` over clients of what they gain; how many `clients` count, and how many are `better` and
        `worse` off; `p`, the test's. A number is None where no client counts.
    """
    from scipy.stats import wilcoxon  # takes long to import

    gain, rounded = _gains(baseline, scores, sign)
    if not len(gain):
        return {"mean": None, "std": None, "better": 0, "worse": 0, "clients": 0, "p": None}
    # All differences zero: nothing to test.
    p = float(np.asarray(wilcoxon(rounded, zero_method="zsplit"))[1]) if np.any(rounded) else 1.0
    better, worse = int((rounded > 0).sum()), int((rounded < 0).sum())
    about = {"mean": float(gain.mean()), "std": float(gain.std())}
    return {**about, "better": better, "worse": worse, "clients": len(gain), "p": p}


def _gains(baseline: np.ndarray, scores: np.ndarray, sign: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the gains that are finite; and again, where equal scores are ties, whatever their last bits say."""
    known = np.isfinite(baseline) & np.isfinite(scores)
    baseline, scores = baseline[known], scores[known]
    gain = sign * (scores - baseline)
    if sign > 0:
        return gain, np.round(gain, 6)
    size = np.maximum(np.abs(baseline), np.abs(scores))  # an error is of any size, and each client's of its own
    return gain, np.where(np.abs(gain) <= 1e-6 * size, 0.0, gain)
