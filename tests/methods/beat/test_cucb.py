"""The class-imbalance bandit against cohorts that are drawn, and against one that knows the clients' classes."""

import pytest
from beat import accuracy, finished

pytestmark = pytest.mark.slow
# A hundred clients of 80 training samples, ten in a round, 20 steps each; 20 public samples of each class.
MANY = {"samples": 16200, "public": 200, "clients": 100, "participation": 0.1}
UNEVEN = MANY | {"partition": "uneven", "classes_per_client": 2, "share_low": 0.1, "share_high": 0.9}
ROUNDS = (16, 40)  # by then everybody was asked once
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_with_a_class_for_each_client_it_beats_drawn_cohorts_and_guesses_all(seed):
    plain, oracle = accuracy("fedavg", seed, ROUNDS, **MANY), accuracy("cucb", seed, ROUNDS, estimate="oracle", **MANY)
    for how in ({}, {"estimate": "raw", "b": 1.0}):
        found = accuracy("cucb", seed, ROUNDS, **MANY, **how)
        assert found > plain + 0.12
        assert found == pytest.approx(oracle, abs=0.015), "one class is guessed whatever the scale of a guess"


@each_seed
def test_with_two_classes_for_each_client_the_scale_of_a_guess_decides(seed):
    two = MANY | {"classes_per_client": 2}
    plain, scaled = accuracy("fedavg", seed, ROUNDS, **two), accuracy("cucb", seed, ROUNDS, **two)
    assert scaled > plain + 0.03
    assert accuracy("cucb", seed, ROUNDS, estimate="raw", b=1.0, **two) < plain - 0.05, "a guess of one class misleads"


@each_seed
def test_with_uneven_shares_guesses_are_no_better_than_a_draw_but_the_truth_is(seed):
    plain = accuracy("fedavg", seed, ROUNDS, **UNEVEN)
    assert accuracy("cucb", seed, ROUNDS, estimate="oracle", **UNEVEN) > plain + 0.03
    assert accuracy("cucb", seed, ROUNDS, **UNEVEN) > plain - 0.015


@each_seed
def test_it_starves_clients(seed):
    least, most = finished("cucb", seed, ROUNDS[1], **MANY)["lines"][-1]["visits"]
    assert least == 1, "some are never asked again"
    assert most > 15


def test_a_cohort_that_cannot_hold_all_classes_is_no_better_than_a_draw():
    """Five clients of one class each, of ten classes: ahead with one seed, behind with the other."""
    few = MANY | {"participation": 0.05}
    gains = [accuracy("cucb", seed, ROUNDS, **few) - accuracy("fedavg", seed, ROUNDS, **few) for seed in (0, 1)]
    assert min(gains) < 0.01
