"""Random crops and mirror images of training samples, drawn from the keys of their batches.

What happens to a sample follows from the key of its step and its place in the batch, so every engine does the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from perfed.core.random import GOLDEN, derive, mix

Augment = Literal["none", "flip", "crop", "crop-flip"]

PURPOSE = 1 << 40  # part of a step's key; methods may take the small numbers for draws of their own
BORDER = 4  # black pixels around an image, out of which a crop of its own size is taken
SHIFTS = 2 * BORDER + 1  # places of a crop, along each side


def moves(augment: str, key: Tensor, slots: int) -> Tensor:
    """Draw what happens to the images of batches.

    Args:
        augment: flip, crop or crop-flip.
        key: keys of steps [...].
        slots: images in a batch.

    Returns:
        A number for each image [..., slots], uint8: twice the place of its crop, row by row, and 1 more where it is
        mirrored.
    """
    place = torch.arange(slots, device=key.device)
    drawn = mix(derive(key, PURPOSE)[..., None] + GOLDEN * (place + 1))
    middle = BORDER * SHIFTS + BORDER
    crop = (drawn >> 8 & 0x7FFFFFFF) % SHIFTS**2 if "crop" in augment else torch.full_like(drawn, middle)
    return (2 * crop + (drawn & 1 if "flip" in augment else 0)).to(torch.uint8)


def moved(x: Tensor, move: Tensor) -> Tensor:
    """Return images with a border of zeros, cropped to their size again, then mirrored.

    Args:
        x: images [n, channels, high, wide].
        move: [n], as drawn by `moves`.
    """
    (n, channels, high, wide), code = x.shape, move.long()
    column = torch.arange(wide, device=x.device)
    column = torch.where(code[:, None] % 2 > 0, wide - 1 - column, column) + (code // 2 % SHIFTS - BORDER)[:, None]
    row = torch.arange(high, device=x.device) + (code // 2 // SHIFTS - BORDER)[:, None]
    inside = ((row >= 0) & (row < high))[:, :, None] & ((column >= 0) & (column < wide))[:, None]  # [n, high, wide]
    rows = row.clamp(0, high - 1)[:, None, :, None].expand(n, channels, high, wide)
    columns = column.clamp(0, wide - 1)[:, None, None].expand(n, channels, high, wide)
    return x.gather(2, rows).gather(3, columns) * inside[:, None]
