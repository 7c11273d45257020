"""Messages between server and clients. Where a tensor is put is what it means: bytes and privacy follow from it.

`Down.shared` goes to everyone, `Down.own` holds one row per client. `Up.mean` reaches the server only as a weighted
mean, so secure sums, noise and robust rules apply to any method that uses it; `Up.own` is read client by client.
One tensor, one compartment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.tree import tree_map


@dataclass(frozen=True)
class Down:
    """Carry what the server sends to clients.

    Attributes:
        shared: a tree of tensors that goes to everyone.
        own: in `broadcast` a tree with one row per client; in `local` this client's row.
        mask: which entries a client is sent, of every tensor whose last axis is as long as the mask: in `broadcast` one
            row per client; in `local` this client's row, and 0 stands where nothing was sent. None: all entries.
    """

    shared: Any = ()
    own: Any = ()
    mask: Tensor | None = None


@dataclass(frozen=True)
class Up:
    """Carry what one client sends to the server.

    Attributes:
        mean: changes, averaged over the cohort before the server sees them.
        own: a tree of tensors that the server sees client by client.
        weight: weight in the mean; None: the number of training samples. Or a tree like `mean`, with a weight for each
            of its tensors: None, a number, or a tensor that is broadcast to it, whose numbers are weights of entries.
        group: number of the group that the mean goes to, where the method has several.
        loss: a number that the server may choose clients by; the last one of each is in `info.loss` of `cohort_of`.
        mask: which entries the client has, of every tensor in `mean` whose last axis is as long: others are not sent,
            and each entry's mean is that of the clients who have it. None: all entries.
    """

    mean: Any = ()
    own: Any = ()
    weight: Any = None
    group: Tensor | int | None = None
    loss: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Extension:
    """Say which samples join ONE client's training set, and which of its own stay.

    Attributes:
        x: [k, ...], samples as networks get them; as many for every client.
        y: [k], their labels.
        made: [k], True for those that join; None: all.
        keep: [rows of a `map`], True for its own samples that stay; None: all.
    """

    x: Tensor
    y: Tensor
    made: Tensor | None = None
    keep: Tensor | None = None


@dataclass(frozen=True)
class Uploads:
    """Hold the uploads of several clients as rows."""

    ids: Tensor  # [m], ascending
    mean: Any  # each tensor [m, ...]
    own: Any  # each tensor [m, ...]
    weight: Any  # [m]; or a tree like `mean`, each tensor [m] or [m, ...]
    group: Tensor | None = None  # [m]
    loss: Tensor | None = None  # [m]
    mask: Tensor | None = None  # [m, entries]


def covers(mask: Tensor, tensor: Tensor) -> bool:
    """Return True if a mask is about the entries of a tensor: if the last axis of both is as long."""
    return tensor.dim() > 0 and tensor.shape[-1] == mask.shape[-1]


def cut(tree: Any, mask: Tensor | None) -> Any:
    """Return a client's tensors with 0 where its mask is False."""
    if mask is None:
        return tree
    return tree_map(lambda leaf: torch.where(mask.bool(), leaf, 0) if covers(mask, leaf) else leaf, tree)


def is_single(weight: Any) -> bool:
    """Return True if clients have one weight each, [m], and not one for each tensor of their `mean`."""
    return isinstance(weight, Tensor) and weight.dim() == 1


@dataclass(frozen=True)
class Cohort:
    """Carry what the server receives in one exchange.

    Attributes:
        ids: [m], ascending.
        mean: weighted means; with groups a first axis [groups, ...]. 0 where a group is empty, or nobody's weight is
            above 0.
        own: one row per client.
        weight: sum of weights; with groups [groups]. A tree of sums where `Up.weight` is a tree, or where masks are.
        size: how many uploads are in it: a number, or a tensor where a refused one still has its place in `ids`.
    """

    ids: Tensor
    mean: Any
    own: Any
    weight: Any
    size: Any
