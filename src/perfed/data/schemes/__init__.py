"""How one data set becomes clients: one file per scheme. Importing this does not import torch."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING

import numpy as np

from perfed.core.errors import Problem, nearest
from perfed.training.config import DataConfig

if TYPE_CHECKING:
    from perfed.data.pool import Pool

PARTITIONS: dict[str, str] = {
    "dirichlet": "each class is shared out by Dirichlet(alpha) proportions: uneven classes and sizes",
    "classes": "every client holds k classes and the same number of samples",
    "uneven": "every client holds k random classes, of each an uneven part",
    "pairs": "classes two by two (k by k), each pair for as many clients that follow one another",
    "ring": "client u holds the labels u, u + 1, ... (k of them) in log-normal numbers; made for MNIST",
    "powerlaw": "sizes fall as a power of their rank, labels are mixed alike: quantity skew",
    "lognormal": "log-normal sizes, labels are mixed alike: quantity skew",
    "iid": "shuffled and dealt evenly",
    "domains": "equally many clients for each source of samples, Dirichlet(alpha) inside it: feature skew",
    "natural": "by who the samples come from: people, writers, devices",
}
# The settings that each scheme reads, beside data.clients: they are shown and kept with its clients.
SETTINGS: dict[str, tuple[str, ...]] = {
    "dirichlet": ("alpha", "min_samples", "cap"),
    "classes": ("classes_per_client",),
    "uneven": ("classes_per_client", "share_low", "share_high"),
    "pairs": ("classes_per_client",),
    "ring": ("classes_per_client",),
    "powerlaw": ("power_law", "min_samples"),
    "lognormal": ("log_sigma", "min_samples"),
    "domains": ("alpha", "min_samples", "cap"),
}
_OWN_CLIENTS = ("har", "synthetic", "folder")  # their clients are what these data sets are about
_USUAL = {"mnist-usps": "domains"}
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
    return chosen or _USUAL.get(config.name, "dirichlet")


def partition(pool: Pool, config: DataConfig, seed: int) -> list[np.ndarray]:
    """The rows of each client, in increasing order; every row has at most one client.

    Where the pool's rows are in parts, the scheme is drawn for the training rows and applied to every part alike.
    """
    name = scheme(config)
    if len(pool.y) == 0:
        raise Problem(f"data set '{config.name}' has no samples")
    rng = np.random.default_rng([seed, _PARTITION])
    module = importlib.import_module(f"perfed.data.schemes.{name}")
    if name == "natural":
        return module.rows(pool, config, rng)
    from perfed.data.pool import TEST, TRAIN, VAL  # here, because data sets import partitions

    codes = (TRAIN, VAL, TEST)
    parts = [np.arange(len(pool.y))] if pool.part is None else [np.flatnonzero(pool.part == code) for code in codes]
    if config.clients == 0:
        raise Problem(f"data.clients must be at least 1 with the partition '{name}'")
    if config.clients > len(parts[0]):
        raise Problem(f"data.clients is {config.clients}, but there are only {len(parts[0])} samples")
    label, kinds = (pool.y, (pool.classes,)) if name != "domains" else _in_domains(pool, config)
    sizes = np.bincount(label[parts[0]], minlength=math.prod(kinds)).reshape(kinds)
    shares = module.share(sizes, config, rng)
    label = label if len(shares.total) == sizes.size else np.zeros_like(label)
    strata = lambda rows: [rows[label[rows] == c] for c in range(len(shares.total))]
    dealt = [shares.deal(strata(rows), rng) for rows in parts]
    return [np.sort(np.concatenate(mine)) for mine in zip(*dealt, strict=True)]


def _in_domains(pool: Pool, config: DataConfig) -> tuple[np.ndarray, tuple[int, ...]]:
    """(a number for the domain and the class of each row, how many there are of both)."""
    if pool.owner is None:
        raise Problem(f"data set '{config.name}' does not say which domain its samples are from: use 'mnist-usps'")
    return pool.owner * pool.classes + pool.y, (int(pool.owner.max()) + 1, pool.classes)
