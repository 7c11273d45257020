"""In which order clients stand: pFedMT makes its teams of clients that follow one another."""

from __future__ import annotations

import numpy as np

from perfed.training.config import DataConfig

_ORDER = 8  # the random stream of this purpose


def order(counts: np.ndarray, config: DataConfig, seed: int) -> np.ndarray:
    """A permutation of the clients, from their label counts [clients, classes].

    'labels' puts clients with like label mixes side by side: the leaves of an average-linkage tree over total
    variation, turned so that neighbours are as near as the tree allows.
    """
    clients = len(counts)
    if config.team_order == "random":
        return np.random.default_rng([seed, _ORDER]).permutation(clients)
    if config.team_order == "dealt" or clients < 3:
        return np.arange(clients)
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering
    from scipy.spatial.distance import pdist

    apart = pdist(counts / counts.sum(axis=1, keepdims=True), "cityblock") / 2
    return leaves_list(optimal_leaf_ordering(linkage(apart, "average"), apart))
