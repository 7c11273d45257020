"""Messages between server and clients. Where a tensor is put is what it means: bytes and privacy follow from it.

`Down.shared` goes to everyone, `Down.own` holds one row per client. `Up.mean` reaches the server only as a weighted
mean, so secure sums, noise and robust rules apply to any method that uses it; `Up.own` is read client by client.
One tensor, one compartment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Down:
    """Carry what the server sends to clients.

    Attributes:
        shared: a tree of tensors that goes to everyone.
        own: in `broadcast` a tree with one row per client; in `local` this client's row.
    """

    shared: Any = ()
    own: Any = ()


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
    """

    mean: Any = ()
    own: Any = ()
    weight: Any = None
    group: Tensor | None = None
    loss: Tensor | None = None


@dataclass(frozen=True)
class Uploads:
    """Hold the uploads of several clients as rows."""

    ids: Tensor  # [m], ascending
    mean: Any  # each tensor [m, ...]
    own: Any  # each tensor [m, ...]
    weight: Any  # [m]; or a tree like `mean`, each tensor [m] or [m, ...]
    group: Tensor | None = None  # [m]
    loss: Tensor | None = None  # [m]


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
        weight: sum of weights; with groups [groups]. A tree of sums where `Up.weight` is a tree.
        size: how many uploads are in it: a number, or a tensor where a refused one still has its place in `ids`.
    """

    ids: Tensor
    mean: Any
    own: Any
    weight: Any
    size: Any
