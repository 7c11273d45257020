"""What travels. Where a tensor is put is what it means: bytes, privacy and what an engine sends follow from it.

`Down.shared` goes to everyone, `Down.own` holds one row per client. `Up.mean` reaches the server only as a weighted
mean, so secure sums, noise and robust rules apply to any method that uses it; `Up.own` is read client by client.
One tensor, one compartment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.accel.fast import kernels_used
from perfed.core.tree import leaves, tree_map

AT_ONCE = 1 << 26  # numbers that a sum on a GPU holds in float64 at a time


@dataclass(frozen=True)
class Down:
    """From the server to clients."""

    shared: Any = ()
    own: Any = ()  # in `broadcast` one row per client; in `local` this client's row


@dataclass(frozen=True)
class Up:
    """From one client to the server."""

    mean: Any = ()  # changes, averaged over the cohort before the server sees them
    own: Any = ()  # seen by the server client by client
    weight: Tensor | float | None = None  # weight in the mean; default: number of training samples
    group: Tensor | None = None  # which of the method's groups the mean goes to


@dataclass(frozen=True)
class Cohort:
    """What the server receives in one exchange."""

    ids: Tensor  # [m], ascending
    mean: Any  # weighted means; with groups a first axis [groups, ...], 0 where a group is empty
    own: Any  # one row per client
    weight: Tensor  # sum of weights; with groups [groups]


def reduce(ids: Tensor, mean: Any, own: Any, weight: Tensor, group: Tensor | None, groups: int) -> Cohort:
    """Rows of uploads, in client order, as a Cohort. Sums run in float64, on a CPU in client order for every engine."""
    share = weight.double()[:, None]  # [m, 1]
    if group is not None:
        share = share * torch.nn.functional.one_hot(group, groups)  # [m, groups]
    total = share.sum(0)

    def average(stacked: Tensor) -> Tensor:
        shape = (-1, *(1,) * (stacked.dim() - 1))
        out = _products(share, stacked) if stacked.is_cuda else _sums(share, stacked)
        out /= total.where(total > 0, 1.0).view(shape)
        return (out if group is not None else out[0]).to(stacked.dtype)

    return Cohort(ids, tree_map(average, mean), own, total if group is not None else total[0])


def _sums(share: Tensor, stacked: Tensor) -> Tensor:
    """share.T @ stacked, one client after another: a sum that does not depend on how a library orders it."""
    out = torch.zeros(share.shape[1], *stacked.shape[1:], dtype=torch.float64, device=stacked.device)
    for w, row in zip(share, stacked, strict=True):
        out += w.view(-1, *(1,) * row.dim()) * row.double()
    return out


def _products(share: Tensor, stacked: Tensor) -> Tensor:
    """The same on a GPU: one kernel of our own, or matrix products over some columns at a time."""
    if kernels_used():
        from perfed.accel import kernels

        return kernels.weighted_sum(stacked, share)
    flat = stacked[:, None].flatten(1)
    parts = [share.T @ some.double() for some in flat.split(max(1, AT_ONCE // len(flat)), 1)]
    return torch.cat(parts, 1).view(-1, *stacked.shape[1:])


def count_bytes(trees: Iterable[Any], width: int, size: int) -> int:
    """Bytes of the tensors in a compartment; a row of theta counts without its padding."""
    total = 0
    for tensor in leaves(list(trees)):
        numbers = tensor.numel()
        if tensor.dim() and tensor.shape[-1] == width:
            numbers = numbers // width * size
        total += numbers * tensor.element_size()
    return total
