"""MNIST, Fashion-MNIST, USPS, CIFAR-10 and CIFAR-100: the official train and test images in one pool, kept as uint8."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.hub import fetch
from perfed.data.npz import need, read_npz
from perfed.data.pool import TEST, TRAIN, Pool, data_dir
from perfed.training.config import DataConfig

_CLASSES = {"cifar100": 100}
# Strips of WebP images take half the room of a plain file; the last file of a list holds the official test images.
_STRIPS = {
    "cifar10": (*(f"cifar10_train_{i}.npz" for i in range(1, 6)), "cifar10_test.npz"),
    "cifar100": ("cifar100_train_6bit.npz", "cifar100_test_6bit.npz"),
}
_PLAIN = ("x_train", "y_train", "x_test", "y_test")


def load(config: DataConfig, _seed: int) -> Pool:
    """Images uint8 [n, channels, height, width], with mean and deviation of the official training pixels."""
    name, folder = config.name, data_dir(config)
    path = folder / f"{name.replace('-', '_')}.npz"
    strips = [folder / file for file in _STRIPS.get(name, ())]
    if not path.is_file() and any(strip.is_file() for strip in strips):
        arrays, note = _read_strips(strips), "pixels rounded to 6 bits" if "6bit" in strips[0].name else ""
    else:
        if not path.is_file():
            fetch(name, path)
        arrays, note = read_npz(path), ""
    x_train, y_train, x_test, y_test = need(arrays, _PLAIN, path)
    x = np.concatenate([_channels_first(x_train, path), _channels_first(x_test, path)])
    y = np.concatenate([y_train, y_test]).astype(np.int64)
    classes = _CLASSES.get(name, 10)
    if len(x) != len(y) or y.min(initial=0) < 0 or y.max(initial=0) >= classes:
        raise Problem(f"{path} does not hold one label from 0 to {classes - 1} for each of its {len(x)} images")
    mean, std = moments(x[: len(x_train)])
    owner, names = _writers(arrays)
    official = np.repeat([TRAIN, TEST], [len(x_train), len(x_test)])
    return Pool(x, y, classes, owner=owner, mean=mean, std=std, names=names, official=official, note=note)


def _channels_first(x: np.ndarray, path: Path) -> np.ndarray:
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise Problem(f"{path} holds {x.dtype} {x.shape}, not uint8 images [n, height, width] or [n, height, width, 3]")
    return x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel of x / 255, exact, from counts of the 256 grey values."""
    value = np.arange(256) / 255
    share = np.stack([np.bincount(x[:, c].ravel(), minlength=256) / x[:, c].size for c in range(x.shape[1])])
    mean = share @ value
    return mean, np.sqrt(share @ value**2 - mean**2)


def _writers(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    if "writer_train" not in arrays or "writer_test" not in arrays:
        return None, None
    ids, owner = np.unique(np.concatenate([arrays["writer_train"], arrays["writer_test"]]), return_inverse=True)
    return owner, tuple(f"writer_{i:04d}" for i in ids)


def _read_strips(paths: list[Path]) -> dict[str, np.ndarray]:
    for path in paths:
        if not path.is_file():
            raise Problem(f"{path} does not exist, though other parts of this data set do")
    parts = [_read_strip(path) for path in paths]
    x_train, y_train = (np.concatenate(a) for a in zip(*parts[:-1], strict=True))
    return dict(zip(_PLAIN, (x_train, y_train, *parts[-1]), strict=True))


def _read_strip(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] and labels of one file of strips: 500 images one below the other, lossless WebP."""
    try:
        from PIL import Image
    except ImportError:
        raise Problem(f"{path} needs Pillow to be read: pip install 'perfed[data]'") from None
    arrays = read_npz(path)
    data, offsets = need(arrays, ("webp", "offsets"), path)
    (labels,) = need(arrays, ("fine" if "fine" in arrays else "labels",), path)
    x = np.empty((len(labels), 32, 32, 3), np.uint8)
    done = 0
    for start, end in pairwise(offsets):
        try:
            strip = np.asarray(Image.open(io.BytesIO(data[start:end].tobytes()))).reshape(-1, 32, 32, 3)
            x[done : done + len(strip)] = strip
        except (OSError, ValueError):
            raise Problem(f"{path} holds a strip of images that cannot be read; is it damaged?") from None
        done += len(strip)
    if done != len(labels):
        raise Problem(f"{path} holds {done} images for {len(labels)} labels")
    if "6bit" in path.name:  # 64 levels, spread over 0 to 255
        x = ((np.arange(256) * 255 + 31) // 63).astype(np.uint8)[x]
    return x, labels
