"""A cohort is one computation: vmap of `local` over a block of clients.

`local` is written for one client. Under vmap its `data.fold` reaches the rule below with the whole block as plain
tensors; the rule owns the loop: clients sorted by their number of steps, each step one `vmap(step)` over those that
are still active. Nothing is masked and nobody is padded to the longest client; only a step in which some client has a
partial last batch carries sample weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from perfed.core.clients import SPLITS, Clients
from perfed.core.data import CHUNK, Data, Plan, check_step, order_key, refuse_other_form, step_key
from perfed.core.data import form as shapes
from perfed.core.messages import Down
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import derive, shuffle
from perfed.core.tree import flatten, leaves, rows, tree_map, unflatten
from perfed.engines.base import Engine, Task


class Vectorised(Engine):
    """All clients of a block at once; on a GPU as fast as one client."""

    name = "vectorised"

    def __init__(
        self,
        method: Method,
        clients: Clients,
        *,
        block: int = 0,
        compile: bool | str = False,
        sizes: Sequence[int] = (),
        **options: Any,
    ):
        super().__init__(method, clients.to(method.model.device), **options)
        self.block = block  # clients per block; 0 is the whole cohort
        self.runner = Runner(compile, tuple(sorted(sizes)))

    @property
    def useful(self) -> float:
        """Share of the executed sample slots that held a sample."""
        return self.runner.useful / max(self.runner.executed, 1)

    def _each(self, task: Task, key: Tensor, ids: Sequence[int], states: State, down: Down) -> dict[str, Any]:
        size = self.clients.train.size
        order = sorted(range(len(ids)), key=lambda row: -size[ids[row]])  # alike clients share a block
        step = self.block or len(order)
        blocks = [order[first : first + step] for first in range(0, len(order), step)]
        out = [self._block(task, key, [ids[r] for r in b], rows(states, b), _own(down, b)) for b in blocks]
        back = torch.tensor(order).argsort()
        return tree_map(lambda *t: torch.cat(t)[back.to(t[0].device)], *out)

    def _block(self, task: Task, key: Tensor, ids: list[int], states: State, down: Down) -> dict[str, Any]:
        m, block = self.method, Block(self.clients, tuple(ids), self.runner, self.method.model.dtype)
        keys = derive(key, torch.tensor(ids, device=key.device))

        def one(state: State, own: Any, key: Tensor, size: dict[str, Tensor]) -> dict[str, Any]:
            return task(state, Down(down.shared, own), BlockData(block, key, size, m.batch_size, m.epochs), key)

        sizes = {split: block.sizes(split) for split in SPLITS}
        return vmap(one)(states, down.own, keys, sizes)


def _own(down: Down, block: list[int]) -> Down:
    return Down(down.shared, rows(down.own, block))


@dataclass(frozen=True)
class Block:
    """Some clients as rows; their sizes are known to the host, so no step waits for the device."""

    clients: Clients
    ids: tuple[int, ...]
    runner: Runner
    dtype: torch.dtype

    def size(self, split: str) -> list[int]:
        """Samples of each client, on the host."""
        return [self.clients.split(split).size[id] for id in self.ids]

    def sizes(self, split: str) -> Tensor:
        """The same on the device."""
        return torch.tensor(self.size(split), device=self.clients.train.y.device)

    def start(self, split: str) -> Tensor:
        """First row of each client."""
        start = self.clients.split(split).start
        return torch.tensor([start[id] for id in self.ids], device=self.clients.train.y.device)

    def gather(self, split: str, index: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [rows, batch, ...]; index -1 is filling and takes a client's first sample."""
        source = self.clients.split(split)
        at = (index.clamp_min(0) + start[:, None]).clamp_max(len(source.y) - 1)  # a client without samples has no first
        x = self.clients.ready(source.x[at.flatten()], self.dtype)
        return x.unflatten(0, at.shape), source.y[at]


class BlockData(Data):
    """What one client of a block sees; its loops reach the block's rules."""

    def __init__(self, block: Block, key: Tensor, sizes: dict[str, Tensor], batch_size: int, epochs: int):
        super().__init__(batch_size, epochs)
        self.block, self.key, self.sizes, self.size = block, key, sizes, sizes["train"]

    def count(self, split: str) -> Tensor:
        return self.sizes[split]

    def _fold(self, step: Callable[..., Any], carry: Any, given: Any, plan: Plan) -> Any:
        inside, form = flatten((carry, given))
        carried, carry_form = flatten(carry)
        out = _Fold.apply(self.block, step, form, len(carried), plan, self.key, *inside)
        return unflatten(list(out), carry_form)

    def _mean(self, fn: Callable[..., Any], given: Any, split: str) -> Any:
        inside, form = flatten(given)
        result = _Result()
        out = _Mean.apply(self.block, fn, form, result, split, self.key, *inside)
        return unflatten(list(out), result.form)


class _Result:
    """The form of what a function returns, known once it has run."""

    form: Any = None


