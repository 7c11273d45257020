"""TiFL against FedAvg after equal simulated time, where speed has nothing to do with labels and where classes are few.

20 clients, four in a round, machines with speeds that differ by a factor of ten and more; after a quarter of the time
that 80 rounds of FedAvg take, the mean of the last five rounds.
"""

import pytest
from beat import finished, note

pytestmark = pytest.mark.slow
COMMON = {"clients": 20, "samples": 16000, "participation": 0.2, "speed": 1000.0, "speed_spread": 1.2}
IID, TWO = {"partition": "iid"}, {"classes_per_client": 2}
each_seed = pytest.mark.parametrize("seed", [0, 1])


def after_a_quarter(method, seed, **settings):
    time = finished("fedavg", seed, 80, **COMMON, **{key: settings[key] for key in settings if key != "policy"})[
        "lines"
    ][-1]["clock"]
    lines = finished(method, seed, 80, **COMMON, **settings)["lines"]
    done = [line["accuracy"]["personal"] for line in lines if line["clock"] <= time / 4]
    mean = sum(done[-5:]) / 5
    note(method, seed, "accuracy after a quarter of the time", mean, **settings)
    note(method, seed, "rounds by then", float(len(done)), **settings)
    return mean, len(done)


@each_seed
def test_more_rounds_in_the_same_time(seed):
    plain = after_a_quarter("fedavg", seed, **IID)
    for policy in ("adaptive", "random"):
        found = after_a_quarter("tifl", seed, policy=policy, **IID)
        assert found[1] > plain[1]
        assert found[0] > plain[0]


@each_seed
def test_where_classes_are_few_fast_clients_alone_lose_and_fast_ones_mostly_win(seed):
    plain = after_a_quarter("fedavg", seed, **TWO)[0]
    assert after_a_quarter("tifl", seed, policy="random", **TWO)[0] > plain + 0.05
    assert after_a_quarter("tifl", seed, policy="fast", **TWO)[0] < plain - 0.05
    assert after_a_quarter("tifl", seed, policy="slow", **TWO)[0] < plain - 0.05


@each_seed
def test_drawing_tiers_by_accuracy_does_not_happen_here(seed):
    """The tier that has just trained is never worse than when it was looked at before, so odds stay even."""
    assert after_a_quarter("tifl", seed, policy="adaptive", **TWO) == after_a_quarter(
        "tifl", seed, policy="uniform", **TWO
    )
