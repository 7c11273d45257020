"""Strips of WebP images: 500 images one below the other, lossless, in half the room of a plain file."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.npz import need, read_npz


def read_strips(paths: list[Path]) -> dict[str, np.ndarray]:
    """Read the arrays that a plain file would have; the last of these files holds the official test images."""
    for path in paths:
        if not path.is_file():
            raise Problem(f"{path} does not exist, though other parts of this data set do")
    *training, (x_test, y_test) = [_read_file(path) for path in paths]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*training, strict=True))
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _read_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, 32, 32, 3] and their labels from the strips of a file."""
    try:
        from PIL import Image  # optional: of the extra 'data'
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
