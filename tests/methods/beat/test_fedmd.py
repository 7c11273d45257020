"""FedMD against Local where clients have 40 training samples of five classes; beside it its preparation alone."""

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
FEW = {"samples": 4500, "public": 500, "test": 0.9, "classes_per_client": 5}
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_beats_local(seed):
    assert accuracy("fedmd", seed, **FEW) > accuracy("local", seed, **FEW) + 0.03


@each_seed
def test_what_it_gains_is_its_preparation_on_labelled_public_samples(seed):
    """Without the exchange of logits it is as good: these clients have the public samples' classes."""
    prepared = accuracy("fedmd", seed, digest_epochs=0, **FEW)
    assert accuracy("fedmd", seed, **FEW) == pytest.approx(prepared, abs=0.012)
    assert accuracy("fedmd", seed, digest_epochs=3, **FEW) == pytest.approx(prepared, abs=0.015)
