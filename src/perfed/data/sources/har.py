"""Human activity recognition: 30 people with a phone at the belt: 9 sensor channels, 128 time steps, 6 activities.

Human Activity Recognition Using Smartphones (Anguita et al., 2013), raw sensors.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.npz import need, read_npz
from perfed.data.pool import Pool, data_dir

ONLY_PARTITION = "natural"


def load(config: DataConfig, _seed: int) -> Pool:
    """Read windows [9, 128] in g and rad/s.

    Neighbouring windows of a segment overlap by half, so a segment stays whole.
    """
    path = data_dir(config) / "uci_har.npz"
    if not path.is_file():
        raise Problem(
            f"{path} does not exist; make it (arrays x [n, 9, 128], scale, y, subject, segment) from the zip of "
            "data set 240 of the UCI repository, https://archive.ics.uci.edu/dataset/240"
        )
    x, scale, y, subject, segment = need(read_npz(path), ("x", "scale", "y", "subject", "segment"), path)
    people, owner = np.unique(subject, return_inverse=True)
    names = tuple(f"person_{number:02d}" for number in people)
    return Pool(x / np.float32(scale[0]), y.astype(np.int64), classes=6, owner=owner, unit=segment, names=names)
