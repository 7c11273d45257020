"""A pool: all samples of a data set, before they become clients."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig

TRAIN, VAL, TEST, UNDECIDED = 0, 1, 2, -1


@dataclass(frozen=True)
class Pool:
    """Samples as numpy arrays, one row each: what a source returns.

    Attributes:
        x: [rows, ...], float32, or uint8 [rows, channels, height, width] for images.
        y: [rows], int64, classes from 0.
        classes: how many classes there are.
        owner: [rows], the natural client of each row: 0, 1, 2, ...
        unit: [rows]; rows with the same number must stay in one split.
        mean: [channels], mean of x / 255.
        std: [channels], standard deviation of x / 255.
        names: what people call each owner.
        labels: what the classes are called, where labels were text.
        columns: what the features are called, in a table.
        part: [rows], TRAIN, VAL or TEST where the source has decided, else UNDECIDED.
        official: [rows], TRAIN or TEST as the makers of the data set have it.
        note: what whoever reads a result should know of these samples.
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
    part: np.ndarray | None = None
    official: np.ndarray | None = None
    note: str = ""


def normalised(pool: Pool, config: DataConfig) -> Pool:
    """Return the pool with the mean and deviation that data.normalise asks for."""
    if config.normalise == "channel":
        return pool
    if pool.x.dtype != np.uint8:
        raise Problem(f"data.normalise '{config.normalise}' is for images of bytes, which '{config.name}' has not")
    half = np.full(pool.x.shape[1], 0.5) if config.normalise == "half" else None
    return replace(pool, mean=half, std=half)


def spread(count: int, chosen: int, rng: np.random.Generator) -> np.ndarray:
    """Choose places at equal distances: in a list sorted by class, every class gives its share."""
    if chosen == 0:
        return np.empty(0, dtype=np.int64)
    return np.minimum(((np.arange(chosen) + rng.random()) * (count / chosen)).astype(np.int64), count - 1)


def data_dir(config: DataConfig) -> Path:
    """Return the folder with data files: data.dir, else $PERFED_DATA, else ~/.cache/perfed."""
    if config.dir is not None:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():  # most likely mistyped: do not fill a new folder with a download
            raise Problem(f"data.dir: there is no folder '{config.dir}'")
        return folder
    named = os.environ.get("PERFED_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "perfed"
