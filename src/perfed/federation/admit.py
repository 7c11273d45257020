"""Which uploads are used: whoever sends what is not a number loses its turn, not everybody's training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.messages import Uploads
from perfed.engines.base import Reply
from perfed.engines.trees import first_not_finite

NOT_FINITE = "it holds numbers that are not finite"
BAD_WEIGHT = "it is negative or not finite"
WEIGHT = "weight"


class Refusal(NamedTuple):
    """An upload that was not used."""

    round: int
    client: int
    tensor: str
    reason: str

    def plain(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return it for a log, the client by its name."""
        return {"round": self.round, "client": names[self.client], "tensor": self.tensor, "reason": self.reason}


class Verdict(NamedTuple):
    """What is wrong with each row of an exchange."""

    wrong: Tensor  # [m], a place in `tensors`; -1: nothing
    tensors: list[str]

    @property
    def used(self) -> Tensor:
        """[m], True for rows that are used."""
        return self.wrong < 0

    def reason(self, place: int) -> tuple[str, str]:
        """Return the name of a tensor, and what is wrong with it."""
        tensor = self.tensors[place]
        return tensor, BAD_WEIGHT if tensor == WEIGHT else NOT_FINITE


def inspect(reply: Reply, uploads: Uploads) -> Verdict:
    """Look at every number of every row, without waiting for the device.

    Args:
        reply: the engine's reply, which knows of states that are not finite.
        uploads: its rows, after the server half of what happens to uploads.
    """
    wrong, names = reply.spoiled, list(reply.tensors)
    for root, tree in (("mean", uploads.mean), ("own", uploads.own)):
        place, tensors = first_not_finite(tree, len(uploads.ids), uploads.ids.device, root)
        wrong = torch.where((wrong < 0) & (place >= 0), place + len(names), wrong)
        names += tensors
    weighted = uploads.weight.isfinite() & (uploads.weight >= 0)
    return Verdict(torch.where((wrong < 0) & ~weighted, len(names), wrong), [*names, WEIGHT])
