"""The order in which clients stand: pFedMT makes its teams of clients that follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig

_ORDER = 8  # the random stream of this purpose


def order(counts: np.ndarray, config: DataConfig, seed: int, kinds: Sequence[np.ndarray] = ()) -> np.ndarray:
    """Order the clients as data.team_order asks.

    'labels' puts clients with like label mixes side by side: the leaves of an average-linkage tree over total
    variation, turned so that neighbours are as near as the tree allows. 'groups' puts clients of one kind side by side.

    Args:
        counts: [clients, classes], how many samples of each label each client holds.
        config: says which order.
        seed: what a random order follows from.
        kinds: each [clients], what may tell clients apart: how their samples are turned or renamed.

    Returns:
        A permutation of the clients.
    """
    clients = len(counts)
    if config.team_order == "random":
        return np.random.default_rng([seed, _ORDER]).permutation(clients)
    if config.team_order == "groups":
        if not kinds:
            raise Problem("data.team_order 'groups' is for clients that differ by data.rotate or data.relabel: set one")
        return np.lexsort(kinds)
    if config.team_order == "dealt" or clients < 3:
        return np.arange(clients)
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering  # slow to import, rarely used
    from scipy.spatial.distance import pdist

    distances = pdist(counts / counts.sum(axis=1, keepdims=True), "cityblock") / 2
    return leaves_list(optimal_leaf_ordering(linkage(distances, "average"), distances))
