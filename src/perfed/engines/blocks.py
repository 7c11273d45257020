"""A block of clients as rows of one computation: the loops of `Data` for all of them at once.

Under vmap a client's `data.fold` and `data.mean` reach the rules here with the whole block as plain tensors. The rules
own the loop: clients sorted by their number of steps, each step one `vmap(step)` over those that are still active.
Nothing is masked and nobody is padded to the longest client; only a step in which some client has a partial last batch
carries sample weights. A `Runner` runs a step plainly, compiled, or from a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from perfed.accel.autotune import prepared
from perfed.core.augment import moved, moves
from perfed.core.clients import Clients
from perfed.core.data import (
    CHUNK,
    Data,
    Plan,
    check_step,
    order_key,
    refuse_other_form,
    refuse_other_rows,
    step_key,
)
from perfed.core.data import form as shapes
from perfed.core.further import models_of
from perfed.core.method import Method
from perfed.core.model import Batch
from perfed.core.random import PUBLIC, derive, mix, smallest, tickets
from perfed.core.tree import flatten, integers, leaves, unflatten

if TYPE_CHECKING:
    from perfed.accel.loops import Loop, Recorder

EXACT = 32  # up to so many active clients there is a record for each number
AT_ONCE = 1 << 14  # samples of all clients together in one piece of a map
PIECE = 64  # samples per client in one recorded piece of a mean: one for all, and few, as the last one is filled up


def holding(method: Method, settings: dict[str, Any]) -> Method:
    """Return the method with other settings, which may be tensors."""
    if not settings:
        return method
    changed = object.__new__(type(method))  # the compiler cannot follow copy.copy into what hides the context
    for name, value in {**vars(method), **settings}.items():
        object.__setattr__(changed, name, value)  # frozen for everybody else
    return changed


def held_by(method: Any) -> dict[str, Tensor]:
    """Return settings that are tensors: they pass through the engine like everything that differs between clients."""
    return {name: value for name, value in vars(method).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Block:
    """Hold clients as rows; their sizes are known to the host, so no step waits for the device."""

    clients: Clients
    ids: tuple[int, ...]
    where: Tensor  # the ids on the device
    runner: Runner
    dtype: torch.dtype
    epochs: int
    done: Sequence[float] | None  # epochs that each client finishes, where some do not finish all
    public: Block | None = None  # for each of them the public samples, where a method sends them

    def plans(self, plan: Plan) -> list[Plan]:
        """Return what each client does of a plan."""
        return [plan.shortened(done, self.epochs) for done in self.done] if self.done else [plan] * len(self.ids)

    def size(self, split: str) -> list[int]:
        """Return the samples of each client, as numbers on the host."""
        return [self.clients.split(split).size[id] for id in self.ids]

    def sizes(self, split: str) -> Tensor:
        """Return the samples of each client, as a tensor on the device."""
        return self.clients.split(split).sizes.index_select(0, self.where)

    def start(self, split: str) -> Tensor:
        """Return the first row of each client."""
        return self.clients.split(split).starts.index_select(0, self.where)

    def gather(
        self, split: str, index: Tensor, start: Tensor, move: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather samples [rows, batch, ...]; index -1 is filling and takes a client's first sample.

        Args:
            split: where they are.
            index: [rows, batch], each client's samples.
            start: [rows], the first sample of each.
            move: [rows, batch], what happens to images; None: nothing.

        Returns:
            Samples, labels, and the index without filling.
        """
        source, index = self.clients.split(split), index.clamp_min(0)
        rows = (index + start[:, None]).clamp_max(len(source.y) - 1)  # who has no samples has no first
        x = source.x[rows.flatten()]
        x = self.clients.ready(x if move is None else moved(x, move.flatten()), self.dtype)
        return x.unflatten(0, rows.shape), source.y[rows], index


