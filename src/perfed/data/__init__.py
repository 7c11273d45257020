"""Where data come from: a source gives a pool, a scheme deals it to clients, and a split makes their three tables.

Importing this needs neither numpy nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfed.data.catalog import check
from perfed.data.config import DataConfig
from perfed.discover import load_member

if TYPE_CHECKING:
    from perfed.core.clients import Clients


def load(config: DataConfig, seed: int) -> Clients:
    """Make the clients that a configuration describes.

    Args:
        config: the data set, its partition, its split and its skews.
        seed: everything drawn follows from it: the same seed gives the same clients, row by row.

    Returns:
        Every client's training, validation and test samples.
    """
    check(config)
    from perfed.data.official import in_parts  # these import numpy and torch
    from perfed.data.partition import partition
    from perfed.data.pool import checked, normalised
    from perfed.data.split import assemble

    pool = checked(load_member("perfed.data.sources", config.name).load(config, seed), config.name)
    pool = normalised(pool, config)
    if config.split == "official":
        pool = in_parts(pool, config, seed)
    return assemble(pool, partition(pool, config, seed), config, seed)
