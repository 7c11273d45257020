"""AL2GD, which knows who belongs together, where two groups disagree: against FedAvg, Local and one pull for all."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
SETTING = dict(scenario="label-groups", team_order="groups", lr=0.2, epochs=1)
PULLED = dict(coins="fixed", p=0.5, lam=1.5)  # by 0.3 after every epoch
TENTH = 1.667  # of this pull between clusters, a is 0.1


def last(method, seed, **settings):
    return accuracy(method, seed, (58, 60), **(SETTING | settings))


@pytest.mark.parametrize("seed", [0, 1])
def test_known_clusters_beat_all_that_do_not_know_them(seed):
    """By 10 points and more; where groups contradict each other a pull between them costs some, as it should."""
    apart, tied = (last("al2gd", seed, between=between, p0=0.1, **PULLED) for between in (0.0, TENTH))
    others = [last("fedavg", seed), last("local", seed), last("l2gd", seed, **PULLED)]
    assert min(apart, tied) > max(others) + 0.07
    assert apart > max(others) + 0.1
    assert apart > tied


@pytest.mark.parametrize("seed", [0, 1])
def test_coins_are_as_good_as_moves_in_turn(seed):
    drawn = accuracy("al2gd", seed, (36, 40), p=0.1, lam=0.2, between=0.0, p0=0.02, **SETTING)
    assert drawn > last("local", seed) + 0.07
