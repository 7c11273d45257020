"""From rows of uploads to what a method's server sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfed.core.messages import Cohort, Uploads
from perfed.core.tree import tree_map
from perfed.engines.base import by_row

WeightedSum = Callable[[Tensor, Tensor], Tensor]  # weights [m, groups] and rows [m, ...] -> float64 [groups, ...]


def mean(uploads: Uploads, groups: int, weighted_sum: WeightedSum, used: Tensor | None = None) -> Cohort:
    """Reduce uploads to weighted means; sums run in float64, on a CPU in client order for every engine.

    Args:
        uploads: rows of uploads.
        groups: number of groups that `uploads.group` may name.
        weighted_sum: the engine's way to add rows.
        used: [m], False for rows that are left out though they keep their place: their weight is 0, and a row of
            weight 0 counts as one of zeros. None: all rows are used.

    Returns:
        The cohort that `aggregate` is given.

    Example:
        >>> add = lambda share, rows: share.T @ rows.double()  # an engine's does more: see Engine.weighted_sum
        >>> changes, weight = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([3.0, 1.0])
        >>> mean(Uploads(torch.arange(2), changes, (), weight), 1, add).mean
        tensor([1.7500, 3.5000])
    """
    weight: Tensor = uploads.weight
    size: Any = len(uploads.ids)
    if used is not None:
        weight, size = weight.where(used, 0), used.sum().double()  # a share of whole numbers would be in float32
    share = weight.double()[:, None]  # [m, 1]
    if uploads.group is not None:
        share = share * (uploads.group[:, None] == torch.arange(groups, device=share.device))  # [m, groups]
    grouped, total = uploads.group is not None, share.sum(0)

    def average(stacked: Tensor) -> Tensor:
        out = weighted_sum(share, stacked)
        out /= by_row(total.where(total > 0, 1.0), out)
        return (out if grouped else out[0]).to(stacked.dtype)

    return Cohort(uploads.ids, tree_map(average, uploads.mean), uploads.own, total if grouped else total[0], size)
