"""Official test sets, kept as they are: the training samples alone give the validation part."""

from __future__ import annotations

import dataclasses

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.pool import TEST, TRAIN, VAL, Pool, spread

_VALIDATION = 9  # the random stream of this purpose


def in_parts(pool: Pool, config: DataConfig, seed: int) -> Pool:
    """Put every row into training, validation or test: data.val of the official training rows are validation.

    data.stratify takes the same share of every class.
    """
    if pool.official is None:
        raise Problem(f"data.split 'official': data set '{config.name}' has no official test set; use 'client'")
    rng = np.random.default_rng([seed, _VALIDATION])
    rows = rng.permutation(np.flatnonzero(pool.official == TRAIN))
    if config.stratify:
        rows = rows[np.argsort(pool.stratum[rows], kind="stable")]
    part = np.where(pool.official == TEST, TEST, TRAIN)
    part[rows[spread(len(rows), int(len(rows) * config.val + 0.5), rng)]] = VAL
    return dataclasses.replace(pool, part=part)
