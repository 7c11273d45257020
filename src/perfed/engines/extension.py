"""Samples that join clients' training sets: made up by a method's `extend`, once for each client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.clients import Clients, Split
from perfed.core.data import Data
from perfed.core.errors import Problem
from perfed.core.messages import Down, Extension
from perfed.core.method import Method, State
from perfed.core.task import Task

if TYPE_CHECKING:
    from perfed.engines.base import ClientInfo

Pieces = dict[str, Tensor]  # what an `Extending` returns, of one client or with a row for each


class Extending(NamedTuple):
    """What a client does before it trains for the first time: it makes samples, and leaves some of its own out."""

    method: Method

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> Pieces:  # noqa: ARG002
        given, name = self.method.extend(state, down, data), f"{type(self.method).__name__}.extend"
        if not isinstance(given, Extension):
            raise Problem(f"{name} must return an Extension, not {type(given).__name__}")
        mask, count = data.mask(), given.x.shape[0]
        made = torch.ones(count, dtype=torch.bool, device=mask.device) if given.made is None else given.made
        keep = mask if given.keep is None else given.keep
        for what, shape, wanted in (("y", given.y.shape[:1], (count,)), ("made", made.shape, (count,))):
            if tuple(shape) != wanted:
                raise Problem(f"{name} returns {count} samples, but {what} of shape {tuple(shape)}")
        if keep.shape != mask.shape:
            raise Problem(f"{name} returns keep of shape {tuple(keep.shape)}: it has a place for each row of a map")
        return {"x": given.x, "y": given.y, "made": made.bool(), "keep": keep.bool() & mask}


@dataclass(frozen=True)
class Extended:
    """What has become of a client's training set.

    Attributes:
        round: the one before which it was extended.
        kept: [its own samples], False for those that are left out.
        made: how many joined.
    """

    round: int
    kept: Tensor
    made: int

    @property
    def counts(self) -> dict[str, int]:
        """How many samples the client trains on, how many of them were made up, and how many of its own it left out."""
        kept = int(self.kept.sum())
        return {"train": kept + self.made, "made": self.made, "left_out": len(self.kept) - kept}


class Grown:
    """Training samples to which others are added: who gets some has all of its own in a new piece at the end.

    Samples are kept as networks want them, and images of bytes become numbers: what is made up is no byte. Tensors are
    written in place as long as there is room, so that recorded steps go on reading them.
    """

    def __init__(self, clients: Clients, dtype: torch.dtype, made: int):
        """Begin with all clients' own samples.

        Args:
            clients: whose they are.
            dtype: what networks want.
            made: samples that may join one client's, at most.
        """
        self.base, self.rows = clients.train, clients.train.longest + made
        self.own = clients.ready(self.base.x, dtype)
        self.x, self.y, self.used = self.own, self.base.y, len(self.base.y)
        self.size, self.first = list(self.base.size), list(self.base.start)

    def put(self, place: int, kept: Tensor, x: Tensor, y: Tensor) -> None:
        """Set a client's samples.

        Args:
            place: which client.
            kept: [its own samples], False for those that are left out.
            x: the samples that join.
            y: their labels.
        """
        start, size = self.base.start[place], self.base.size[place]
        rows = torch.arange(start, start + size, device=self.y.device)[kept.to(self.y.device)]
        count = len(rows) + len(y)
        self._reserve(count)
        part = slice(self.used, self.used + count)
        self.x[part] = torch.cat([self.own[rows], x.to(self.x.dtype)])
        self.y[part] = torch.cat([self.base.y[rows], y])
        self.size[place], self.first[place], self.used = count, self.used, part.stop

    def made(self, place: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the last so many of a client's samples."""
        end = self.first[place] + self.size[place]
        return self.x[end - count : end], self.y[end - count : end]

    def forget(self, places: Iterable[int]) -> None:
        """Give clients their own samples back."""
        for place in places:
            self.size[place], self.first[place] = self.base.size[place], self.base.start[place]

    def _reserve(self, count: int) -> None:
        if self.used + count > len(self.y):
            room = max(2 * len(self.y), self.used + count)
            more = lambda t: torch.cat([t[: self.used], t.new_zeros(room - self.used, *t.shape[1:])])
            self.x, self.y = more(self.x), more(self.y)

    @property
    def split(self) -> Split:
        """The training samples of all clients."""
        return Split(self.x, self.y, tuple(self.size), self.rows, first=tuple(self.first))


