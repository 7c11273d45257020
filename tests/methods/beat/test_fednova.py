"""FedNova against FedAvg where half of the clients do some of their epochs only, or some have far more samples."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
@pytest.mark.parametrize("lr", [0.005, 0.05])
def test_it_is_behind_fedavg_where_long_local_training_levels_off(lr, seed):
    """A change of few steps is scaled up as if more of them would lead on; a tenth of the rate does not mend it."""
    partial = {"classes_per_client": 2, "stragglers": 0.5, "lr": lr}
    found, plain = (accuracy(name, seed, (16, 20), **partial) for name in ("fednova", "fedavg"))
    assert plain - 0.15 < found < plain - 0.02


@each_seed
def test_with_sizes_far_apart_it_goes_too_far(seed):
    """The changes of all count alike, times the number of clients that the largest ones stand for."""
    found, plain = (accuracy(name, seed, (16, 20), partition="powerlaw") for name in ("fednova", "fedavg"))
    assert found < plain - 0.1
