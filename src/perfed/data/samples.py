"""Samples from a file, to predict on. Nothing in it is ever executed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.npz import need, read_npy, read_npz


def read_samples(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read samples to predict on.

    Args:
        path: an .npz file (array x), .npy, or .csv with one flat sample per line.
        shape: the shape of a sample.

    Returns:
        The samples [n, *shape], or as the file has them where that is another shape.
    """
    if not path.is_file():
        raise Problem(f"there is no input file '{path}'")
    kind = path.suffix.lower()
    if kind not in (".npz", ".npy", ".csv"):
        raise Problem(f"the input must be .npz, .npy or .csv, not '{path.name}'")
    try:
        if kind == ".csv":
            if not path.stat().st_size:
                raise Problem(f"'{path}' is empty")
            x = np.genfromtxt(path, delimiter=",", dtype=np.float32, ndmin=2)
            if len(x) and np.isnan(x[0]).all():  # a line of headings
                x = x[1:]
        else:
            x = need(read_npz(path), ("x",), path)[0] if kind == ".npz" else read_npy(path)
    except ValueError as error:
        raise Problem(f"'{path}' cannot be read as {kind}: {' '.join(str(error).split())[:120]}") from None
    if x.dtype.kind not in "biuf":
        raise Problem(f"'{path}' must hold numbers, not {x.dtype}")
    x = x.astype(x.dtype.newbyteorder("="))
    if x.shape == shape:
        x = x[None]
    if x.ndim == 2 and x.shape[1] == int(np.prod(shape)):
        x = x.reshape(-1, *shape)
    return x
