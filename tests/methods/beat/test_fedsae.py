"""FedSAE against FedAvg with a number of epochs that machines cannot always do; beside it FedAvg with partial work.

20 clients of two classes, half of them in a round, 20 rounds; a client can do 5 to 10 epochs on average, now more and
now less. Work that is not finished is lost (`straggler_work discard`), or used as far as it came.
"""

import pytest
from beat import finished, note

pytestmark = pytest.mark.slow
MACHINES = {"affordable_min": 5.0, "affordable_max": 10.0, "affordable_spread": 0.375}
COMMON = MACHINES | {"clients": 20, "samples": 8000, "participation": 0.5, "classes_per_client": 2}
each_seed = pytest.mark.parametrize("seed", [0, 1])


def ended(method, seed, **settings):
    """Mean accuracy of rounds 16 to 20, and the share of those asked whose work was lost."""
    lines = finished(method, seed, 20, **COMMON, **settings)["lines"]
    mean = sum(line["accuracy"]["personal"] for line in lines[15:]) / 5
    lost = sum(len(line.get("lost") or []) for line in lines) / 200
    for what, value in (("rounds 16 to 20", mean), ("share lost", lost)):
        note(method, seed, what, value, **settings)
    return mean, lost


@each_seed
@pytest.mark.parametrize("rule", ["ira", "fassa"])
def test_beats_fifteen_epochs_for_everybody_and_loses_fewer(rule, seed):
    found, fixed = (
        ended("fedsae", seed, epochs=15, rule=rule),
        ended("fedavg", seed, epochs=15, straggler_work="discard"),
    )
    assert found[0] > fixed[0] + 0.3
    assert found[1] < fixed[1] - 0.3


@each_seed
def test_partial_work_and_a_modest_number_of_epochs_do_as_well_or_better(seed):
    found = ended("fedsae", seed, epochs=15)[0]
    assert ended("fedavg", seed, epochs=15, straggler_work="use")[0] > found + 0.02
    assert ended("fedavg", seed, epochs=5, straggler_work="discard")[0] > found


@each_seed
def test_preferring_a_large_loss_does_not_pay_here(seed):
    assert ended("fedsae", seed, epochs=15, beta=0.0)[0] > ended("fedsae", seed, epochs=15)[0]
