"""Statistics over clients: how a number per client is spread, and what a method gains over a baseline.

Accuracies are shares, not percent. A client without samples has no accuracy: its number is NaN, and counts nowhere.
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


def spread(accuracy: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """Describe how accuracies are spread over clients.

    Args:
        accuracy: a number for each client.
        samples: the samples that each client's number was measured on.

    Returns:
        `mean`, `std` and `variance` over clients; `pooled`, the mean over all samples; `p10`, the 10th percentile;
        `worst10`, the mean of the worst tenth of the clients (see `tenth`); `jain`, Jain's index of fairness. All of
        them are NaN where no client has an accuracy.

    >>> numbers = spread(np.array([0.5, 1.0]), np.array([30, 10]))
    >>> numbers["mean"], numbers["pooled"], numbers["std"], numbers["jain"]
    (0.75, 0.625, 0.25, 0.9)
    """
    known = ~np.isnan(accuracy)
    a, n = accuracy[known], samples[known]
    if not len(a):
        return dict.fromkeys(SPREAD, float("nan"))
    worst = np.sort(a)[: tenth(len(a))]
    squares = float((a**2).sum())
    return {
        "mean": float(a.mean()),
        "pooled": float((a * n).sum() / n.sum()),
        "std": float(a.std()),
        "variance": float(a.var()),
        "p10": float(np.percentile(a, 10)),
        "worst10": float(worst.mean()),
        "jain": float(a.sum() ** 2 / (len(a) * squares)) if squares else 1.0,  # all alike: fair, however bad
    }


def gain_over(baseline: np.ndarray, accuracy: np.ndarray) -> dict[str, float]:
    """Describe what clients gain over a baseline.

    Args:
        baseline: the baseline's accuracy for each client.
        accuracy: a method's accuracy for each client.

    Returns:
        `mean` and `std` over clients of the difference, and `positive`, the share of the clients that gain.
    """
    gain, rounded = _gains(baseline, accuracy)
    return {"mean": float(gain.mean()), "std": float(gain.std()), "positive": float((rounded > 0).mean())}


def gain_with_test(baseline: np.ndarray, accuracy: np.ndarray) -> dict[str, Any]:
    """Describe what clients gain over a baseline, with Wilcoxon's signed-rank test.

    Args:
        baseline: the baseline's accuracy for each client.
        accuracy: a method's accuracy for each client.

    Returns:
        `mean` and `std` over clients of the difference; how many `clients` count, and how many are `better` and
        `worse` off; `p`, the test's. A number is None where no client counts.
    """
    from scipy.stats import wilcoxon  # takes long to import

    gain, rounded = _gains(baseline, accuracy)
    if not len(gain):
        return {"mean": None, "std": None, "better": 0, "worse": 0, "clients": 0, "p": None}
    # All differences zero: nothing to test.
    p = float(np.asarray(wilcoxon(rounded, zero_method="zsplit"))[1]) if np.any(rounded) else 1.0
    better, worse = int((rounded > 0).sum()), int((rounded < 0).sum())
    about = {"mean": float(gain.mean()), "std": float(gain.std())}
    return {**about, "better": better, "worse": worse, "clients": len(gain), "p": p}


def _gains(baseline: np.ndarray, accuracy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences that are known; rounded, equal accuracies are ties, whatever their last bits say."""
    gain = (accuracy - baseline)[~np.isnan(accuracy - baseline)]
    return gain, np.round(gain, 6)
