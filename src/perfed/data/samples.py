"""Samples from a file, to predict on. Nothing in it is ever executed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.npz import need, read_npy, read_npz
from perfed.data.records import Records, read_cells
from perfed.data.table import read_text


def read_samples(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read samples to predict on.

    Args:
        path: an .npz file (array x), .npy, or .csv with one flat sample per line.
        shape: the shape of a sample.

    Returns:
        The samples [n, *shape], or as the file has them where that is another shape.
    """
    kind = _kind(path)
    try:
        if kind == ".csv":
            if not path.stat().st_size:
                raise Problem(f"'{path}' is empty")
            x = np.genfromtxt(path, delimiter=",", dtype=np.float64, ndmin=2)
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


def read_records(path: Path) -> Records:
    """Read rows of a table to predict on, with the names of their columns.

    Args:
        path: a .csv file with a header line, an .npz file (array x, and perhaps columns), or .npy.

    Returns:
        The rows; without names of columns where the file has none.
    """
    if _kind(path) == ".csv":
        header, lines, cells = read_text(path)
        return read_cells(header, cells, lambda row: f"line {lines[row]} in {path.name}")
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path)
        x, names = need(arrays, ("x",), path)[0], arrays.get("columns")
    else:
        x, names = read_npy(path), None
    if x.dtype.kind not in "biuf" or x.ndim not in (1, 2):
        raise Problem(f"'{path}' must hold rows of numbers [samples, columns], not {x.dtype} {x.shape}")
    x = x.astype(np.float64).reshape(-1, x.shape[-1])
    if names is not None and names.shape != x.shape[1:]:
        raise Problem(f"'{path}': 'columns' must hold a name for each of the {x.shape[1]} columns of x")
    return Records(x, (None,) * x.shape[1], None if names is None else tuple(map(str, names)))


def _kind(path: Path) -> str:
    """Return the ending of a file that holds samples; refuse any other."""
    if not path.is_file():
        raise Problem(f"there is no input file '{path}'")
    kind = path.suffix.lower()
    if kind not in (".npz", ".npy", ".csv"):
        raise Problem(f"the input must be .npz, .npy or .csv, not '{path.name}'")
    return kind