def view(split: Split, begin: int, end: int) -> Split:
    """Return the samples of the clients from `begin` to before `end`, which stay where they are."""
    return Split(split.x, split.y, split.size[begin:end], split.longest, first=split.start[begin:end])


class Extensions:
    """What has become of the training sets of one run's clients."""

    def __init__(self) -> None:
        self.known: dict[int, Extended] = {}  # by client

    @property
    def last(self) -> int:
        """The last round before which somebody's training set grew; 0: nobody's did."""
        return max((each.round for each in self.known.values()), default=0)

    def join(self, round: int, ids: Sequence[int], out: Pieces, table: Grown, first: int, info: ClientInfo) -> None:
        """Give clients the samples that they have made.

        Args:
            round: before which they did.
            ids: the clients.
            out: what an `Extending` returned, a row for each.
            table: where the samples go.
            first: the place of client 0 there.
            info: what is known of the clients.
        """
        for row, id in enumerate(ids):
            kept = out["keep"][row, : table.base.size[first + id]].cpu()
            x, y = (out[name][row][out["made"][row]] for name in ("x", "y"))
            refuse_samples(info.names[id], y, x, table.base, info.task, int(kept.sum()) + len(y))
            self.known[id] = Extended(round, kept, len(y))
            table.put(first + id, kept, x, y)

    def saved(self, table: Grown, first: int) -> dict[str, Any]:
        """Return all this, and the samples, as a tree for a file; see `join`."""
        ids = sorted(self.known)
        parts = [table.made(first + id, self.known[id].made) for id in ids]
        return {
            "clients": torch.tensor(ids),
            "room": table.rows - table.base.longest,
            "rounds": torch.tensor([self.known[id].round for id in ids]),
            "made": torch.tensor([self.known[id].made for id in ids]),
            "kept": torch.cat([self.known[id].kept for id in ids]),
            "x": torch.cat([x for x, _ in parts]),
            "y": torch.cat([y for _, y in parts]),
        }

    def restore(self, about: dict[str, Any] | None, table: Grown, first: int, count: int) -> None:
        """Set all this to what `saved` returned, or to nothing, for so many clients; see `join`."""
        table.forget(first + id for id in self.known)
        self.known.clear()
        if about is None:
            return
        ids, rounds, counts = (about[name].tolist() for name in ("clients", "rounds", "made"))
        whole = ids == sorted({*ids} & {*range(count)}) and len(ids) == len(rounds) == len(counts)
        if not whole or min(counts) < 0 or {len(about["x"]), len(about["y"])} != {sum(counts)}:
            raise Problem("what joined the clients' training sets is damaged: it is not that of these clients")
        kept = about["kept"].split([table.base.size[first + id] for id in ids])
        x, y = (about[name].to(table.y.device).split(counts) for name in ("x", "y"))
        for place, id in enumerate(ids):
            self.known[id] = Extended(rounds[place], kept[place], counts[place])
            table.put(first + id, kept[place], x[place], y[place])


def refuse_samples(name: str, y: Tensor, x: Tensor, own: Split, task: Task, left: int) -> None:
    """Refuse samples that nobody can be trained with.

    Args:
        name: the client, for people.
        y: their labels.
        x: the samples.
        own: what those of the clients look like.
        task: what is learned.
        left: how many samples the client then has.
    """
    if x.shape[1:] != own.x.shape[1:] or y.shape[1:] != own.y.shape[1:] or y.dtype != own.y.dtype:
        form = lambda x, y: f"x {list(x.shape[1:])} and y {list(y.shape[1:])} of {y.dtype}"
        raise Problem(f"extend gives client '{name}' samples of {form(x, y)}, its own are {form(own.x, own.y)}")
    if not left:
        raise Problem(f"extend leaves client '{name}' without any training sample")
    if not x.isfinite().all():
        raise Problem(f"extend gives client '{name}' samples with numbers that are not finite")
    if fault := task.fault(y):
        raise Problem(f"extend gives client '{name}' a label that {fault}")
