"""What travels. Where a tensor is put is what it means: bytes, privacy and what an engine sends follow from it.

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
class Uploads:
    """Uploads of several clients as rows."""

    ids: Tensor  # [m], ascending
    mean: Any  # each tensor [m, ...]
    own: Any
    weight: Tensor  # [m]
    group: Tensor | None = None  # [m]


@dataclass(frozen=True)
class Cohort:
    """What the server receives in one exchange."""

    ids: Tensor  # [m], ascending
    mean: Any  # weighted means; with groups a first axis [groups, ...], 0 where a group is empty
    own: Any  # one row per client
    weight: Tensor  # sum of weights; with groups [groups]
    size: Any  # how many uploads are in it: a number, or a tensor where a refused one still has its place in `ids`
