"""Folder: your own files in --data-dir: one .npz or .csv per client, or one .csv with a client column.

An .npz file has `x` and `y`, which are split as other data are, or `x_train`, `y_train`, `x_test`, `y_test` (and
perhaps `x_val`, `y_val`), which are used exactly as they are. Samples become float32; uint8 images
[n, channels, height, width] stay as they are and are divided by 255 when used. All clients are used, whatever
data.clients says. Client names are labels for people: no path is made from them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.npz import need, read_npz
from perfed.data.pool import TEST, TRAIN, UNDECIDED, VAL, Pool
from perfed.data.table import Table, read_csv

ONLY_PARTITION = "natural"
MOST_CLASSES = 10_000  # a larger label is an id or a measurement by mistake
_PICKLED = {".pkl", ".pickle", ".pt", ".pth", ".joblib"}


def load(config: DataConfig, _seed: int) -> Pool:
    """Read all clients at data.dir."""
    tables, columns = _tables(config)
    tables = [table for table in tables if len(table.y) or table.part in (TRAIN, UNDECIDED)]
    for table in tables:
        _check(table)
    first = tables[0]
    for table in tables:
        if table.x.shape[1:] != first.x.shape[1:] or _is_image(table) != _is_image(first):
            kind = lambda other: f"{other.x.dtype} samples of shape {other.x.shape[1:]}"
            where = f"client '{table.client}' ({table.file.name})"
            raise Problem(f"{where} has {kind(table)}, but client '{first.client}' has {kind(first)}")
    y, labels = _labels(tables)
    x = np.concatenate([table.x if _is_image(first) else _floats(table) for table in tables])
    sizes = [len(table.y) for table in tables]
    names = tuple(dict.fromkeys(table.client for table in tables))
    number = {name: index for index, name in enumerate(names)}
    owner = np.repeat([number[table.client] for table in tables], sizes)
    part = np.repeat([table.part for table in tables], sizes)
    return Pool(x, y, int(y.max()) + 1, owner=owner, names=names, part=part, labels=labels, columns=columns)


def _tables(config: DataConfig) -> tuple[list[Table], tuple[str, ...] | None]:
    """Read every client's tables, and the names of the features in CSV files."""
    if config.dir is None:
        raise Problem("data set 'folder' needs data.dir: the folder with one .npz or .csv per client, or one .csv file")
    path = Path(config.dir).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".csv":
            raise Problem(f"data.dir must be a folder or one .csv file, not '{config.dir}'")
        tables, columns = read_csv(path, config, None, several=False)
        return tables, tuple(columns)
    if not path.is_dir():
        raise Problem(f"data.dir: there is no folder '{config.dir}'")
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    for file in files:
        if file.suffix.lower() in _PICKLED:
            raise Problem(f"{file} is not opened, because such files can run code: save x and y with np.savez as .npz")
    npz = [file for file in files if file.suffix.lower() == ".npz"]
    texts = [file for file in files if file.suffix.lower() == ".csv"]
    if npz and texts:
        raise Problem(f"data.dir '{config.dir}' holds both .npz and .csv files: keep one kind")
    if not npz and not texts:
        raise Problem(f"data.dir '{config.dir}' holds no .npz and no .csv file")
    if npz:
        return [table for file in npz for table in _read(file)], None
    tables: list[Table] = []
    columns: list[str] | None = None
    for file in texts:
        more, columns = read_csv(file, config, columns, several=len(texts) > 1)
        tables += more
    return tables, tuple(columns or ())


def _read(file: Path) -> list[Table]:
    """Read the client of an .npz file."""
    arrays = read_npz(file)
    keys = {"": UNDECIDED}
    if "x_train" in arrays or "y_train" in arrays:
        if "x" in arrays or "y" in arrays:
            raise Problem(f"{file.name} has both x and x_train: keep either x, y or x_train, y_train, x_test, y_test")
        keys = {"_train": TRAIN, "_val": VAL, "_test": TEST}
        if "x_val" not in arrays and "y_val" not in arrays:
            del keys["_val"]
    tables = []
    for key, part in keys.items():
        x, y = need(arrays, (f"x{key}", f"y{key}"), file.name)
        if y.ndim != 1 or x.ndim == 0 or len(x) != len(y):
            raise Problem(
                f"client '{file.stem}' ({file.name}): x{key} has shape {x.shape} and y{key} has shape {y.shape}, but "
                "they must be [n, ...] and [n]"
            )
        tables.append(Table(file.stem, file, x, y, part, f"x{key}"))
    return tables


def _check(table: Table) -> None:
    where = f"client '{table.client}' ({table.file.name})"
    if len(table.y) == 0:
        raise Problem(f"{where} has no training sample")
    if table.x.ndim < 2 or table.x.dtype.kind not in "biuf":
        raise Problem(f"{where}: {table.key} must be numbers [n, ...], not {table.x.dtype} of shape {table.x.shape}")
    if table.y.dtype.kind not in "biufU":
        raise Problem(f"{where}: labels must be whole numbers or text, not {table.y.dtype}")
    if table.x.dtype.kind == "f":
        bad = ~np.isfinite(_floats(table)).reshape(len(table.x), -1).all(axis=1)
        if bad.any():
            raise Problem(f"{table.row(int(np.argmax(bad)))}: a feature is not a finite number")


def _floats(table: Table) -> np.ndarray:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is reported as such
        return table.x.astype(np.float32)


def _is_image(table: Table) -> bool:
    return table.x.dtype == np.uint8 and table.x.ndim == 4


def _labels(tables: list[Table]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return labels as class numbers, and their names where they are text, which is numbered in alphabetical order."""
    if any(table.y.dtype.kind == "U" for table in tables):
        text = np.concatenate([table.y.astype(str) for table in tables])
        try:
            text.astype(np.float64)
        except ValueError:
            names, numbers = np.unique(text, return_inverse=True)
            return numbers.astype(np.int64), tuple(map(str, names))
    numbers = [table.y.astype(np.float64) for table in tables]
    for table, y in zip(tables, numbers, strict=True):
        bad = ~((y >= 0) & (y < MOST_CLASSES) & (y == np.floor(y)))
        if bad.any():
            row = int(np.argmax(bad))
            raise Problem(
                f"{table.row(row).replace(' of x', ' of y')}: the label {table.y[row]} is not a whole number from 0 to "
                f"{MOST_CLASSES - 1}"
            )
    return np.concatenate(numbers).astype(np.int64), None
