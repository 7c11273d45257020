"""Which uploads are used: whoever sends what is not a number loses its turn, not everybody's training.

An upload is inspected where it lies. On a GPU the host does not wait for the answer in every exchange, or the GPU would
run dry: so what follows from a verdict may be a plain value, or a tensor on the device that nobody has looked at yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.messages import Uploads, is_single
from perfed.core.tree import leaves, tree_map
from perfed.engines.base import Reply
from perfed.engines.trees import first_true, not_finite, paths

NOT_FINITE = "it holds numbers that are not finite"
BAD_WEIGHT = "it is negative or not finite"
BAD_COUNT = "a number of training samples is 1 or more"
BAD_GROUP = "there is no such group"


class Refusal(NamedTuple):
    """An upload that was not used."""

    round: int
    client: int
    tensor: str
    reason: str

    def plain(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the refusal for a log, with the client's name out of `names`."""
        return {"round": self.round, "client": names[self.client], "tensor": self.tensor, "reason": self.reason}


class Verdict(NamedTuple):
    """What is wrong with each upload of an exchange."""

    round: int
    ids: Sequence[int]  # of the clients that sent the uploads
    wrong: Tensor  # [m], a place in `reasons`; -1: nothing
    reasons: list[tuple[str, str]]  # a tensor's name, and what is wrong with it

    @property
    def usable(self) -> Tensor:
        """[m], True for uploads that may be used."""
        return self.wrong < 0

    def refusals(self, wrong: Sequence[int]) -> list[Refusal]:
        """Return who is refused and why, given `wrong` in the host's memory."""
        rows = zip(self.ids, wrong, strict=True)
        return [Refusal(self.round, id, *self.reasons[place]) for id, place in rows if place >= 0]


class Standing(NamedTuple):
    """How a run stands: plain numbers, or tensors on the device."""

    strikes: int | Tensor = 0  # rounds in a row that were abandoned
    ended: int | Tensor = 0  # the round in which the run ended for it; 0: it goes on

    def after(self, round: int, counts: bool | Tensor, patience: int) -> Standing:
        """Return how the run stands after a round.

        Args:
            round: its number.
            counts: False if it was abandoned.
            patience: number of abandoned rounds in a row that ends a run.
        """
        strikes = pick(counts, 0, self.strikes + 1)
        over = (self.ended == 0) & (strikes >= patience)
        return Standing(strikes, pick(over, round, self.ended))


def inspect(round: int, reply: Reply, uploads: Uploads, groups: int = 1) -> Verdict:
    """Look at every number of every upload, without waiting for the device.

    Args:
        round: the round's number.
        reply: the engine's reply, which knows of states that are not finite.
        uploads: its rows, after the server half of what happens to uploads.
        groups: number of groups that `uploads.group` may name.

    Returns:
        The verdict; it names a client's first bad tensor, states before uploads before weights.
    """
    sent, weight, group = [uploads.mean, uploads.own], uploads.weight, uploads.group
    counted = is_single(weight) and not weight.is_floating_point()  # by the training samples, of which nobody has 0
    bad_weights = [weight < 1] if counted else [_bad_weight(each) for each in leaves(weight)]
    flags = [*(not_finite(leaf) for leaf in leaves(sent)), *bad_weights]
    reasons = [(name, NOT_FINITE) for name in [*paths(uploads.mean, "mean"), *paths(uploads.own, "own")]]
    reasons += [(name, BAD_COUNT if counted else BAD_WEIGHT) for name in paths(weight, "weight")]
    if group is not None:
        flags.append((group < 0) | (group >= groups))
        reasons.append(("group", BAD_GROUP))
    wrong = first_true(flags, len(uploads.ids), uploads.ids.device)
    if reply.tensors:  # clients have a state
        wrong = torch.where(reply.spoiled < 0, wrong, reply.spoiled + len(reasons))
        reasons += [(name, NOT_FINITE) for name in reply.tensors]
    return Verdict(round, reply.ids, wrong, reasons)


def _bad_weight(rows: Tensor) -> Tensor:
    """Return for each row [m, ...] whether it holds a weight that is negative or not finite."""
    bad = ~(rows.isfinite() & (rows >= 0))
    return bad.flatten(1).any(1) if bad.dim() > 1 else bad


def only(uploads: Uploads, index: Tensor) -> Uploads:
    """Return the rows `index` of uploads."""
    select = lambda leaf: None if leaf is None else leaf.index_select(0, index)
    parts = (uploads.ids, uploads.mean, uploads.own, uploads.weight, uploads.group, uploads.loss, uploads.mask)
    return Uploads(*(tree_map(select, part) for part in parts))


def pick(decision: bool | Tensor, yes: Any, no: Any) -> Any:
    """Return one of two trees; a decision on the device is not looked at.

    Args:
        decision: a plain value, or a tensor of one.
        yes: the tree where it is true.
        no: the tree where it is false, of the same form.
    """
    if isinstance(decision, Tensor):
        return tree_map(lambda first, second: torch.where(decision, first, second), yes, no)
    return yes if decision else no