class _Loop(torch.autograd.Function):
    """An operation that only exists for a block: outside vmap there is nothing to do it for."""

    @staticmethod
    def forward(*args: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("a block's loop ran outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def _sorted_rows(totals: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Rows with the most steps first, the way back, and the sorted totals."""
    order = sorted(range(len(totals)), key=lambda row: -totals[row])
    back = sorted(range(len(totals)), key=lambda at: order[at])
    return order, back, [totals[row] for row in order]


def _active(totals: list[int], step: int) -> int:
    """How many rows, sorted by totals, still have a step to take."""
    return sum(total > step for total in totals)


class _Fold(_Loop):
    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: Any, block: Block, step: Any, form: Any, carried: int, plan: Plan, key: Any, *inside
    ):
        count = info.batch_size
        inside = [t if d is None else t.movedim(d, 0) for t, d in zip(inside, in_dims[6:], strict=True)]
        batched = [at < carried or d is not None for at, d in enumerate(in_dims[6:])]
        for at in range(carried):
            if in_dims[6 + at] is None:
                inside[at] = inside[at].expand(count, *inside[at].shape)

        size = block.size("train")
        order, back, totals = _sorted_rows([plan.total(n) for n in size])
        start, size = block.start("train"), [size[row] for row in order]
        if order != list(range(count)):
            where = torch.tensor(order, device=key.device)
            key, start = key[where], start[where]
            inside = [t[where] if b else t for t, b in zip(inside, batched, strict=True)]
        keys = [plan.key(key, draw) for draw in range(plan.draws)]
        index = [_table(k, size, totals, plan) for k in keys]  # each [rows, steps, batch]
        slots = min(plan.batch_size, max(size))

        carry, given = inside[:carried], inside[carried:]
        final = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in carry]
        active = width = count
        for at in range(totals[0] if totals else 0):
            if (now := _active(totals, at)) < active:  # rows that have just finished are put away
                for f, c in zip(final, carry, strict=True):
                    f[now:active] = c[now:active]
                active, width = now, block.runner.width(now, count)
                carry = [c[:width] for c in carry]
            partial = any(_partial(n, plan, at) for n in size[:active])
            batches = []
            for table, k in zip(index, keys, strict=True):
                x, y = block.gather("train", table[:width, at], start[:width])
                weight = (table[:width, at] >= 0).to(block.dtype) if partial else None
                batches.append(Batch(x, y, weight, step_key(k[:width], at)))
            some = [g[:width] if b else g for g, b in zip(given, batched[carried:], strict=True)]
            before, carry = carry, block.runner.step(step, form, batched, batches, [*carry, *some])
            if at == 0:
                refuse_other_form(shapes(before), shapes(carry))
            filled = sum(min(plan.batch_size, n - at % plan.batches(n) * plan.batch_size) for n in size[:active])
            block.runner.count(width * slots, filled)
        for f, c in zip(final, carry, strict=True):
            f[:active] = c[:active]
        if order != list(range(count)):
            final = [f[torch.tensor(back, device=f.device)] for f in final]
        return tuple(final), (0,) * carried


def _partial(size: int, plan: Plan, step: int) -> bool:
    """Whether this client's batch at this step is smaller than a full one."""
    return size % plan.batch_size != 0 and step % plan.batches(size) == plan.batches(size) - 1


