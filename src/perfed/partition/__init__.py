"""How one data set becomes clients: one file per scheme. Importing this does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import numpy as np

from perfed.config import DataConfig
from perfed.core.errors import Problem, nearest

if TYPE_CHECKING:
    from perfed.datasets.pool import Pool

PARTITIONS: dict[str, str] = {
    "dirichlet": "each class is shared out by Dirichlet(alpha) proportions: uneven classes and sizes",
    "classes": "every client holds k classes and the same number of samples",
    "iid": "shuffled and dealt evenly",
    "natural": "by who the samples come from: people, writers, devices",
}
_OWN_CLIENTS = ("har", "synthetic", "folder")  # their clients are what these data sets are about
_PARTITION = 1  # the random stream of this purpose


def scheme(config: DataConfig) -> str:
    """The name of the partition that `config` asks for, or the one that suits its data set."""
    chosen = config.partition
    if chosen and chosen not in PARTITIONS:
        raise Problem(f"data.partition: there is no partition '{chosen}'{nearest(chosen, PARTITIONS)}")
    if config.name in _OWN_CLIENTS:
        if chosen not in ("", "natural"):
            raise Problem(f"data set '{config.name}' has clients of its own: leave out data.partition '{chosen}'")
        return "natural"
    return chosen or "dirichlet"


def partition(pool: Pool, config: DataConfig, seed: int) -> list[np.ndarray]:
    """The rows of each client, in increasing order; every row has at most one client."""
    name = scheme(config)
    if len(pool.y) == 0:
        raise Problem(f"data set '{config.name}' has no samples")
    if name != "natural":
        if config.clients == 0:
            raise Problem(f"data.clients must be at least 1 with the partition '{name}'")
        if config.clients > len(pool.y):
            raise Problem(f"data.clients is {config.clients}, but there are only {len(pool.y)} samples")
    rng = np.random.default_rng([seed, _PARTITION])
    return importlib.import_module(f"perfed.partition.{name}").rows(pool, config, rng)
