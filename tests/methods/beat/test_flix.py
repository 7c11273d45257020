"""FLIX against FedAvg and Local: where each client swaps two labels of its own, and where they only prefer some."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
each_seed = pytest.mark.parametrize("seed", [0, 1])


def last(method, seed, scenario, **settings):
    return accuracy(method, seed, (40, 40), scenario=scenario, lr=0.1, **settings)


@each_seed
def test_the_best_share_is_as_good_as_the_better_of_fedavg_and_local(seed):
    """Half a point is a third of a sample for each client: there is no gain here, and no loss."""
    best = max(last("flix", seed, "label-swaps", mix=mix, alone=200) for mix in (0.5, 0.9))
    assert best > max(last(method, seed, "label-swaps") for method in ("fedavg", "local")) - 0.005


@each_seed
def test_where_clients_agree_it_beats_fedavg_with_a_large_share_of_x(seed):
    """The plain control, FedAvg and two epochs more, is as good."""
    avg = last("fedavg", seed, "dirichlet")
    assert last("flix", seed, "dirichlet", mix=0.9, alone=200) > avg + 0.01
    assert last("flix", seed, "dirichlet", mix=0.5, alone=200) < avg
    assert last("fedavg", seed, "dirichlet", fine_tune=2) > avg + 0.01
