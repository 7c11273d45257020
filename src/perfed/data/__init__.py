"""Where data come from: a source gives a pool, a scheme deals it to clients, and a split makes their three tables.

Importing this needs neither numpy nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perfed.core.errors import Problem
from perfed.data.catalog import check
from perfed.data.config import DataConfig
from perfed.discover import load_member

if TYPE_CHECKING:
    from perfed.core.clients import Clients


def load(config: DataConfig, seed: int, known: Mapping[str, Any] | None = None) -> Clients:
    """Make the clients that a configuration describes.

    Args:
        config: the data set, its partition, its split and its skews.
        seed: everything drawn follows from it: the same seed gives the same clients, row by row.
        known: the preparation of tables that models were trained with, which newcomers share; None: it is made here.

    Returns:
        Every client's training, validation and test samples.
    """
    check(config)
    import numpy as np

    from perfed.data.official import in_parts  # these import numpy and torch
    from perfed.data.partition import partition
    from perfed.data.pool import checked
    from perfed.data.public import from_elsewhere, held_out
    from perfed.data.split import assemble
    from perfed.data.subset import subset

    pool = checked(load_member("perfed.data.sources", config.name).load(config, seed), config.name, config.bins)
    if config.task not in ("auto", pool.task):
        raise Problem(f"data.task is for files of your own (data set 'folder'): '{config.name}' is {pool.task}")
    pool = subset(pool, config, seed)
    if config.split == "official":
        pool = in_parts(pool, config, seed)
    public = held_out(pool, config, seed)
    if not len(public):
        clients = assemble(pool, partition(pool, config, seed), config, seed, known)
        return from_elsewhere(config, seed, clients) if config.public_data else clients
    rest = np.delete(np.arange(len(pool.y)), public)
    rows = [rest[mine] for mine in partition(pool.only(rest), config, seed)]
    return assemble(pool, rows, config, seed, known, public)
