"""What a source returns: all samples in one pool, before they become clients."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfed.config import DataConfig
from perfed.core.errors import Problem

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


def data_dir(config: DataConfig) -> Path:
    """The folder with data files: data.dir, else $PERFED_DATA, else ~/.cache/perfed."""
    if config.dir is not None:
        folder = Path(config.dir).expanduser()
        if not folder.is_dir():  # most likely mistyped: do not fill a new folder with a download
            raise Problem(f"data.dir: there is no folder '{config.dir}'")
        return folder
    named = os.environ.get("PERFED_DATA")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "perfed"
