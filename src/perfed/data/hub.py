"""Fetching image data sets with the Hugging Face loader, once: they are kept as plain .npz files."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem


def fetch(repository: str, image_column: str, label_column: str, path: Path) -> None:
    """Download a data set and write it to `path` as x_train, y_train, x_test, y_test."""
    try:
        loader = importlib.import_module("datasets")
    except ImportError:
        raise Problem(f"{path} does not exist; to fetch it: pip install 'perfed[data]'") from None
    try:
        raw = loader.load_dataset(repository)
        arrays = {}
        for part in ("train", "test"):
            arrays[f"x_{part}"] = np.stack([np.asarray(picture) for picture in raw[part][image_column]])
            arrays[f"y_{part}"] = np.asarray(raw[part][label_column], dtype=np.int64)
    except Exception as error:  # network, hub and format errors come in many classes
        first = (str(error).splitlines() or [""])[0]
        raise Problem(f"'{repository}' could not be fetched from the Hugging Face hub: {first}") from error
    partial = path.with_suffix(".part.npz")  # a broken write must not look like a finished file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(partial, **arrays)
        partial.replace(path)
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}") from error
