"""L2GD against FedAvg and Local after as many local steps, where each client swaps two labels of its own."""

import itertools

import pytest
from beat import accuracy, finished

pytestmark = pytest.mark.slow
STEPS = 40 * 2 * 3  # of a client with 30 samples in 40 rounds
SETTING = dict(scenario="label-swaps", lr=0.1)


def around(seed, lam):
    """The mean accuracy of the rounds that end within 20 local steps of those of the others."""
    lines = finished("l2gd", seed, 34, p=0.1, lam=lam, **SETTING)["lines"]
    taken = itertools.accumulate(line["local_steps"] for line in lines)
    found = [line["accuracy"]["personal"] for line, at in zip(lines, taken, strict=True) if abs(at - STEPS) <= 20]
    print(f"| l2gd, lam {lam} | seed {seed} | {STEPS} local steps | {sum(found) / len(found):.3f} |")
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_weak_pull_beats_fedavg_and_local(seed):
    """And what fine-tuning makes of FedAvg's model."""
    found = around(seed, 0.1)
    assert found > accuracy("fedavg", seed, (36, 40), **SETTING) + 0.005
    assert found > accuracy("local", seed, (36, 40), **SETTING) + 0.03
    assert found > accuracy("fedavg", seed, (36, 40), fine_tune=5, **SETTING) + 0.005
