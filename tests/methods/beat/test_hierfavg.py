"""HierFAVG against FedAvg (its own form with one exchange) with as many steps between two exchanges, or in a round."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow


def last(seed, k1, k2):
    return accuracy("hierfavg", seed, (15, 15), scenario="dirichlet", lr=0.1, edges=4, k1=k1, k2=k2)


@pytest.mark.parametrize("seed", [0, 1])
def test_more_exchanges_with_an_edge_beat_one_with_as_few_steps(seed):
    """As many rounds of the cloud; against as many steps in one go it is not behind, and sends five times as much."""
    hierarchical = last(seed, 6, 5)
    assert hierarchical > last(seed, 6, 1) + 0.04
    assert hierarchical > last(seed, 30, 1) - 0.01