class BlockData(Data):
    """Give a method one client of a block; its loops reach the block's rules."""

    def __init__(
        self,
        block: Block,
        key: Tensor,
        sizes: dict[str, Tensor],
        batch_size: int,
        epochs: int,
        done: Tensor | None,
        usual: int | None = None,
    ):
        super().__init__(batch_size, epochs, done, usual)
        self.block, self.key, self.sizes, self.size = block, key, sizes, sizes["train"]

    def count(self, split: str) -> Tensor:
        return self.sizes[split]

    @property
    def public(self) -> Data:
        if self.block.public is None:
            return super().public
        sizes = {"train": self.sizes["public"]}
        about = (sizes, self.batch_size, self.epochs, self.done, self.usual)
        public = BlockData(self.block.public, derive(self.key, PUBLIC), *about)
        public.meter = self.meter
        return public

    def _fold(self, step: Callable[..., Any], carry: Any, given: Any, plan: Plan) -> Any:
        inside, form = flatten((carry, (given, held_by(check_step(step)[1]))))
        carried, carry_form = flatten(carry)
        out = _Fold.apply(self.block, step, form, len(carried), plan, self.key, *inside)
        return unflatten(list(out), carry_form)

    def _mean(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any:
        inside, form = flatten((given, held_by(check_step(fn)[1])))
        result = _Result()
        out = _Mean.apply(self.block, fn, form, result, split, chunk, self.key, *inside)
        return unflatten(list(out), result.form)

    def _map(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any:
        inside, form = flatten((given, held_by(check_step(fn)[1])))
        result = _Result()
        out = _Map.apply(self.block, fn, form, result, split, chunk, self.key, *inside)
        return unflatten(list(out), result.form)

    def _longest(self, split: str) -> int:
        return self.block.clients.split(split).longest


class _Result:
    """Remember the form of what a function returns, known once it has run."""

    form: Any = None


class _Loop(torch.autograd.Function):
    """Stand for an operation on a whole block, which nothing but vmap may call."""

    @staticmethod
    def forward(*args: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("a block's loop ran outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def _sorted_rows(totals: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return rows with the most steps first, the way back, and the sorted totals."""
    order = sorted(range(len(totals)), key=lambda row: -totals[row])
    back = sorted(range(len(totals)), key=lambda place: order[place])
    return order, back, [totals[row] for row in order]


def _active(totals: list[int], step: int) -> int:
    """Return how many rows, sorted by totals, still have a step to take."""
    return sum(total > step for total in totals)


class _Fold(_Loop):
    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: Any, block: Block, step: Any, form: Any, carried: int, plan: Plan, key: Any, *inside
    ):
        count = info.batch_size
        inside = [t if d is None else t.movedim(d, 0) for t, d in zip(inside, in_dims[6:], strict=True)]
        batched = [place < carried or d is not None for place, d in enumerate(in_dims[6:])]
        for place in range(carried):
            if in_dims[6 + place] is None:
                inside[place] = inside[place].expand(count, *inside[place].shape)

        size, plans = block.size("train"), block.plans(plan)
        order, back, totals = _sorted_rows([mine.total(n) for mine, n in zip(plans, size, strict=True)])
        start, sizes, size = block.start("train"), block.sizes("train"), [size[row] for row in order]
        moved = order != list(range(count))
        if moved:
            where = integers(order, key.device)
            key, start, sizes = key[where], start[where], sizes[where]
            inside = [t[where] if b else t for t, b in zip(inside, batched, strict=True)]
        machine = block.runner.machine(key.device)
        keys = [plan.key(key, draw, machine.mix if machine else mix) for draw in range(plan.draws)]
        index = [_table(k, size, sizes, totals, plan, machine) for k in keys]  # each [rows, steps, batch]
        augment = block.clients.augment
        move = [_moves(augment, k, table) for k, table in zip(keys, index, strict=True)] if augment != "none" else None
        fold = Fold(block, step, form, carried, batched, plan, keys, index, move, start, size, totals)
        final = fold.recorded(inside) if block.runner.recorder else fold.plain(inside)
        if moved:
            way = integers(back, key.device)
            final = [f[way] for f in final]
        return tuple(final), (0,) * carried


@dataclass(frozen=True)
class Fold:
    """Carry out a fold of a whole block, its rows sorted by their number of steps."""

    block: Block
    step: Any
    form: Any  # how (carry, (given, settings)) is put together from tensors
    carried: int  # how many of these tensors are the carry
    batched: list[bool]  # which of them have a row for each client
    plan: Plan
    keys: list[Tensor]  # for each draw [rows]
    index: list[Tensor]  # for each draw [rows, steps, slots]
    move: list[Tensor] | None  # for each draw [rows, steps, slots], what happens to images; None: nothing
    start: Tensor  # [rows], first samples
    size: list[int]  # samples of each row
    totals: list[int]  # steps of each row

    def _slots(self) -> int:
        return self.index[0].shape[2] if self.index else 0

    def _count(self) -> None:
        runner, count = self.block.runner, len(self.size)
        executed = sum(steps * runner.width(active, count) for _, steps, active in _phases(self.totals)) * self._slots()
        useful = sum(self.plan.samples(n, total) for n, total in zip(self.size, self.totals, strict=True))
        runner.count(executed * self.plan.draws, useful * self.plan.draws)

    def plain(self, inside: list[Tensor]) -> list[Tensor]:
        """Run step by step, with PyTorch's own operations."""
        plan, runner, count = self.plan, self.block.runner, len(self.size)
        carry, given = inside[: self.carried], inside[self.carried :]
        final = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in carry]
        before = count
        for first, steps, active in _phases(self.totals):
            width = runner.width(active, count)
            _put_away(final, carry, active, before)  # rows that have just finished
            carry, before = [c[:width] for c in carry], active
            theirs = [g[:width] if b else g for g, b in zip(given, self.batched[self.carried :], strict=True)]
            for step in range(first, first + steps):
                partial = any(_partial(n, plan, step) for n in self.size[:active])
                batches = []
                for draw, (table, k) in enumerate(zip(self.index, self.keys, strict=True)):
                    move = None if self.move is None else self.move[draw][:width, step]
                    x, y, numbers = self.block.gather("train", table[:width, step], self.start[:width], move)
                    weight = (table[:width, step] >= 0).to(self.block.dtype) if partial else None
                    batches.append(Batch(x, y, weight, step_key(k[:width], step), numbers))
                old, carry = carry, runner.step(self.step, self.form, self.batched, batches, [*carry, *theirs])
                if step == 0:
                    refuse_other_form(shapes(old), shapes(carry))
        _put_away(final, carry, 0, before)
        self._count()
        return final

    def recorded(self, inside: list[Tensor]) -> list[Tensor]:
        """Run as a row of recorded graphs."""
        plan, runner = self.plan, self.block.runner
        assert runner.recorder is not None
        if not self.totals or not self.totals[0]:
            return [t.contiguous() for t in inside[: self.carried]]
        clients = self.block.clients
        sizes = set(clients.train.size)
        weighted = any(n % plan.batch_size for n in sizes)
        body = runner.batch_step(self.step, self.form, self.batched, plan.draws, weighted)
        # The tensors tell samples apart: clients whose training sets grow share them with those that they were before.
        about = (clients.train.x, clients.augment, plan, weighted)
        key = ("fold", *about, *runner.identity(self.step, self.form, self.batched))
        shape = (plan.draws, max(map(plan.total, sizes)), min(plan.batch_size, max(sizes)))
        about = (clients, "train", self.block.dtype, True, weighted, body, self.carried)
        loop = runner.recorder.loop(key, inside, self.batched, shape, *about)
        self._count()
        return runner.replay(loop, loop.load(inside, self.index, self.keys, self.start, self.move), self.totals)


def _phases(totals: list[int]) -> list[tuple[int, int, int]]:
    """Return (first step, steps, active rows) of rows sorted by totals; between two phases somebody finishes."""
    ends = sorted({t for t in totals if t > 0})
    return [(a, b - a, _active(totals, a)) for a, b in zip([0, *ends], ends, strict=False)]


def _put_away(final: list[Tensor], carry: list[Tensor], first: int, end: int) -> None:
    if first < end:
        for f, c in zip(final, carry, strict=True):
            f[first:end] = c[first:end]


def _partial(size: int, plan: Plan, step: int) -> bool:
    """Return True if the batch of a client with `size` samples is smaller than a full one at this step."""
    return size % plan.batch_size != 0 and step % plan.batches(size) == plan.batches(size) - 1


def _table(
    key: Tensor, size: list[int], sizes: Tensor, totals: list[int], plan: Plan, machine: Recorder | None = None
) -> Tensor:
    """Return sample numbers of every step [rows, steps, batch], -1 where a batch is not full or a row has finished.

    All epochs at once, and only on the device: the host knows how large things are and waits for nothing.
    """
    steps, slots = (totals[0] if totals else 0), min(plan.batch_size, max(size, default=0))
    if not steps:
        return torch.full((len(size), 0, slots), -1, device=key.device)
    order, total = _order(key, size, sizes, totals, plan, machine), integers(totals, key.device)
    if machine:
        return machine.batches(order, sizes, total, plan.batch_size, steps, slots)
    step = torch.arange(steps, device=key.device)
    each = (-(-sizes // plan.batch_size)).clamp_min(1)[:, None]  # [rows, 1] steps of an epoch
    which = (step // each).clamp_max(len(order) - 1)  # [rows, steps]
    place = (step % each * plan.batch_size)[:, :, None] + torch.arange(slots, device=key.device)
    inside = (place < sizes[:, None, None]) & (step < total[:, None])[:, :, None]
    row = torch.arange(len(size), device=key.device)[:, None, None]
    return torch.where(inside, order[which[:, :, None], row, place.clamp_max(order.shape[2] - 1)], -1)


def _moves(augment: str, key: Tensor, table: Tensor) -> Tensor:
    """Return what happens to the image in each slot of a table, 1 byte for each."""
    _, steps, slots = table.shape
    return moves(augment, step_key(key[:, None], torch.arange(steps, device=key.device)), slots)


def _order(
    key: Tensor, size: list[int], sizes: Tensor, totals: list[int], plan: Plan, machine: Recorder | None = None
) -> Tensor:
    """Return the samples of every row in every epoch's order, as many as somebody needs: [epochs, rows, samples]."""
    work = list(zip(size, totals, strict=True))
    epochs = max(-(-t // plan.batches(n)) for n, t in work if t)
    first = max(min(n, t * plan.batch_size) for n, t in work)
    # A row with many samples may not come to a second epoch, and the rows that do may have few.
    again = max((n for n, t in work if t > plan.batches(n)), default=0)
    parts = [(0, epochs, max(size))] if 2 * again > max(size) else [(0, 1, max(size)), (1, epochs, again)]
    draw = machine.tickets if machine else _tickets
    orders = [smallest(draw(key, sizes, *part), min(first, part[2])) for part in parts if part[0] < part[1]]
    if len(orders) == 1:
        return orders[0].view(epochs, len(size), -1)
    order = torch.empty(epochs, len(size), first, dtype=torch.int64, device=key.device)
    for (begin, end, _), samples in zip(parts, orders, strict=True):
        order[begin:end, :, : samples.shape[1]] = samples.view(end - begin, len(size), -1)
    return order


def _tickets(key: Tensor, sizes: Tensor, begin: int, end: int, longest: int) -> Tensor:
    """Return what samples are sorted by, of these epochs one after another: [epochs * rows, longest]."""
    seeds = order_key(key, torch.arange(begin, end, device=key.device)[:, None])  # [epochs, rows]
    return tickets(seeds.flatten(), sizes.repeat(end - begin), longest)


class _Mean(_Loop):
    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        _info: Any, in_dims: Any, block: Block, fn: Any, form: Any, result: _Result, split: str, chunk: int | None,
        key: Any, *inside
    ):  # fmt: skip
        mean, inside, way = _sorted_mean(in_dims, block, fn, form, result, split, chunk, key, inside)
        n, recorder = mean.n, block.runner.recorder
        totals = mean.recorded(inside) if recorder and mean.size[0] else mean.plain(inside)
        # A client without samples has no mean: 0 / 0 is NaN.
        out = [t / n.view(-1, *(1,) * (t.dim() - 1)) for t in totals]
        return tuple(t[way] for t in out), (0,) * len(out)


class _Map(_Loop):
    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        _info: Any, in_dims: Any, block: Block, fn: Any, form: Any, result: _Result, split: str, chunk: int | None,
        key: Any, *inside
    ):  # fmt: skip
        mean, inside, way = _sorted_mean(in_dims, block, fn, form, result, split, chunk, key, inside)
        out = mean.each(inside, block.clients.split(split).longest)
        return tuple(t[way] for t in out), (0,) * len(out)


def _sorted_mean(
    in_dims: Any, block: Block, fn: Any, form: Any, result: _Result, split: str, chunk: int | None, key: Tensor,
    inside: Any,
) -> tuple[Mean, list[Tensor], Tensor]:  # fmt: skip
    """Return what goes through all samples, with its rows sorted; what it is given, likewise; and the way back."""
    batched = [d is not None for d in in_dims[7:]]
    inside = [t if d is None else t.movedim(d, 0) for t, d in zip(inside, in_dims[7:], strict=True)]
    order, back, size = _sorted_rows(block.size(split))
    where = integers(order, key.device)
    start, n, key = block.start(split)[where], block.sizes(split)[where], key[where]
    inside = [t[where] if b else t for t, b in zip(inside, batched, strict=True)]
    if not size[0]:  # nobody has samples: any will do for the form of the result
        split, start = "train", torch.zeros_like(start)
    mean = Mean(block, fn, form, result, split, chunk, batched, key, start, n, size)
    return mean, inside, integers(back, key.device)


@dataclass(frozen=True)
class Mean:
    """Compute an exact mean for a whole block, its rows sorted by their number of samples; here as a sum."""

    block: Block
    fn: Any
    form: Any  # how (given, settings) is put together from tensors
    result: _Result
    split: str
    chunk: int | None  # most samples of a client at once
    batched: list[bool]  # which of these tensors have a row for each client
    key: Tensor  # [rows]
    start: Tensor  # [rows], first samples
    n: Tensor  # [rows], samples of each row
    size: list[int]  # the same numbers on the host

    def _values(self) -> Callable[..., tuple[Tensor, ...]]:
        function, owner, fixed = check_step(self.fn)

        def values(
            x: Tensor, y: Tensor, weight: Tensor, key: Tensor, index: Tensor, *inside: Tensor
        ) -> tuple[Tensor, ...]:
            given, settings = unflatten(list(inside), self.form)
            value = function(holding(owner, settings), *fixed, Batch(x, y, weight, key, index), given)
            self.result.form = flatten(value)[1]
            return tuple(leaves(value))

        return values

    def _piece(self, inside: list[Tensor], first: int, length: int) -> tuple[int, Tensor, Any]:
        """Return of so many samples from the `first`: how many rows have such, their weights, and their values."""
        active = _active(self.size, first) if self.size[0] else len(self.size)
        place = torch.arange(first, first + length, device=self.key.device)
        index = torch.where(place < self.n[:active, None], place, -1)
        x, y, numbers = self.block.gather(self.split, index, self.start[:active])
        weight = (index >= 0).to(self.block.dtype)
        theirs = [t[:active] if b else t for t, b in zip(inside, self.batched, strict=True)]
        whole = vmap(self._values(), in_dims=(*(0,) * 5, *(0 if b else None for b in self.batched)))
        return active, weight, whole(x, y, weight, self.key[:active], numbers, *theirs)

    def each(self, inside: list[Tensor], rows: int) -> list[Tensor]:
        """Return the values of single samples, in a tensor of so many rows for each client, 0 where it has none.

        It is not recorded: a piece holds enough samples to keep a device busy.
        """
        count, longest, out = len(self.size), max(self.size[0], 1), []
        at_once = self.chunk or min(CHUNK, max(PIECE, AT_ONCE // count))
        for first in range(0, longest, at_once):
            length = min(at_once, longest - first)
            piece = lambda first=first, length=length: self._piece(inside, first, length)
            active, weight, values = prepared(piece) if self.block.runner.recorder else piece()
            refuse_other_rows([v[0] for v in values], length)
            if not out:
                out = [v.new_zeros(count, rows, *v.shape[2:]) for v in values]
            for t, v in zip(out, values, strict=True):
                there = weight.view(*weight.shape, *(1,) * (v.dim() - 2)) > 0
                t[:active, first : min(first + length, rows)] = torch.where(there, v, 0)[:, : rows - first]
        return out

    def plain(self, inside: list[Tensor], most: int | None = None) -> list[Tensor]:
        """Add up piece by piece; `most` samples of each client at most, to learn the form of the result."""
        totals: list[Tensor] = []
        count, longest = len(self.size), self.size[0] if most is None else most
        chunk = self.chunk or CHUNK
        for first in range(0, max(longest, 1), chunk):
            active, weight, values = self._piece(inside, first, min(chunk, max(longest - first, 1)))
            if not totals:
                totals = [v.new_zeros(count, *v.shape[1:]) for v in values]
            samples = weight.sum(1)
            for total, v in zip(totals, values, strict=True):
                total[:active] += v * samples.view(-1, *(1,) * (v.dim() - 1))
        return totals

    def recorded(self, inside: list[Tensor]) -> list[Tensor]:
        """Add up in a row of recorded graphs."""
        runner, count, values = self.block.runner, len(self.size), self._values()
        assert runner.recorder is not None
        shapes = tuple(
            (tuple(t.shape[1:] if b else t.shape), t.dtype) for t, b in zip(inside, self.batched, strict=True)
        )
        key = (
            "mean",
            self.block.clients.split(self.split).x,
            self.split,
            shapes,
            *runner.identity(self.fn, self.form, self.batched),
        )
        if key not in runner.forms:
            with runner.recorder.shapes_only():
                runner.forms[key] = [torch.zeros_like(t[0]) for t in self.plain(inside, most=1)], self.result.form
        zeros, self.result.form = runner.forms[key]

        def body(*tensors: Tensor) -> tuple[Tensor, ...]:
            batch, totals, given = tensors[:5], tensors[5 : 5 + len(zeros)], tensors[5 + len(zeros) :]
            samples = batch[2].sum()
            return tuple(t + v * samples for t, v in zip(totals, values(*batch, *given), strict=True))

        batched = [True] * len(zeros) + self.batched
        dims = (*(0,) * 5, *(0 if b else None for b in batched))
        most = max(self.block.clients.split(self.split).size)
        slots = min(PIECE, self.chunk or PIECE, most)
        inside = [*(z.expand(count, *z.shape) for z in zeros), *inside]
        shape = (1, -(-most // slots), slots)
        whole = vmap(body, in_dims=dims)
        about = (self.block.clients, self.split, self.block.dtype, False, True, whole, len(zeros))
        loop = runner.recorder.loop(key, inside, batched, shape, *about)
        steps = -(-self.size[0] // slots)
        place = torch.arange(steps * slots, device=self.key.device)
        index = torch.where(place < self.n[:, None], place, -1).view(count, steps, slots)
        carry = loop.load(inside, [index], [self.key], self.start)
        return runner.replay(loop, carry, [-(-n // slots) for n in self.size], exact=8)


@dataclass
class Runner:
    """Run a step for the active rows: plainly, compiled, or from a record."""

    compile: bool | str = False  # True, or the name of a torch.compile backend
    blocks: tuple[int, ...] = ()  # allowed numbers of rows; () is any number
    recorder: Recorder | None = None
    executed: int = 0
    useful: int = 0
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    forms: dict[Any, Any] = field(default_factory=dict)  # what functions of a mean return: (zeros, form)

    def width(self, active: int, count: int, exact: int = EXACT) -> int:
        """Return how many rows to run for so many active ones, rounded up so that few shapes occur."""
        if self.recorder is not None and active > exact:
            coarse = 2 ** max(active.bit_length() - 4, 0)  # at most an eighth more than needed
            return min(-(-active // coarse) * coarse, count)
        return min(next((b for b in self.blocks if b >= active), count), count) if self.blocks else active

    def count(self, executed: int, useful: int) -> None:
        """Count sample slots: those that were run, and those of them that held a sample."""
        self.executed += executed
        self.useful += useful

    def machine(self, device: torch.device) -> Recorder | None:
        """Return what does the engine's own work in kernels on this device, if anything does."""
        return self.recorder if device.type == "cuda" else None

    def identity(self, step: Any, form: Any, batched: list[bool]) -> tuple[Any, ...]:
        """Return all that a step depends on besides tensors: two instances of a method must not share one record."""
        function, method, fixed = check_step(step)
        values = {f.name: getattr(method, f.name) for f in fields(method) if f.name != "model"}
        settings = tuple((name, v) for name, v in values.items() if not isinstance(v, Tensor))
        precision = torch.backends.cuda.matmul.allow_tf32  # a record keeps it, too
        return function, type(method), fixed, settings, method.model, form, tuple(batched), precision

    def batch_step(self, step: Any, form: Any, batched: list[bool], draws: int, weighted: bool) -> Callable[..., Any]:
        """Return the step of a whole block: batches, carry and what is given, all as one row of tensors."""
        function, method, fixed = check_step(step)
        each = 5 if weighted else 4
        dims = (*(0,) * each * draws, *(0 if b else None for b in batched))

        def client_step(*tensors: Tensor) -> tuple[Tensor, ...]:
            make = Batch if weighted else lambda x, y, key, index: Batch(x, y, None, key, index)
            cut = each * draws
            batches = [make(*tensors[first : first + each]) for first in range(0, cut, each)]
            carry, (given, settings) = unflatten(list(tensors[cut:]), form)
            batch = batches[0] if draws == 1 else tuple(batches)
            return tuple(leaves(function(holding(method, settings), *fixed, carry, batch, given)))

        return vmap(client_step, in_dims=dims)

    def step(self, step: Any, form: Any, batched: list[bool], batches: list[Batch], inside: list[Tensor]) -> list:
        """Return the carry after one step of all rows."""
        weighted = batches[0].weight is not None
        whole = self.batch_step(step, form, batched, len(batches), weighted)
        flat = [t for b in batches for t in b if t is not None]
        if not self.compile:
            return list(whole(*flat, *inside))
        models = models_of(check_step(step)[1]).values()
        shape = tuple(t.shape for t in (*flat, *inside))
        key = (*self.identity(step, form, batched), len(batches), weighted, shape)
        if key not in self.compiled and not all(model.tried for model in models):
            whole(*flat, *inside)  # whether it draws random numbers shows when it has run
        # Dropout's table of counters, a constant of the compiled step, crashes inductor on CUDA (torch 2.11).
        if any(model.draws or (model.keyed and flat[0].is_cuda) for model in models):
            return list(whole(*flat, *inside))
        if key not in self.compiled:
            self.compiled[key] = self._compile(whole)
        return list(self.compiled[key](*flat, *inside))

    def _compile(self, batch_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            return batch_step(*tensors)

        # Dynamo counts recompilations per code object, and vmap's wrapper is one object for all steps.
        run.__code__ = run.__code__.replace(co_name=f"step_{len(self.compiled)}")
        backend = self.compile if isinstance(self.compile, str) else "inductor"
        return torch.compile(run, fullgraph=True, dynamic=False, backend=backend)

    def replay(self, loop: Loop, carry: list[Tensor], totals: list[int], exact: int = EXACT) -> list[Tensor]:
        """Take all steps of a loaded loop, whose rows are sorted by totals, and return what the rows end with."""
        assert self.recorder is not None
        final, before = [torch.empty_like(c) for c in carry], len(totals)
        for _, steps, active in _phases(totals):
            _put_away(final, carry, active, before)  # rows that have just finished
            before = active
            self.recorder.run(loop, self.width(active, len(totals), exact), steps)
        _put_away(final, carry, 0, before)
        return final
