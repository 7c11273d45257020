"""FedCurv against FedAvg, which it does not beat here, and against FedProx."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
@pytest.mark.parametrize("lam", [0.3, 3.0])
def test_with_one_class_it_changes_nothing(lam, seed):
    """Who is certain of the only class has a Fisher information of 0."""
    found, plain = (
        accuracy(name, seed, (16, 20), **more) for name, more in (("fedcurv", {"lam": lam}), ("fedavg", {}))
    )
    assert found == pytest.approx(plain, abs=0.004)


@each_seed
def test_with_two_classes_it_is_a_little_behind_fedavg_and_as_good_as_fedprox(seed):
    two = {"classes_per_client": 2}
    found, plain = accuracy("fedcurv", seed, (16, 20), lam=3.0, **two), accuracy("fedavg", seed, (16, 20), **two)
    assert plain - 0.025 < found < plain
    assert found == pytest.approx(accuracy("fedprox", seed, (16, 20), mu=0.1, **two), abs=0.02)
