"""FedHome against tuning the same head on classes as they are, on clients of very uneven classes: balanced accuracy."""

import pytest
from beat import finished, note

pytestmark = pytest.mark.slow
# Ten clients whose classes have from one to some hundred samples, 6 rounds of 2 epochs.
UNEVEN = {"partition": "dirichlet", "alpha": 0.3, "epochs": 2, "headline": "balanced", "scores": "last"}
BALANCED, PLAIN = "balanced_accuracy", "accuracy"
each_seed = pytest.mark.parametrize("seed", [0, 1])


def score(seed, name=BALANCED, model="personal", **more):
    """The mean over clients of a score of the last round."""
    clients = finished("fedhome", seed, 6, **UNEVEN, **more)["result"]["clients"]
    mean = sum(client[model]["test"][name] for client in clients) / len(clients)
    tuned = "" if model == "personal" else "before the tuning, "
    note("fedhome", seed, f"{tuned}{name.replace('_', ' ')}, round 6", mean, **UNEVEN, **more)
    return mean


@each_seed
def test_beats_fedavg_with_a_tuned_head_in_balanced_accuracy(seed):
    home, plain = score(seed), score(seed, even=False, decoding=0.0)
    assert home > plain + 0.03
    assert home > score(seed, model="global") + 0.005, "it also beats the model that nobody has tuned"


@each_seed
def test_it_costs_plain_accuracy(seed):
    assert score(seed, PLAIN) < score(seed, PLAIN, even=False, decoding=0.0) - 0.02


@each_seed
def test_smote_has_the_gain_and_the_decoder_none_of_it(seed):
    home, without = score(seed), score(seed, decoding=0.0)
    assert without > home - 0.01
    assert score(seed, even=False) < home - 0.02
