"""What a source returns: all samples in one pool, before they become clients."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.training.config import DataConfig

TRAIN, VAL, TEST, UNDECIDED = 0, 1, 2, -1


@dataclass(frozen=True)
class Pool:
    """Samples as numpy arrays, one row each."""

    x: np.ndarray  # [rows, ...], float32, or uint8 [rows, channels, height, width] for images
    y: np.ndarray  # [rows], int64
    classes: int
    owner: np.ndarray | None = None  # [rows], the natural client of each row: 0, 1, 2, ...
    unit: np.ndarray | None = None  # [rows], rows with the same number must stay in one split
    mean: np.ndarray | None = None  # [channels], of x / 255
    std: np.ndarray | None = None
    names: tuple[str, ...] | None = None  # what people call each owner
    labels: tuple[str, ...] | None = None  # what the classes are called, where labels were text
    columns: tuple[str, ...] | None = None  # what the features are called, in a table
    part: np.ndarray | None = None  # [rows], TRAIN, VAL or TEST where the source has decided, else UNDECIDED
    official: np.ndarray | None = None  # [rows], TRAIN or TEST as the makers of the data set have it
    note: str = ""  # what whoever reads a result should know of these samples


def normalised(pool: Pool, config: DataConfig) -> Pool:
    """The pool with the mean and deviation that data.normalise asks for."""
    if config.normalise == "channel":
        return pool
    if pool.x.dtype != np.uint8:
        raise Problem(f"data.normalise '{config.normalise}' is for images of bytes, which '{config.name}' has not")
    half = np.full(pool.x.shape[1], 0.5) if config.normalise == "half" else None
    return replace(pool, mean=half, std=half)


def spread(n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Choose k of n places at equal distances: in a list sorted by class, every class gives its share."""
    if k == 0:
        return np.empty(0, dtype=np.int64)
    return np.minimum(((np.arange(k) + rng.random()) * (n / k)).astype(np.int64), n - 1)


def data_dir(config: DataConfig) -> Path:
    """The folder with data files: data.dir, else $PERFED_DATA, else ~/.cache/perfed."""
    if config.dir is not None:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():  # most likely mistyped: do not fill a new folder with a download
            raise Problem(f"data.dir: there is no folder '{config.dir}'")
        return folder
    named = os.environ.get("PERFED_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "perfed"
