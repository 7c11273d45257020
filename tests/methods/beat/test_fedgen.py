"""FedGen against FedAvg where clients have few classes and few steps; beside it each of its terms, and no training."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
# Ten clients of few classes each, and one epoch of batches of 32: some dozen steps of a client in a round.
FEW = {"partition": "dirichlet", "alpha": 0.05, "epochs": 1, "batch_size": 32}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beats_fedavg_by_a_few_points(seed):
    assert accuracy("fedgen", seed, **FEW) > accuracy("fedavg", seed, **FEW) + 0.02


def test_what_helps_is_what_the_server_has_learned_and_the_papers_term():
    """Means of three seeds, for one seed says little here."""

    def mean(**more):
        return sum(accuracy("fedgen", seed, **FEW, **more) for seed in (0, 1, 2)) / 3

    both, plain = mean(), sum(accuracy("fedavg", seed, **FEW) for seed in (0, 1, 2)) / 3
    assert mean(generator_steps=0) < plain, "a generator that nobody trains does harm"
    assert mean(generative_beta=0.0) > both, "the term that the code has beside the paper's takes from the gain"
    assert mean(generative_alpha=0.0) < plain, "and alone it brings nothing"
