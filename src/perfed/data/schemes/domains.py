"""Domains: equally many clients for each source of samples, Dirichlet(alpha) inside it: feature skew.

As PGFed has Office-Home.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.config import DataConfig
from perfed.data.pool import Pool
from perfed.data.schemes import dirichlet

READS = dirichlet.READS
BY_LABEL = True


def strata(pool: Pool, config: DataConfig) -> tuple[np.ndarray, tuple[int, ...]]:
    """Count the samples of every class in every domain apart.

    Args:
        pool: all samples, whose owners are their domains.
        config: names the data set.

    Returns:
        A number for the domain and the class of each row, and [domains, classes], how many there are of both.
    """
    if pool.owner is None:
        raise Problem(f"data set '{config.name}' does not say which domain its samples are from: use 'mnist-usps'")
    return pool.owner * pool.kinds + pool.stratum, (int(pool.owner.max()) + 1, pool.kinds)


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Give each domain equally many clients (the first ones get what is left over), and Dir(alpha) among them.

    Args:
        sizes: [domains, classes], the samples of each class in each domain.
        config: clients, and the settings of 'dirichlet'.
        rng: draws the proportions.

    Returns:
        How many samples of every class of every domain each client gets.
    """
    domains, classes = sizes.shape
    if config.clients < domains:
        raise Problem(f"data.clients is {config.clients}, but there are {domains} domains: each has clients of its own")
    counts = np.zeros((domains, classes, config.clients), dtype=np.int64)
    for domain, clients in enumerate(np.array_split(np.arange(config.clients), domains)):
        inside = replace(config, clients=len(clients))
        try:
            counts[domain][:, clients] = dirichlet.share(sizes[domain], inside, rng).counts
        except Problem as problem:
            raise Problem(f"domain {domain + 1} of {domains}: {problem}") from None
    return Shares(counts.reshape(-1, config.clients), sizes.ravel())
