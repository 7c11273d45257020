"""School: exam scores (1 to 70) of 15,362 pupils with 28 features; their 139 schools are the clients.

The data of the Inner London Education Authority that papers on multi-task learning use.
"""

from __future__ import annotations

import numpy as np

from perfed.data.config import DataConfig
from perfed.data.npz import need
from perfed.data.pool import Pool, read_file

ONLY_PARTITION = "natural"
USUAL_NORMALISE = "federated"


def load(config: DataConfig, _seed: int) -> Pool:
    """Read pupils and their scores; a school has 22 to 251 of them."""
    arrays, path = read_file(
        config, "school.npz", "arrays x [n, 28], y, school", "school.mat of https://github.com/jiayuzhou/MALSAR"
    )
    x, y, school = need(arrays, ("x", "y", "school"), path)
    schools, owner = np.unique(school, return_inverse=True)
    names = tuple(f"school_{number:03d}" for number in schools)
    y = y.astype(np.float64)[:, None]
    return Pool(x.astype(np.float32), y, classes=1, owner=owner, names=names, labels=("score",), task="regression")
