"""Folder: your own files in --data-dir: one .npz or .csv per client, or one .csv with a client column.

An .npz file has `x` and `y`, which are split as other data are, or `x_train`, `y_train`, `x_test`, `y_test` (and
perhaps `x_val`, `y_val`), which are used exactly as they are. Samples become float32; uint8 images
[n, channels, height, width] stay as they are and are divided by 255 when used. All clients are used, whatever
data.clients says. Client names are labels for people: no path is made from them. In a table, which is a CSV file or
samples of one axis, a value may be missing (an empty cell, NaN); in a CSV file a column may hold text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.errors import Problem, few
from perfed.data.channels import channels_first
from perfed.data.config import DataConfig
from perfed.data.npz import need, read_npz
from perfed.data.pool import TEST, TRAIN, UNDECIDED, VAL, Pool
from perfed.data.table import Table, in_one, read_csv
from perfed.data.tasks import read_told

ONLY_PARTITION = "natural"
USUAL_NORMALISE = "federated"
_PICKLED = {".pkl", ".pickle", ".pt", ".pth", ".joblib"}


def load(config: DataConfig, _seed: int) -> Pool:
    """Read all clients at data.dir."""
    tables, notices = _tables(config)
    full = [table for table in tables if len(table.y)]
    for client in dict.fromkeys(table.client for table in tables):
        if client not in {table.client for table in full}:
            notices.append(f"client '{client}' has no samples: it is left out")
    if not any(table.part in (TRAIN, UNDECIDED) for table in full):
        raise Problem(f"data.dir '{config.dir}': no client has a training sample")
    tables, notice = channels_first(full, config.channels)
    notices += notice
    for table in tables:
        _check(table)
    first = tables[0]
    for table in tables:
        named = table.columns is not None and first.columns is not None  # they are told apart by their columns
        if (not named and table.x.shape[1:] != first.x.shape[1:]) or _is_image(table) != _is_image(first):
            kind = lambda other: f"{other.x.dtype} samples of shape {other.x.shape[1:]}"
            where = f"client '{table.client}' ({table.file.name})"
            raise Problem(f"{where} has {kind(table)}, but client '{first.client}' has {kind(first)}")
    told = read_told(tables, config)
    records = in_one(tables) if first.x.ndim == 2 and told.task != "next_token" else None
    if told.task == "next_token":
        x = np.concatenate([table.x for table in tables]).astype(np.int64)
    elif records is None:
        x = np.concatenate([table.x if _is_image(first) else _floats(table) for table in tables])
    else:
        x = records.values
    sizes = [len(table.y) for table in tables]
    names = tuple(dict.fromkeys(table.client for table in tables))
    number = {name: index for index, name in enumerate(names)}
    owner = np.repeat([number[table.client] for table in tables], sizes)
    part = np.repeat([table.part for table in tables], sizes)
    known: dict[str, Any] = {"names": names, "labels": told.names, "notices": (*notices, *told.notices)}
    known |= {} if records is None else {"columns": records.columns, "texts": records.texts}
    return Pool(x, told.y, told.outputs, owner=owner, part=part, task=told.task, **known)


def _tables(config: DataConfig) -> tuple[list[Table], list[str]]:
    """Read every client's tables, and sentences about what was left out."""
    if config.dir is None:
        raise Problem("data set 'folder' needs data.dir: the folder with one .npz or .csv per client, or one .csv file")
    path = Path(config.dir).expanduser()
    if path.is_file():
        if path.suffix.lower() == ".npz" and not config.client_column:
            return _read(path), []
        if path.suffix.lower() != ".csv":
            raise Problem(f"data.dir must be a folder or one .csv file, not '{config.dir}'")
        tables, index = read_csv(path, config, several=not config.client_column)
        return tables, _not_features({path.name: index})
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
        return [table for file in npz for table in _read(file)], []
    tables: list[Table] = []
    left_out: dict[str, list[str]] = {}
    for file in texts:
        more, left_out[file.name] = read_csv(file, config, several=len(texts) > 1 or not config.client_column)
        tables += more
    return tables, _not_features(left_out)


def _not_features(left_out: dict[str, list[str]]) -> list[str]:
    """Say which columns of which files are left out."""
    files: dict[str, list[str]] = {}
    for file, columns in left_out.items():
        for column in columns:
            files.setdefault(column, []).append(file)
    called = lambda column: f"the column '{column}'" if column else "the column without a name"
    return [
        f"{called(column)} only counts the rows: it is no feature ({few(names)})" for column, names in files.items()
    ]


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
        if y.ndim not in (1, 2) or y.shape[1:] == (1,) or x.ndim == 0 or len(x) != len(y):
            raise Problem(
                f"client '{file.stem}' ({file.name}): x{key} has shape {x.shape} and y{key} has shape {y.shape}, but "
                "they must be [n, ...] and [n], or [n, labels]"
            )
        tables.append(Table(file.stem, file, x, y, part, f"x{key}", columns=_names(arrays, x, file)))
    return tables


def _names(arrays: dict[str, np.ndarray], x: np.ndarray, file: Path) -> tuple[str, ...] | None:
    """Return what an .npz file calls the columns of a table, if it does."""
    if "columns" not in arrays:
        return None
    names = arrays["columns"]
    if names.dtype.kind != "U" or names.shape != x.shape[1:] or len(set(names.tolist())) < len(names):
        raise Problem(f"{file.name}: 'columns' must hold a name of its own for each column of x {x.shape}")
    return tuple(names.tolist())


def _check(table: Table) -> None:
    where = f"client '{table.client}' ({table.file.name})"
    if table.x.ndim < 2 or table.x.dtype.kind not in "biufO":  # objects are the cells of a CSV file
        raise Problem(f"{where}: {table.key} must be numbers [n, ...], not {table.x.dtype} of shape {table.x.shape}")
    if table.y.dtype.kind not in "biufU":
        raise Problem(f"{where}: labels must be whole numbers or text, not {table.y.dtype}")
    if table.x.dtype.kind == "f":
        x = _floats(table)
        bad = ~(np.isfinite(x) | (np.isnan(x) & (x.ndim == 2))).reshape(len(x), -1).all(axis=1)
        if bad.any():
            raise Problem(f"{table.row(int(np.argmax(bad)))}: a feature is not a finite number")


def _floats(table: Table) -> np.ndarray:
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is reported as such
        return table.x.astype(np.float32)


def _is_image(table: Table) -> bool:
    return table.x.dtype == np.uint8 and table.x.ndim == 4
