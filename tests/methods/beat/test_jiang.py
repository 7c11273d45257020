"""Jiang against as many rounds of FedAvg, in the model before and after tuning; beside it a shorter step of the server.

20 clients of two classes, five in a round, 60 rounds, of which the last 20 are Reptile's.
"""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
COMMON = {"clients": 20, "samples": 16000, "participation": 0.25, "classes_per_client": 2}
LAST = (56, 60)
each_seed = pytest.mark.parametrize("seed", [0, 1])


def jiang(seed, model, meta_lr=0.001, **more):
    about = {"share": 1 / 3, "beta": 0.0, "adapt_steps": 20, "meta_lr": meta_lr}
    return accuracy("jiang", seed, LAST, model=model, **about, **more, **COMMON)


@each_seed
def test_the_model_before_tuning_beats_fedavg_and_is_as_good_after_it(seed):
    assert jiang(seed, "global") > accuracy("fedavg", seed, LAST, **COMMON) + 0.03
    assert jiang(seed, "personal") == pytest.approx(accuracy("fedavg", seed, LAST, fine_tune=1, **COMMON), abs=0.01)


@each_seed
def test_a_shorter_step_of_the_server_has_a_part_of_the_gain(seed):
    shorter = {"server_optimizer": "momentum", "server_momentum": 0.0, "server_rate": 0.3}
    found = accuracy("fedavg", seed, LAST, **shorter, **COMMON)
    assert accuracy("fedavg", seed, LAST, **COMMON) + 0.01 < found < jiang(seed, "global")


@each_seed
def test_such_a_step_in_the_last_rounds_alone_has_all_of_it(seed):
    """With a hundred local steps as before: the server need only stop following the last five clients."""
    found = jiang(seed, "global", meta_lr=0.3, meta_optimizer="sgd", steps=100)
    assert found == pytest.approx(jiang(seed, "global"), abs=0.01)


@each_seed
def test_ten_times_the_rate_of_adam_destroys_the_model(seed):
    assert jiang(seed, "global", meta_lr=0.01) < jiang(seed, "global") - 0.05
