"""Every client's private state, as a table with one row for each client that has taken part.

A row is the bytes of one client's tensors, one after another. Rows lie on the model's device; beyond a budget those
written longest ago move to the host's memory, and from there to a file. Where a row lies never changes what it holds.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from perfed.core.data import form
from perfed.core.errors import Problem
from perfed.core.method import State
from perfed.core.tree import flatten, rows, send, stack, tree_map, unflatten

FEWEST = 16  # rows that a table begins with
IN_USE = 64  # rows of a budget that are left free for copies in use, such as those of clients that are evaluated
# Bytes of rows that are in memory at a time when all are saved; pieces of several MB leave gaps in the heap (30 MB).
PORTION = 1 << 20


class States(MutableMapping[int, State]):
    """States by client; `take` and `put` handle many at once, stacked.

    Example:
        >>> states = States({"momentum": torch.zeros(2)})
        >>> states.put([4, 7], {"momentum": torch.ones(2, 2)})
        >>> states.take([3, 4])  # client 3 never took part: it has the initial state
        {'momentum': tensor([[0., 0.],
                [1., 1.]])}
        >>> list(states)
        [4, 7]
    """

    def __init__(
        self,
        initial: State,
        device: torch.device | str = "cpu",
        budget: Sequence[int | None] = (None,),
        folder: Path | None = None,
        of: Sequence[int] | None = None,
    ):
        """Make an empty table.

        Args:
            initial: the state of a client that never took part; with `of` a list of several.
            device: where states are used.
            budget: bytes on the device, then bytes in the host's memory (one number where the device is the host);
                None is no limit.
            folder: where rows lie that pass the last limit, in a file without a name that is gone when the process
                is; None: the system's temporary folder.
            of: which of the initial states each client has; None: there is one.
        """
        self.device, self.of = torch.device(device), of
        self.initial = tree_map(lambda t: t.to(self.device), stack([initial] if of is None else initial))
        leaves, self.tree = flatten(self.initial)
        self.parts = [(t.shape[1:], t.dtype, prod(t.shape[1:]) * t.element_size()) for t in leaves]
        self.width = sum(size for *_, size in self.parts)  # bytes of a row
        places = (self.device, torch.device("cpu"))[: len(budget)]
        limits = [None if limit is None else _room(limit // max(self.width, 1)) for limit in budget]  # in rows
        self.shelves: list[_Shelf] = [
            _Memory(self.width, limit, place) for place, limit in zip(places, limits, strict=True)
        ]
        if None not in limits:
            self.shelves.append(_File(self.width, folder))

    # ------------------------------------------------------------------ many clients at a time

    def take(self, ids: Sequence[int]) -> State:
        """Return the states of some clients.

        Args:
            ids: the clients.

        Returns:
            Their states, stacked; the initial state for those who never took part.
        """
        return self._tree(self._take(ids)) if self.width else rows(self.initial, self._first(ids))

    def put(self, ids: Sequence[int], stacked: State) -> None:
        """Set the states of some clients.

        Args:
            ids: the clients.
            stacked: their new states, of the form that the initial one has.
        """
        before, after = (form(tree_map(lambda t: t[:1], tree)) for tree in (self.initial, stacked))
        if before != after:
            raise TypeError(f"a client's state changed its form: {after}, not {before} (a row)")
        if self.width:
            self.load(ids, self._bytes(stacked))

    def load(self, ids: Sequence[int], packed: Tensor) -> None:
        """Set these clients' rows, given as bytes [rows, width]."""
        for shelf in self.shelves[1:]:
            shelf.forget(ids)
        self._store(0, list(ids), packed)

    def pieces(self, ids: Sequence[int]) -> Iterator[memoryview]:
        """Yield the rows of these clients as bytes, some rows at a time, so that a copy of all is never held."""
        for some_ids in self.portions(ids):
            yield self._take(some_ids).cpu().numpy().data

    def portions(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield as many of these clients at a time as are in memory at once when their rows are saved or loaded."""
        at_once = max(1, PORTION // max(self.width, 1))
        return (ids[first : first + at_once] for first in range(0, len(ids), at_once))

    def _take(self, ids: Sequence[int]) -> Tensor:
        out = None
        for shelf in self.shelves:
            here = [row for row, id in enumerate(ids) if id in shelf.slot]
            if not here:
                continue
            if len(here) == len(ids):  # all in one place: nothing to put together
                return send(shelf.read(ids), self.device)
            out = self._initial_rows(ids) if out is None else out
            for places in self.portions(here):
                packed = send(shelf.read([ids[row] for row in places]), self.device)
                out.index_copy_(0, send(torch.tensor(places), self.device), packed)
        return self._initial_rows(ids) if out is None else out

    def _first(self, ids: Sequence[int]) -> list[int]:
        """Return the places of these clients' initial states."""
        return [0] * len(ids) if self.of is None else [self.of[id] for id in ids]

    def _initial_rows(self, ids: Sequence[int]) -> Tensor:
        packed = self._bytes(self.initial)
        return packed.repeat(len(ids), 1) if self.of is None else packed.index_select(0, self._where(ids))

    def _where(self, ids: Sequence[int]) -> Tensor:
        return send(torch.tensor(self._first(ids)), self.device)

    def _store(self, level: int, ids: list[int], packed: Tensor) -> None:
        """Write rows to a shelf; where it is full, the rows that were written longest ago move to the next."""
        shelf = self.shelves[level]
        if shelf.limit is not None:
            if len(ids) > shelf.limit:  # more at once than there is room for
                self._store(level + 1, ids[shelf.limit :], packed[shelf.limit :])
                shelf.forget(ids[shelf.limit :])
                ids, packed = ids[: shelf.limit], packed[: shelf.limit]
            mine = set(ids)
            over = len(shelf.slot.keys() | mine) - shelf.limit
            if over > 0:
                old = [id for id in shelf.slot if id not in mine][:over]
                self._store(level + 1, old, shelf.read(old))
                shelf.forget(old)
        if ids:
            shelf.write(ids, packed)

    def _bytes(self, stacked: State) -> Tensor:
        """Return stacked states as bytes, [rows, width]."""
        flat = lambda t: (t[:, None] if t.dim() == 1 else t.flatten(1)).contiguous().view(torch.uint8)
        parts = [flat(t.to(self.device)) for t in flatten(stacked)[0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _tree(self, packed: Tensor) -> State:
        """Return stacked states from bytes [rows, width]."""
        leaves, pieces = [], packed.split([size for *_, size in self.parts], 1)
        for piece, (shape, dtype, _) in zip(pieces, self.parts, strict=True):
            if len(self.parts) > 1:  # in memory of its own, or its numbers might not be aligned
                piece = piece.clone(memory_format=torch.contiguous_format)
            leaves.append(piece.flatten().view(dtype).view(len(packed), *shape))
        return unflatten(leaves, self.tree)

    # ------------------------------------------------------------------ one client at a time

    def __getitem__(self, id: int) -> State:
        if id not in self:
            raise KeyError(id)
        return rows(self.take([id]), 0)

    def __setitem__(self, id: int, state: State) -> None:
        self.put([id], stack([state]))

    def __delitem__(self, id: int) -> None:
        if id not in self:
            raise KeyError(id)
        for shelf in self.shelves:
            shelf.forget([id])

    def clear(self) -> None:
        for shelf in self.shelves:
            shelf.forget(list(shelf.slot))

    def __contains__(self, id: object) -> bool:
        return any(id in shelf.slot for shelf in self.shelves)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(id for shelf in self.shelves for id in shelf.slot))

    def __len__(self) -> int:
        return sum(len(shelf.slot) for shelf in self.shelves)


def _room(budget: int) -> int:
    """Return the rows that are kept where there is room for so many, with those in use."""
    return budget - min(budget // 4, IN_USE)


class _Shelf:
    """Clients' rows at one place."""

    def __init__(self, width: int, limit: int | None):
        self.width, self.limit = width, limit
        self.slot: dict[int, int] = {}  # client -> its row; in the order of writing, the oldest first
        self.free: list[int] = []

    def forget(self, ids: Iterable[int]) -> None:
        self.free += [self.slot.pop(id) for id in ids if id in self.slot]

    def _place(self, ids: Sequence[int]) -> list[int]:
        """Return a slot for each client, which makes these clients the newest."""
        for id in ids:
            known = id in self.slot
            self.slot[id] = self.slot.pop(id) if known else self.free.pop() if self.free else len(self.slot)
        return [self.slot[id] for id in ids]

    def read(self, ids: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def write(self, ids: Sequence[int], packed: Tensor) -> None:
        raise NotImplementedError


class _Memory(_Shelf):
    """Rows in one tensor that doubles when it is full."""

    def __init__(self, width: int, limit: int | None, device: torch.device):
        super().__init__(width, limit)
        self.table = torch.empty(0, width, dtype=torch.uint8, device=device)

    def _where(self, slots: list[int]) -> Tensor:
        return send(torch.tensor(slots), self.table.device)

    def read(self, ids: Sequence[int]) -> Tensor:
        return self.table.index_select(0, self._where([self.slot[id] for id in ids]))

    def write(self, ids: Sequence[int], packed: Tensor) -> None:
        slots, count = self._place(ids), len(self.table)
        if max(slots) >= count:
            more = max(FEWEST, 2 * count, max(slots) + 1)
            if self.limit is not None and 2 * more > self.limit:  # the last time: a nearly full table is not copied
                more = self.limit
            larger = self.table.new_empty(more, self.width)
            larger[:count] = self.table
            self.table = larger
        self.table.index_copy_(0, self._where(slots), send(packed, self.table.device))


class _File(_Shelf):
    """Rows in a file. It is read and written, not mapped: mapped pages would count as the process's memory again."""

    def __init__(self, width: int, folder: Path | None):
        super().__init__(width, None)
        self.folder, self.file = folder, None

    def read(self, ids: Sequence[int]) -> Tensor:
        out = torch.empty(len(ids), self.width, dtype=torch.uint8)
        for row, id in zip(out, ids, strict=True):
            assert self.file is not None  # whoever has a slot was written
            self.file.seek(self.slot[id] * self.width)
            self.file.readinto(row.numpy().data)
        return out

    def write(self, ids: Sequence[int], packed: Tensor) -> None:
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (held as long as this shelf)
                weakref.finalize(self, self.file.close)
            for row, slot in zip(packed.cpu(), self._place(ids), strict=True):
                self.file.seek(slot * self.width)
                self.file.write(row.numpy().data)
        except OSError as error:
            place = self.folder or tempfile.gettempdir()
            raise Problem(f"cannot keep the clients' states in '{place}': {error.strerror}") from error
