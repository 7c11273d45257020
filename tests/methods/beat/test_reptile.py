"""Reptile beside FedAvg whose clients tune for an epoch: with as many samples everywhere only falling steps differ."""

from pathlib import Path

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
TUNED = str(Path(__file__).with_name("tuned.py"))
TWO = {"classes_per_client": 2}
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_with_whole_steps_it_is_fedavg_and_tuning(seed):
    for model in ("personal", "global"):
        whole = accuracy("reptile", seed, model=model, decay=False, **TWO)
        assert whole == pytest.approx(accuracy(TUNED, seed, model=model, adapt_lr=0.05, **TWO), abs=1e-3)


@each_seed
def test_falling_steps_cost_the_shared_model_some_progress_in_ten_rounds(seed):
    """Tuned models are nearly as good, so in so few rounds there is no gain to show."""
    lost = {}
    for model in ("personal", "global"):
        whole, falling = (accuracy("reptile", seed, model=model, **more, **TWO) for more in ({"decay": False}, {}))
        lost[model] = whole - falling
    assert 0.005 < lost["global"] < 0.04
    assert -0.002 < lost["personal"] < 0.01


@each_seed
def test_ten_steps_in_place_of_a_hundred_are_slower_but_not_ten_times(seed):
    few, many = (accuracy("reptile", seed, model="global", decay=False, **more, **TWO) for more in ({"steps": 10}, {}))
    assert many - 0.05 < few < many
