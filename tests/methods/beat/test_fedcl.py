"""FedCL against FedAvg; beside it a pull of the same mean strength that is alike everywhere, and a warm-up instead."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
PUBLIC = {"samples": 8200, "public": 200, "last": 20}  # the server's: 5 % of what the clients have
WINDOWS = ((6, 15), (16, 20))
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
@pytest.mark.parametrize(("granularity", "by"), [("parameter", 0.006), ("tensor", 0.003)])
def test_beats_fedavg_and_a_pull_that_is_alike_everywhere(granularity, by, seed):
    for rounds in WINDOWS:
        found = accuracy("fedcl", seed, rounds, granularity=granularity, **PUBLIC)
        plain, alike = accuracy("fedavg", seed, rounds, **PUBLIC), accuracy("fedprox", seed, rounds, mu=0.06, **PUBLIC)
        assert found > plain + by
        assert plain > alike + 0.005, "FedProx with mu = 2 lam holds clients back"


@each_seed
def test_a_warm_up_on_the_same_samples_is_stronger(seed):
    for rounds in WINDOWS:
        warm_up = accuracy("zhao", seed, rounds, share=0.0, **PUBLIC)
        assert warm_up > accuracy("fedcl", seed, rounds, **PUBLIC) + 0.02
