"""Clients with so many samples of each class, as a folder of files: partitions that no scheme has.

from dealt import dealt

folder = dealt(seed, train=[[400, 280], [0, 196]], test=[[50, 50], [50, 50]])
accuracy("fedavg", seed, **folder)
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
from real_data import real

SETTINGS = {"data": "folder", "partition": "natural", "samples": 0}


def dealt(seed, train, test, source="fashion_mnist"):
    """Settings of a run whose client i has train[i][k] training and test[i][k] test samples of class k."""
    freeze = lambda rows: tuple(tuple(int(n) for n in row) for row in rows)
    return SETTINGS | {"data_dir": _folder(seed, freeze(train), freeze(test), source).name}


@functools.cache  # which holds the folder until the session ends
def _folder(seed, train, test, source):
    folder, draw = tempfile.TemporaryDirectory(prefix="perfed-dealt-"), np.random.default_rng(seed)
    with np.load(Path(real(f"{source}.npz")) / f"{source}.npz", allow_pickle=False) as found:
        files = [{} for _ in train]
        for split, counts in (("train", train), ("test", test)):
            x, y = found[f"x_{split}"], found[f"y_{split}"]
            for k in range(len(counts[0])):
                rows, first = draw.permutation(np.flatnonzero(y == k)), 0
                for i, of in enumerate(counts):
                    mine, first = rows[first : first + of[k]], first + of[k]
                    assert len(mine) == of[k], f"there are too few samples of class {k}"
                    files[i].setdefault(f"x_{split}", []).append(x[mine][:, None])
                    files[i].setdefault(f"y_{split}", []).append(y[mine])
    for i, arrays in enumerate(files):
        np.savez(
            Path(folder.name) / f"client_{i:02}.npz", **{name: np.concatenate(parts) for name, parts in arrays.items()}
        )
    return folder
