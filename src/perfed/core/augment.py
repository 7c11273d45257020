"""Random crops and mirror images of training samples, drawn from the keys of their batches; and distorted copies.

What happens to a sample follows from the key of its step and its place in the batch, so every engine does the same.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.core.random import GOLDEN, derive, mix, uniform

Augment = Literal["none", "flip", "crop", "crop-flip"]

PURPOSE = 1 << 40  # part of a step's key; methods may take the small numbers for draws of their own
BORDER = 4  # black pixels around an image, out of which a crop of its own size is taken
SHIFTS = 2 * BORDER + 1  # places of a crop, along each side
TURN, GROWTH, SHIFT = math.radians(25), 0.5, 0.1  # how far a distortion goes: an angle, and shares of a side


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


def distorted(x: Tensor, key: Tensor) -> Tensor:
    """Return images after one move each: turned, sheared, made larger or smaller, or shifted.

    Turned or sheared by up to 25 degrees, 0.5 to 1.5 times as large, or shifted by up to a tenth of each side. Between
    pixels numbers are interpolated, and what comes in from outside is as the image's edge, so none leaves its range.

    Args:
        x: images [n, channels, high, wide], of floating-point numbers; samples of another shape stay as they are.
        key: [n], a key for each.
    """
    if x.dim() != 4:
        return x
    high, wide = x.shape[-2:]
    draw, size = uniform(key, (3,), torch.float64), x.new_tensor([wide, high], dtype=torch.float64)
    by, zero = 2 * draw[:, 1:] - 1, torch.zeros_like(draw[:, 0])
    angle, growth, away = TURN * by[:, 0], 1 / (1 + GROWTH * by[:, 0]), SHIFT * size * by
    sin, cos, same = angle.sin(), angle.cos(), torch.ones_like(zero)
    moves = [  # where in the old image a new pixel lies: a matrix, row by row, and an offset
        (cos, -sin, sin, cos, zero, zero),
        (same, angle.tan(), zero, same, zero, zero),
        (growth, zero, zero, growth, zero, zero),
        (same, zero, zero, same, *away.unbind(1)),
    ]
    table = torch.stack([torch.stack(move, 1) for move in moves], 1)
    move = table.gather(1, (4 * draw[:, :1]).long()[:, :, None].expand(-1, 1, 6))[:, 0]
    row, column = (torch.arange(n, device=x.device, dtype=torch.float64) - (n - 1) / 2 for n in (high, wide))
    place = torch.stack([column.expand(high, wide), row[:, None].expand(high, wide)], -1)  # from the middle
    place = place @ move[:, None, :4].unflatten(2, (2, 2)).mT + move[:, None, None, 4:]
    return F.grid_sample(x, (2 * place / size).to(x.dtype), padding_mode="border", align_corners=False)
