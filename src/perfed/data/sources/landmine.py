"""Landmine: 29 fields, which are the clients: is there a mine where a radar echo comes from? 9 features, 6 % are mines.

This is a small form of the landmine data of papers on multi-task learning: 1,464 samples, 44 to 69 of a field, 89
mines in all, about a tenth of the whole. It is the example that the authors of MOCHA ship with their code; that it is
landmine data is inferred from its shape (29 fields, 9 features, 6 % positive), as the repository does not say. A
client's test part holds few mines or none, so scores of single clients say little: look at several seeds.
"""

from __future__ import annotations

import numpy as np

from perfed.data.config import DataConfig
from perfed.data.npz import need
from perfed.data.pool import Pool, read_file

ONLY_PARTITION = "natural"
USUAL_NORMALISE = "federated"


def load(config: DataConfig, _seed: int) -> Pool:
    """Read echoes; the label is 1 for a mine."""
    arrays, path = read_file(
        config, "landmine_small.npz", "arrays x [n, 9], y, task", "small.mat of https://github.com/gingsmith/fmtl"
    )
    x, y, task = need(arrays, ("x", "y", "task"), path)
    fields, owner = np.unique(task, return_inverse=True)
    names = tuple(f"field_{number:02d}" for number in fields)
    y = y.astype(np.float32)[:, None]
    return Pool(x.astype(np.float32), y, classes=1, owner=owner, names=names, labels=("mine",), task="binary")
