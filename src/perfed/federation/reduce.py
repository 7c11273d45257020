"""From rows of uploads to what a method's server sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfed.core.messages import Cohort, Uploads
from perfed.core.tree import tree_map

WeightedSum = Callable[[Tensor, Tensor], Tensor]  # weights [m, groups] and rows [m, ...] -> float64 [groups, ...]


def mean(uploads: Uploads, groups: int, weighted_sum: WeightedSum, used: Tensor | None = None) -> Cohort:
    """Reduce uploads to weighted means; sums run in float64, on a CPU in client order for every engine.

    Args:
        uploads: rows of uploads.
        groups: number of groups that `uploads.group` may name.
        weighted_sum: the engine's way to add rows.
        used: [m], False for rows that are left out though they keep their place: their numbers count as 0, and so
            does their weight. None: all rows are used.

    Returns:
        The cohort that `aggregate` is given.
    """
    ids, weight, rows = uploads.ids, uploads.weight, uploads.mean
    size: Any = len(ids)
    if used is not None:
        mask = lambda tensor: used.view(-1, *(1,) * (tensor.dim() - 1))
        weight = weight.where(used, 0)
        rows = tree_map(lambda tensor: torch.where(mask(tensor), tensor, 0), rows)
        size = used.sum()
    share = weight.double()[:, None]  # [m, 1]
    if uploads.group is not None:
        share = share * torch.nn.functional.one_hot(uploads.group, groups)  # [m, groups]
    total = share.sum(0)
    grouped = uploads.group is not None

    def average(stacked: Tensor) -> Tensor:
        shape = (-1, *(1,) * (stacked.dim() - 1))
        out = weighted_sum(share, stacked)
        out /= total.where(total > 0, 1.0).view(shape)
        return (out if grouped else out[0]).to(stacked.dtype)

    return Cohort(ids, tree_map(average, rows), uploads.own, total if grouped else total[0], size)
