"""Fetching image data sets with the Hugging Face loader, once: they are kept as plain .npz files."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem

# name -> repository, image column, label column
HUB = {
    "mnist": ("ylecun/mnist", "image", "label"),
    "fashion-mnist": ("zalando-datasets/fashion_mnist", "image", "label"),
    "usps": ("flwrlabs/usps", "image", "label"),
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "cifar100": ("uoft-cs/cifar100", "img", "fine_label"),
}


def fetch(name: str, path: Path) -> None:
    """Download `name` and write it to `path` as x_train, y_train, x_test, y_test."""
    repository, image, label = HUB[name]
    try:
        loader = importlib.import_module("datasets")
    except ImportError:
        raise Problem(f"{path} does not exist; to fetch it: pip install 'perfed[data]'") from None
    try:
        raw = loader.load_dataset(repository)
        arrays = {}
        for part in ("train", "test"):
            arrays[f"x_{part}"] = np.stack([np.asarray(picture) for picture in raw[part][image]])
            arrays[f"y_{part}"] = np.asarray(raw[part][label], dtype=np.int64)
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
