"""Data sharing against FedAvg; beside it its warm-up alone, its sharing alone, and the public samples alone."""

from pathlib import Path

import pytest
from beat import accuracy

pytestmark = pytest.mark.slow
ALONE = str(Path(__file__).with_name("alone.py"))
PUBLIC = {"samples": 8200, "public": 200}  # 400 training samples at each of ten clients, and 5 % of that beside them
each_seed = pytest.mark.parametrize("seed", [0, 1])


@each_seed
def test_beats_fedavg_its_own_warm_up_and_the_public_samples_alone(seed):
    sharing, plain = accuracy("zhao", seed, **PUBLIC), accuracy("fedavg", seed, **PUBLIC)
    warm_up = accuracy("zhao", seed, share=0.0, **PUBLIC)
    alone = accuracy(ALONE, seed, (1, 1), share=0.0, warmup=1000, epochs=1, **PUBLIC)
    assert sharing > plain + 0.1
    assert sharing > warm_up + 0.01
    assert sharing > alone + 0.015
    assert warm_up - plain > 0.75 * (sharing - plain), "the warm-up has most of the gain"


@each_seed
def test_sharing_without_the_warm_up_ends_where_both_do(seed):
    both, cold = accuracy("zhao", seed, **PUBLIC), accuracy("zhao", seed, warmup=0, **PUBLIC)
    assert cold == pytest.approx(both, abs=0.01)
    first = [accuracy("zhao", seed, (1, 5), last=10, **PUBLIC, **more) for more in ({}, {"warmup": 0})]
    assert first[0] > first[1] + 0.01, "what it brings is in the first rounds"


@each_seed
def test_the_other_half_of_the_public_samples_brings_next_to_nothing(seed):
    half, all_of_them = accuracy("zhao", seed, **PUBLIC), accuracy("zhao", seed, share=1.0, **PUBLIC)
    assert half == pytest.approx(all_of_them, abs=0.01)
