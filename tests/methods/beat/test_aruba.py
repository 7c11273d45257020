"""ARUBA against FedAvg whose clients adapt at rates ten times apart; and what a start ten times off leaves of it."""

from pathlib import Path

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
TUNED = str(Path(__file__).with_name("tuned.py"))
TWO = {"classes_per_client": 2}
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_comes_within_a_point_of_the_best_tuned_rate_without_tuning(seed):
    """Here the best of the three is ten times below that of training, and ARUBA stays above it."""
    small, same, large = (accuracy(TUNED, seed, adapt_lr=rate, **TWO) for rate in (0.005, 0.05, 0.5))
    learned, plus = accuracy("aruba", seed, **TWO), accuracy("aruba", seed, c=100.0, **TWO)
    assert learned > large + 0.15
    assert small - 0.012 < learned < small, "a tuned rate is better still"
    assert small - 0.006 < plus < small, "with its own squares added (ARUBA++) half of the rest is gone"
    assert same < learned < same + 0.01, "next to the rate of training the gain is small"


@each_seed
def test_a_start_that_is_ten_times_too_high_costs_most_of_these_rounds(seed):
    """Rates fall with squared gradients, whose sum has to grow first; still it is better than to keep the rate."""
    learned, kept = accuracy("aruba", seed, lr=0.5, **TWO), accuracy(TUNED, seed, lr=0.5, adapt_lr=0.5, **TWO)
    assert learned > kept + 0.005
    assert learned < accuracy("aruba", seed, **TWO) - 0.08


@each_seed
def test_a_start_that_is_ten_times_too_low_costs_next_to_nothing_once_adapted(seed):
    low = accuracy("aruba", seed, lr=0.005, **TWO)
    assert low == pytest.approx(accuracy("aruba", seed, **TWO), abs=0.006)
    assert accuracy("aruba", seed, model="global", lr=0.005, **TWO) < accuracy("aruba", seed, model="global", **TWO)
