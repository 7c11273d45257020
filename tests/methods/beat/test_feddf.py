"""FedDF against FedAvg, where clients' classes differ by chance and where each has two; beside it another ensemble."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
PUBLIC = {"samples": 8500, "public": 500}  # 400 training samples at a client on average, 500 without labels beside them
UNEVEN, TWO = {"partition": "dirichlet", "alpha": 0.1}, {"classes_per_client": 2}
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_beats_fedavg_in_the_first_rounds_where_clients_have_uneven_shares_of_classes(seed):
    gain = [
        accuracy("feddf", seed, rounds, last=10, **UNEVEN, **PUBLIC)
        - accuracy("fedavg", seed, rounds, last=10, **UNEVEN, **PUBLIC)
        for rounds in ((1, 5), (6, 10))
    ]
    assert gain[0] > 0.04
    assert 0.005 < gain[1] < gain[0]


@each_seed
def test_it_does_not_where_all_have_as_many_samples_of_two_classes(seed):
    found, plain = (accuracy(name, seed, **TWO, **PUBLIC) for name in ("feddf", "fedavg"))
    assert plain - 0.05 < found < plain


@each_seed
def test_a_mean_of_probabilities_fails_where_everybody_is_sure_of_two_classes(seed):
    found = accuracy("feddf", seed, ensemble="avg_probs", **TWO, **PUBLIC)
    assert found < accuracy("feddf", seed, **TWO, **PUBLIC) - 0.2


@each_seed
def test_the_labels_of_these_samples_would_be_worth_more(seed):
    """A warm-up of 100 steps on them, and FedAvg then."""
    assert accuracy("zhao", seed, share=0.0, **TWO, **PUBLIC) > accuracy("feddf", seed, **TWO, **PUBLIC) + 0.03
