"""Coins that decide what comes next: how long equal ones follow one another, and what that makes of several rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perfed.core.random import derive, uniform

Turn = tuple[int, int]  # how many moves in a row, and how many other steps after them


def until(key: Tensor, chance: float) -> int:
    """Return how many coins there are before the first that shows what it shows with this chance.

    Args:
        key: what is drawn from.
        chance: above 0 and below 1.
    """
    return math.floor(math.log1p(-float(uniform(key, (), torch.float64))) / math.log1p(-chance))


def turns(key: Tensor, rows: int, end: float, chance: float) -> list[list[Turn]]:
    """Throw coins in rows until one that all rows have in common ends them.

    Args:
        key: what is drawn from.
        rows: how many.
        end: the chance of the common coin, in every step.
        chance: that of a move, where it does not end.

    Returns:
        The turns of each row: first what comes before any move, (1, other steps), then (moves, other steps after them).
    """
    steps, lines = until(derive(key, 0), end), []
    for coins in (uniform(derive(key, 1), (rows, steps), torch.float64) < chance).tolist():
        line = [[1, 0]]
        for move in coins:
            if not move:
                line[-1][1] += 1
            elif line[-1][1] or len(line) == 1:
                line.append([1, 0])
            else:
                line[-1][0] += 1
        lines.append([(moves, other) for moves, other in line])
    return lines
