"""From rows of uploads to what a method's server sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfed.core.messages import Cohort, Uploads, covers, is_single
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
    grouped = uploads.group is not None
    size: Any = len(uploads.ids) if used is None else used.sum().double()  # a share of whole numbers would be float32

    def shares(weight: Tensor) -> Tensor:
        """Return what each row counts in the sum of each group, [m, groups], from its weight, [m]."""
        share = (weight if used is None else weight.where(used, 0)).double()[:, None]
        if uploads.group is not None:
            share = share * (uploads.group[:, None] == torch.arange(groups, device=share.device))
        return share

    def average(stacked: Tensor, share: Tensor, total: Tensor) -> Tensor:
        out = weighted_sum(share, stacked)
        out /= total.where(total > 0, 1.0)
        return (out if grouped else out[0]).to(stacked.dtype)

    def average_of_entries(stacked: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        if weight.dim() == 1:
            return average(stacked, shares(weight), by_row(total, stacked))
        beside = lambda numbers: numbers.view(len(numbers), *(1,) * (stacked.dim() - weight.dim()), *weight.shape[1:])
        entries = beside(weight).double()
        counted = torch.where(entries > 0, stacked * entries, 0)  # what has weight 0 may be anything
        return average(counted, everybody, beside(total)).to(stacked.dtype)

    weight = uploads.weight if uploads.mask is None else _masked(uploads.mean, uploads.weight, uploads.mask)
    if is_single(weight):
        share = shares(weight)
        totals = share.sum(0)
        means = tree_map(lambda stacked: average(stacked, share, by_row(totals, stacked)), uploads.mean)
    else:
        everybody = shares(torch.ones_like(uploads.ids))
        total = lambda weight: shares(weight).sum(0) if weight.dim() == 1 else weighted_sum(everybody, weight)
        totals = tree_map(total, weight)
        means = tree_map(average_of_entries, uploads.mean, weight, totals)
    return Cohort(uploads.ids, means, uploads.own, totals if grouped else tree_map(lambda t: t[0], totals), size)


def _masked(mean: Any, weight: Any, mask: Tensor) -> Any:
    """Return a weight for each tensor of a mean, 0 at entries that a client does not have."""

    def of(stacked: Tensor, weight: Tensor) -> Tensor:
        if not covers(mask, stacked):
            return weight
        weight = weight[:, None] if weight.dim() == 1 else weight
        return weight * mask.view(len(mask), *(1,) * (weight.dim() - 2), -1)

    return tree_map(lambda rows: of(rows, weight), mean) if is_single(weight) else tree_map(of, mean, weight)
