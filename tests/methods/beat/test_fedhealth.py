"""FedHealth against the same model without tuning; beside it tuning without CORAL, of all layers, and Local."""

import pytest
from beat import accuracy
from real_data import real

pytestmark = pytest.mark.slow
# Thirty people with a phone, half of whose windows are tested on; a tenth of the other half is public.
PEOPLE = {"data": "har", "partition": "natural", "clients": 30, "samples": 0, "public": 0.1, "epochs": 1}
PEOPLE |= {"normalise": "channel"}
each_seed = pytest.mark.parametrize("seed", [0, 1])


@pytest.fixture
def people():
    return PEOPLE | {"data_dir": real("uci_har.npz")}


@each_seed
def test_tuning_makes_better_models_for_people_than_the_one_for_all(seed, people):
    tuned, general = (accuracy("fedhealth", seed, model=model, **people) for model in ("personal", "global"))
    assert tuned > general + 0.03
    assert tuned > accuracy("local", seed, **people) + 0.1
    assert general > accuracy("fedavg", seed, **people) + 0.04, "public samples do their part before round 1"


@each_seed
def test_coral_makes_no_difference_to_speak_of(seed, people):
    without = accuracy("fedhealth", seed, k=0.0, **people)
    for k in (0.01, 1.0):
        assert accuracy("fedhealth", seed, k=k, **people) == pytest.approx(without, abs=0.005)
