"""SMOTE: classes are evened out by samples made between neighbours of a class, here drawn one by one, never stored.

Chawla, Bowyer, Hall, Kegelmeyer: SMOTE: Synthetic Minority Over-sampling Technique. JAIR 2002.
https://arxiv.org/abs/1106.1813

Every class that is there is brought to the size of the largest. So a sample of an evened class is one of its own with
the chance (its size) / (the largest's), and lies between one of them and one of its nearest neighbours otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perfed.core.random import derive, pick, uniform


class Table(NamedTuple):
    """Hold a client's samples and who is near whom; rows behind its samples are filling.

    Attributes:
        z: [rows, numbers], the samples.
        y: [rows], their classes.
        size: [rows], how many samples its class has; 0 for filling.
        near: [rows, neighbours], the places of the nearest others of its class, the nearest first.
        others: [rows], how many of them there are.
    """

    z: Tensor
    y: Tensor
    size: Tensor
    near: Tensor
    others: Tensor


def neighbours(index: Tensor, z: Tensor, y: Tensor, real: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the nearest others of the same class.

    Args:
        index: [samples], the places of those whose neighbours are asked for.
        z: [rows, numbers], all samples.
        y: [rows], their classes.
        real: [rows], False for filling.
        most: how many neighbours a sample has at most.

    Returns:
        For each sample the size of its class, its neighbours' places [samples, most] and how many there are.
    """
    alike = (y[index][:, None] == y) & real
    others = alike & (index[:, None] != torch.arange(len(y), device=y.device))  # a twin is a neighbour, too
    far = torch.cdist(z[index], z).masked_fill(~others, torch.inf)
    near = far.argsort(dim=1, stable=True)[:, :most]
    return alike.sum(1), near, others.sum(1).clamp_max(most)


def draw(key: Tensor, count: int, table: Table) -> tuple[Tensor, Tensor]:
    """Draw samples of the evened set: every class that is there alike often.

    Args:
        key: what they are drawn from.
        count: how many.
        table: the samples, of which at least one is no filling.

    Returns:
        Samples [count, numbers], and their classes.
    """
    own = pick(derive(key, 1), count, torch.where(table.size > 0, 1 / table.size.clamp_min(1), 0))
    luck = uniform(derive(key, 2), (count, 3), torch.float64)
    made = luck[:, 0] >= table.size[own] / table.size.max()
    other = (luck[:, 1] * table.others[own]).long()
    towards = table.z[table.near[own, other]] - table.z[own]
    along = torch.where(made & (table.others[own] > 0), luck[:, 2], 0).to(table.z.dtype)
    return table.z[own] + along[:, None] * towards, table.y[own]
