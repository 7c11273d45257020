"""Astraea where classes are rare in all and clients have two of them: what each of its halves does, and where it loses.

Class k has 0.7^k as many samples as class 0. Clients are tested on both of their classes alike, and every class is
with as many clients, so that the mean over clients is balanced accuracy. The survey is Astraea's first round.
"""

import numpy as np
import pytest
from beat import accuracy
from dealt import dealt

pytestmark = pytest.mark.slow

NEVER = {"T_a": -1e9, "T_d": 1e9}
NARROW = {"T_a": -0.1, "T_d": 0.1, "g": 1}  # rebalancing of nearly all classes, without mediators


def small_clients(seed):
    """Fifty clients with two classes each, of 80 samples or fewer."""
    draw = np.random.default_rng(seed)
    pairs = np.concatenate([draw.permutation(10) for _ in range(10)]).reshape(50, 2)
    train, test = np.zeros((50, 10)), np.zeros((50, 10))
    for i, pair in enumerate(pairs):
        train[i, pair], test[i, pair] = [round(80 * 0.7**k) for k in pair], 40
    return dealt(seed, train, test) | {"epochs": 1}


def large_clients(seed):
    """Ten clients with two classes each, of 400 samples or fewer."""
    order, train, test = np.random.default_rng(seed).permutation(10), np.zeros((10, 10)), np.zeros((10, 10))
    for i in range(10):
        pair = [order[i], order[(i + 1) % 10]]
        train[i, pair], test[i, pair] = [round(400 * 0.7**k) for k in pair], 200
    return dealt(seed, train, test)


def found(method, seed, clients=small_clients, **settings):
    """The mean over rounds 6 to 10, and over 16 to 20."""
    settings = clients(seed) | settings
    return np.array([accuracy(method, seed, window, last=20, **settings) for window in ((6, 10), (16, 20))])


@pytest.mark.parametrize("seed", [0, 1])
def test_beats_fedavg_with_many_small_clients(seed):
    """Also FedAvg with five epochs, whose models take as many steps in a row as those of mediators."""
    mine = found("astraea", seed)
    assert (mine > found("fedavg", seed) + 0.15).all()
    assert (mine > found("fedavg", seed, epochs=5) + 0.05).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_either_half_alone_beats_fedavg_too(seed):
    fedavg, both = found("fedavg", seed), found("astraea", seed)
    mediators = found("astraea", seed, **NEVER)
    rebalanced = found("astraea", seed, **NARROW)
    assert (mediators > fedavg + 0.08).all()
    assert (rebalanced > fedavg + 0.08).all()
    assert both[0] > max(mediators[0], rebalanced[0])


@pytest.mark.parametrize("seed", [0, 1])
def test_with_thresholds_of_1_rebalancing_alone_does_nothing_for_a_long_tail(seed):
    """No class of the tail has a score below -1; only samples of frequent classes go."""
    assert (abs(found("astraea", seed, g=1) - found("fedavg", seed)) < 0.05).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_mediators_lose_where_clients_are_large(seed):
    """Five epochs at each stop: a model knows the last clients of its mediator. Rebalancing alone still helps."""
    alone = found("astraea", seed, large_clients, **NARROW)
    assert (alone > found("fedavg", seed, large_clients) + 0.01).all()
    assert (found("astraea", seed, large_clients) < alone - 0.05).all()
