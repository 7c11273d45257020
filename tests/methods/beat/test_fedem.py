"""FedEM against FedAvg, Local and IFCA where two groups disagree about labels, and where one sees images turned."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
SETTING = dict(epochs=1, lr=0.4)
each_seed = pytest.mark.parametrize("seed", [0, 1])


def last(method, seed, scenario="label-groups", **settings):
    return accuracy(method, seed, (58, 60), scenario=scenario, **SETTING, **settings)


@each_seed
def test_three_models_find_two_groups(seed):
    """Within 2 points of 0.92. IFCA, with two models, is a point or two better: it is the plain control here."""
    found = last("fedem", seed)
    assert found == pytest.approx(0.92, abs=0.02)
    assert found > max(last("fedavg", seed), last("local", seed)) + 0.1
    assert last("ifca", seed, clusters=2) > found - 0.01


def test_two_models_find_them_from_some_starts_only():
    """Of the seeds 0 to 5 two reach 0.92 in 60 rounds; from others one model takes all clients for long."""
    assert last("fedem", 0, components=2) == pytest.approx(0.92, abs=0.02)
    assert last("fedem", 1, components=2) < 0.6


@each_seed
def test_where_images_are_turned_it_is_fedavg(seed):
    assert last("fedem", seed, "rotation", components=2) == pytest.approx(last("fedavg", seed, "rotation"), abs=0.03)
