"""HypCluster where two groups contradict each other, and where one of them sees images upside down."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow


def last(method, seed, scenario, **settings):
    return accuracy(method, seed, (28, 30), scenario=scenario, lr=0.2, **settings)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("scenario", "ahead"), [("label-groups", 0.12), ("rotation", 0.04)])
def test_two_models_find_two_groups(scenario, ahead, seed):
    """From both starts: 0.93, as two FedAvgs that are told the groups would have."""
    others = max(last(method, seed, scenario) for method in ("fedavg", "local"))
    for centres in ("furthest", "random"):
        found = last("hypcluster", seed, scenario, centres=centres)
        assert found == pytest.approx(0.93, abs=0.02)
        assert found > others + ahead
