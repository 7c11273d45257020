"""A pool: all samples of a data set, before they become clients."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.task import IGNORED
from perfed.data.config import DataConfig
from perfed.data.npz import read_npz
from perfed.data.strata import Strata, strata

TRAIN, VAL, TEST, UNDECIDED = 0, 1, 2, -1


@dataclass(frozen=True)
class Pool:
    """Samples as numpy arrays, one row each: what a source returns.

    Attributes:
        x: [rows, ...], float32, or uint8 [rows, channels, height, width] for images, int64 [rows, length] for tokens;
            where there are `texts` a table of float64 [rows, columns], NaN where a value is missing, of a text its
            place in its column's texts.
        y: [rows], int64, classes from 0; for other tasks float32 [rows, labels] of 0 and 1 (binary, multilabel),
            float64 [rows, targets] (regression), int64 [rows, length] (next_token; IGNORED where none is to be told).
        classes: how many classes there are, or labels, targets, tokens: the outputs that a network needs.
        owner: [rows], the natural client of each row: 0, 1, 2, ...
        unit: [rows]; rows with the same number must stay in one split.
        mean: [channels], mean of x / 255.
        std: [channels], standard deviation of x / 255.
        names: what people call each owner.
        labels: what the classes are called, where labels were text; or the labels, the targets, the tokens.
        columns: what the columns are called, in a table.
        texts: for each column of a table the texts that occur in it; None: it holds numbers.
        part: [rows], TRAIN, VAL or TEST where the source has decided, else UNDECIDED.
        official: [rows], TRAIN or TEST as the makers of the data set have it.
        note: what whoever reads a result should know of these samples.
        notices: sentences that are said before a run begins.
        task: what is to be told of a sample: a name in `perfed.core.task`.
        strata: what rows are counted by where they are dealt; None: their classes.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    owner: np.ndarray | None = None
    unit: np.ndarray | None = None
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    texts: tuple[tuple[str, ...] | None, ...] | None = None
    part: np.ndarray | None = None
    official: np.ndarray | None = None
    note: str = ""
    notices: tuple[str, ...] = ()
    task: str = "classification"
    strata: Strata | None = None

    @cached_property
    def stratum(self) -> np.ndarray:
        """The stratum of each row."""
        return self.y if self.strata is None else self.strata.of(self.y)

    @property
    def kinds(self) -> int:
        """How many strata there are."""
        return self.classes if self.strata is None else len(self.strata.names)

    def only(self, rows: np.ndarray) -> Pool:
        """Return a pool of some rows."""
        fields = {name: getattr(self, name) for name in ("x", "y", "owner", "unit", "part", "official")}
        return replace(self, **{name: None if array is None else array[rows] for name, array in fields.items()})

    def where(self, row: int) -> str:
        """Say where a row stands, for people."""
        if self.owner is None or self.names is None:
            return f"row {row}"
        return f"row {row} (client '{self.names[self.owner[row]]}')"


def checked(pool: Pool, name: str, bins: int = 10) -> Pool:
    """Return a source's pool with its strata, numbers in so many `bins`.

    What is not as `Pool` says is a Problem that names the source `name`.
    """
    _check_rows(pool, f"data set '{name}'")
    _check_labels(pool, f"data set '{name}'")
    _check_samples(pool, f"data set '{name}'")
    return replace(pool, strata=strata(pool.task, pool.y, pool.labels, bins))


def _check_rows(pool: Pool, source: str) -> None:
    """Refuse arrays that do not describe the same rows."""
    count = len(pool.x)
    if count == 0:
        raise Problem(f"{source} has no samples")
    for field in ("y", "owner", "unit", "part", "official"):
        array = getattr(pool, field)
        columns = pool.y.shape[1:] if field == "y" and pool.task != "classification" else ()
        if array is not None and array.shape != (count, *columns):
            raise Problem(
                f"{source}: {field} must have one number for each of the {count} rows of x, not {array.shape}"
            )
    if pool.owner is not None:
        if pool.owner.dtype.kind != "i" or pool.owner.min() < 0:
            raise Problem(f"{source}: owner must hold whole numbers from 0, the client of each row")
        if pool.names is not None and pool.owner.max() >= len(pool.names):
            raise Problem(f"{source}: owner goes up to {pool.owner.max()}, but there are {len(pool.names)} names")


