"""Image data sets: the official training and test images in one pool, kept as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.hub import fetch
from perfed.data.npz import need, read_npz
from perfed.data.pool import TEST, TRAIN, Pool, data_dir
from perfed.data.strips import read_strips


@dataclass(frozen=True)
class ImageSet:
    """A data set of images, and where it is found.

    Attributes:
        file: its .npz file, which is fetched where it is missing.
        repository: its name on the Hugging Face hub.
        image_column: the hub's name of the images.
        label_column: the hub's name of the labels.
        classes: how many classes there are.
        strips: files that may stand in for the one; the last holds the official test images.
    """

    file: str
    repository: str
    image_column: str = "image"
    label_column: str = "label"
    classes: int = 10
    strips: tuple[str, ...] = ()

    def load(self, config: DataConfig, _seed: int) -> Pool:
        """Read the images, or fetch them.

        Args:
            config: says in which folder they are.

        Returns:
            Images uint8 [rows, channels, height, width], with mean and deviation of the official training pixels.
        """
        folder = data_dir(config)
        path, strips, note = folder / self.file, [folder / file for file in self.strips], ""
        if not path.is_file() and any(strip.is_file() for strip in strips):
            arrays = read_strips(strips)
            note = "pixels rounded to 6 bits" if "6bit" in strips[0].name else ""
        else:
            if not path.is_file():
                fetch(self.repository, self.image_column, self.label_column, path)
            arrays = read_npz(path)
        x_train, y_train, x_test, y_test = need(arrays, ("x_train", "y_train", "x_test", "y_test"), path)
        x = np.concatenate([_channels_first(x_train, path), _channels_first(x_test, path)])
        y = np.concatenate([y_train, y_test]).astype(np.int64)
        if len(x) != len(y) or y.min(initial=0) < 0 or y.max(initial=0) >= self.classes:
            raise Problem(
                f"{path} does not hold one label from 0 to {self.classes - 1} for each of its {len(x)} images"
            )
        mean, std = moments(x[: len(x_train)])
        owner, names = _writers(arrays)
        official = np.repeat([TRAIN, TEST], [len(x_train), len(x_test)])
        return Pool(x, y, self.classes, owner=owner, mean=mean, std=std, names=names, official=official, note=note)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation per channel of x / 255, exact, from counts of the 256 grey values."""
    value = np.arange(256) / 255
    channels = range(x.shape[1])
    share = np.stack([np.bincount(x[:, c].ravel(), minlength=256) / x[:, c].size for c in channels])
    mean = share @ value
    return mean, np.sqrt(share @ value**2 - mean**2)


def _channels_first(x: np.ndarray, path: Path) -> np.ndarray:
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise Problem(f"{path} holds {x.dtype} {x.shape}, not uint8 images [n, height, width] or [n, height, width, 3]")
    return x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)


def _writers(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Return who wrote each image, and what the writers are called, where the file says so."""
    if "writer_train" not in arrays or "writer_test" not in arrays:
        return None, None
    ids, owner = np.unique(np.concatenate([arrays["writer_train"], arrays["writer_test"]]), return_inverse=True)
    return owner, tuple(f"writer_{id:04d}" for id in ids)