def _table(key: Tensor, size: list[int], totals: list[int], plan: Plan) -> Tensor:
    """Sample numbers of every step [rows, steps, batch], -1 where a batch is not full; finished rows keep -1 only."""
    slots = min(plan.batch_size, max(size))
    table = torch.full((len(size), totals[0] if totals else 0, plan.batch_size), -1, device=key.device)
    per_epoch = [plan.batches(n) for n in size]
    for epoch in range(max((-(-t // max(p, 1)) for t, p in zip(totals, per_epoch, strict=True)), default=0)):
        rows = [r for r, (t, p) in enumerate(zip(totals, per_epoch, strict=True)) if t > epoch * p]
        longest, where = max(size[r] for r in rows), torch.tensor(rows, device=key.device)
        order = shuffle(order_key(key[where], epoch), torch.tensor(size, device=key.device)[where], longest)
        fill = plan.batches(longest) * plan.batch_size - longest
        order = torch.nn.functional.pad(order, (0, fill), value=-1).unflatten(1, (-1, plan.batch_size))
        # (row, batch) pairs of this epoch, on the host, which knows all sizes: nothing waits for the device.
        taken = torch.tensor([min(per_epoch[r], totals[r] - epoch * per_epoch[r]) for r in rows])
        row, batch = (torch.arange(int(taken.max())) < taken[:, None]).nonzero().T
        step = batch + epoch * torch.tensor([per_epoch[r] for r in rows])[row]
        row, batch, step = row.to(key.device), batch.to(key.device), step.to(key.device)
        table[where[row], step] = order[row, batch]
    return table[..., :slots]


class _Mean(_Loop):
    @staticmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride]
        info: Any, in_dims: Any, block: Block, fn: Any, form: Any, result: _Result, split: str, key: Any, *inside
    ):
        count = info.batch_size
        batched = [d is not None for d in in_dims[6:]]
        inside = [t if d is None else t.movedim(d, 0) for t, d in zip(inside, in_dims[6:], strict=True)]
        size = block.size(split)
        order, back, size = _sorted_rows(size)
        where = torch.tensor(order, device=key.device)
        start, key = block.start(split)[where], key[where]
        inside = [t[where] if b else t for t, b in zip(inside, batched, strict=True)]
        function, owner, fixed = check_step(fn)
        if not size[0]:  # nobody has samples: any will do for the form of the result, which is NaN
            split, start = "train", torch.zeros_like(start)

        def one(x: Tensor, y: Tensor, weight: Tensor, key: Tensor, *inside: Tensor) -> tuple[Tensor, ...]:
            value = function(owner, *fixed, Batch(x, y, weight, key), unflatten(list(inside), form))
            result.form = flatten(value)[1]
            return tuple(leaves(value))

        totals: list[Tensor] = []
        n = torch.tensor(size, device=key.device)
        for first in range(0, max(size[0], 1), CHUNK):
            active = _active(size, first) if size[0] else count
            length = min(CHUNK, max(size[0] - first, 1))
            place = torch.arange(first, first + length, device=key.device)
            index = torch.where(place < n[:active, None], place, -1)
            x, y = block.gather(split, index, start[:active])
            weight = (index >= 0).to(block.dtype)
            some = [t[:active] if b else t for t, b in zip(inside, batched, strict=True)]
            dims = (0, 0, 0, 0, *(0 if b else None for b in batched))
            values = vmap(one, in_dims=dims)(x, y, weight, key[:active], *some)
            if not totals:
                totals = [v.new_zeros(count, *v.shape[1:]) for v in values]
            samples = weight.sum(1)
            for total, v in zip(totals, values, strict=True):
                total[:active] += v * samples.view(-1, *(1,) * (v.dim() - 1))
        # A client without samples has no mean: 0 / 0 is NaN.
        out = [t / n.view(-1, *(1,) * (t.dim() - 1)) for t in totals]
        return tuple(t[torch.tensor(back, device=t.device)] for t in out), (0,) * len(out)


@dataclass
class Runner:
    """Runs one step for the active rows, plainly or compiled."""

    compile: bool | str = False  # True, or the name of a torch.compile backend
    blocks: tuple[int, ...] = ()  # allowed numbers of rows; () is any number
    executed: int = 0
    useful: int = 0
    compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def width(self, active: int, count: int) -> int:
        """Rows to run for this many active ones: rounded up to an allowed number, so that few shapes occur."""
        return min(next((b for b in self.blocks if b >= active), count), count) if self.blocks else active

    def count(self, executed: int, useful: int) -> None:
        self.executed += executed
        self.useful += useful

    def step(self, step: Any, form: Any, batched: list[bool], batches: list[Batch], inside: list[Tensor]) -> list:
        """The carry after one step of all rows."""
        function, method, fixed = check_step(step)
        weighted = batches[0].weight is not None
        dims = (*(0,) * (4 if weighted else 3) * len(batches), *(0 if b else None for b in batched))

        def one(*tensors: Tensor) -> tuple[Tensor, ...]:
            each, got = (4, Batch) if weighted else (3, lambda x, y, key: Batch(x, y, None, key))
            cut = each * len(batches)
            some = [got(*tensors[at : at + each]) for at in range(0, cut, each)]
            carry, given = unflatten(list(tensors[cut:]), form)
            batch = some[0] if len(some) == 1 else tuple(some)
            return tuple(leaves(function(method, *fixed, carry, batch, given)))

        flat = [t for b in batches for t in b if t is not None]
        # Dropout's table of counters, a constant of the compiled step, crashes inductor on CUDA (torch 2.11).
        if not self.compile or (method.model.keyed and flat[0].is_cuda):
            return list(vmap(one, in_dims=dims)(*flat, *inside))
        # Keyed by everything that is not a tensor: two instances of a method must not share one compiled step.
        settings = tuple(getattr(method, f.name) for f in fields(method) if f.name != "model")
        key = (function, type(method), fixed, settings, method.model, form, dims, *(t.shape for t in (*flat, *inside)))
        if key not in self.compiled:
            self.compiled[key] = self._compile(vmap(one, in_dims=dims))
        return list(self.compiled[key](*flat, *inside))

    def _compile(self, batch_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            return batch_step(*tensors)

        # Dynamo counts recompilations per code object and vmap's wrapper is one object for all: each step gets its own.
        run.__code__ = run.__code__.replace(co_name=f"step_{len(self.compiled)}")
        backend = self.compile if isinstance(self.compile, str) else "inductor"
        return torch.compile(run, fullgraph=True, dynamic=False, backend=backend)
