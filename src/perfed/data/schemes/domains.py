"""Several clients for each domain that samples come from, uneven inside: feature skew, as PGFed has Office-Home."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfed.core.errors import Problem
from perfed.data.allocation import Shares
from perfed.data.schemes import dirichlet
from perfed.training.config import DataConfig


def share(sizes: np.ndarray, config: DataConfig, rng: np.random.Generator) -> Shares:
    """Equally many clients for each domain (the first ones get what is left over), and Dir(alpha) among them.

    `sizes` is [domains, classes]; the shares are of every class of every domain.
    """
    domains, classes = sizes.shape
    if config.clients < domains:
        raise Problem(f"data.clients is {config.clients}, but there are {domains} domains: each has clients of its own")
    counts = np.zeros((domains, classes, config.clients), dtype=np.int64)
    for domain, mine in enumerate(np.array_split(np.arange(config.clients), domains)):
        try:
            counts[domain][:, mine] = dirichlet.share(sizes[domain], replace(config, clients=len(mine)), rng).counts
        except Problem as problem:
            raise Problem(f"domain {domain + 1} of {domains}: {problem}") from None
    return Shares(counts.reshape(-1, config.clients), sizes.ravel())