def _check_labels(pool: Pool, source: str) -> None:
    """Refuse labels that are none of the task."""
    if pool.labels is not None and len(pool.labels) != pool.classes:
        raise Problem(f"{source}: {len(pool.labels)} names of labels do not name {pool.classes} classes")
    if pool.task != "classification":
        _check_other_labels(pool, source)
        return
    if pool.y.dtype != np.int64:
        raise Problem(f"{source}: y must be int64, not {pool.y.dtype}")
    outside = (pool.y < 0) | (pool.y >= pool.classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise Problem(
            f"{source}: {pool.where(row)} has the label {pool.y[row]}, but {pool.classes} classes are numbered from 0 "
            f"to {pool.classes - 1}"
        )


def _check_other_labels(pool: Pool, source: str) -> None:
    """Refuse labels of other tasks than classification that are none."""
    if pool.task == "next_token":
        wrong = (pool.y != IGNORED) & ((pool.y < 0) | (pool.y >= pool.classes))
        kind, dtype = f"a token from 0 to {pool.classes - 1}, or {IGNORED} where there is none", np.int64
    elif pool.task == "regression":
        wrong, kind, dtype = ~np.isfinite(pool.y), "a finite number", np.float64
    else:
        wrong, kind, dtype = (pool.y != 0) & (pool.y != 1), "0 or 1", np.float32
    if pool.y.dtype != dtype:
        raise Problem(f"{source}: y must be {np.dtype(dtype)} for the task '{pool.task}', not {pool.y.dtype}")
    if pool.y.ndim != 2 or (pool.task != "next_token" and pool.y.shape[1] != pool.classes):
        raise Problem(f"{source}: y has the shape {pool.y.shape}, not [rows, {pool.classes}], a column for each label")
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise Problem(f"{source}: {pool.where(row)} has {pool.y[row, column]} in label {column}, which is not {kind}")


def _check_samples(pool: Pool, source: str) -> None:
    """Refuse samples of a type that networks do not get, and numbers that are none."""
    if pool.x.ndim < 2:
        raise Problem(f"{source}: x must have the shape [rows, ...] with something in each row, not {pool.x.shape}")
    images = pool.x.dtype == np.uint8 and pool.x.ndim == 4
    if pool.task == "next_token":
        _check_tokens(pool, source)
        return
    if pool.texts is not None:
        return  # a table as people have it: looked at cell by cell where it was read
    if pool.x.dtype != np.float32 and not images:
        raise Problem(
            f"{source}: x must be float32, or uint8 images [rows, channels, height, width], not {pool.x.dtype} of "
            f"shape {pool.x.shape}"
        )
    if images:
        return
    if pool.columns is not None and len(pool.columns) != pool.x.shape[1]:
        raise Problem(f"{source}: {len(pool.columns)} names of columns do not name {pool.x.shape[1]} features")
    flat = pool.x.reshape(len(pool.x), -1)
    bad = ~np.isfinite(flat).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        place = int(np.argmax(~np.isfinite(flat[row])))
        column = f"feature {place}" if pool.columns is None else f"column '{pool.columns[place]}'"
        raise Problem(f"{source}: {pool.where(row)} has {flat[row, place]} in {column}, which is not a finite number")


def _check_tokens(pool: Pool, source: str) -> None:
    """Refuse what are no tokens, or do not stand beside their targets."""
    if pool.x.dtype != np.int64 or pool.x.shape != pool.y.shape:
        form = f"{pool.x.dtype} {pool.x.shape} and {pool.y.shape}"
        raise Problem(f"{source}: x and y must be tokens int64 [rows, length], not {form}")
    if pool.x.min() < 0 or pool.x.max() >= pool.classes:
        raise Problem(f"{source}: x has {pool.x.min()} to {pool.x.max()}, and tokens go from 0 to {pool.classes - 1}")


def read_file(config: DataConfig, name: str, holds: str, source: str) -> tuple[dict[str, np.ndarray], Path]:
    """Read a data set's file in the data folder; one that is missing is a Problem that says how to make it.

    Args:
        config: says which folder.
        name: the file.
        holds: the arrays that it must hold, in words.
        source: what it is made from.

    Returns:
        Its arrays, and where it is.
    """
    path = data_dir(config) / name
    if not path.is_file():
        raise Problem(f"{path} does not exist; make it ({holds}) from {source}")
    return read_npz(path), path


def spread(count: int, chosen: int, rng: np.random.Generator) -> np.ndarray:
    """Choose places at equal distances: in a list sorted by class, every class gives its share."""
    if chosen == 0:
        return np.empty(0, dtype=np.int64)
    return np.minimum(((np.arange(chosen) + rng.random()) * (count / chosen)).astype(np.int64), count - 1)


def label_tensor(y: np.ndarray) -> Tensor:
    """Return labels as networks are trained on them: targets of float64 become float32, as their outputs are."""
    return torch.from_numpy(y.astype(np.float32) if y.dtype == np.float64 else y)


def data_dir(config: DataConfig) -> Path:
    """Return the folder with data files: data.dir, else $PERFED_DATA, else ~/.cache/perfed."""
    if config.dir is not None:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():  # most likely mistyped: do not fill a new folder with a download
            raise Problem(f"data.dir: there is no folder '{config.dir}'")
        return folder
    named = os.environ.get("PERFED_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "perfed"
