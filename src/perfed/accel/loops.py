"""Steps of a block as CUDA graphs: recorded once for each number of active clients, then replayed.

A step of a small network is a hundred short kernels, and telling a GPU about each of them takes longer than running
them. Everything a step needs lies at fixed addresses: the carry, what is given, the table of sample numbers and a
counter of steps, which the step itself advances. So a whole fold is a row of replays, and nothing waits for the host.
"""

# Kernels are called through brackets with plain numbers, and arguments of a traced node can be anything.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from perfed.accel import autotune, kernels
from perfed.accel.cuda_graph import capture, queue
from perfed.accel.fast import fast
from perfed.accel.schedule import Program
from perfed.accel.trace import Rows, record
from perfed.core.clients import Clients
from perfed.core.data import form, refuse_other_form

MANY = 8  # steps to a graph, where that pays: a graph takes some microseconds to begin, a small step not much longer
WORTH = 512  # steps of a number of rows after which it does
SMALL = 1 << 20  # numbers that all rows of a small step carry

Body = Callable[..., tuple[Tensor, ...]]  # (x, y, weight, key) for each draw, then carry, then given -> carry


@triton.jit
def _gather(
    table, at, start, source, labels, mean, std, x, y, weight, steps, last,
    SLOTS: tl.constexpr, CHANNELS: tl.constexpr, PAD: tl.constexpr, PIXELS: tl.constexpr,
    NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sample: its bytes as numbers, channels last; its label; whether it is one."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(table + (r // SLOTS * steps + tl.load(at)) * SLOTS + r % SLOTS)
    sample = tl.minimum(tl.load(start + r // SLOTS) + tl.maximum(n, 0), last)  # a client without samples has no first
    ok = place < PIXELS
    c = tl.arange(0, PAD)
    real = ok[:, None] & (c < CHANNELS)[None, :]
    v = tl.load(source + sample * (CHANNELS * PIXELS) + c[None, :] * PIXELS + place[:, None], mask=real, other=0)
    v = v.to(tl.float32) / 255.0
    if NORMAL:
        m = tl.load(mean + c, mask=c < CHANNELS, other=0.0)
        s = tl.load(std + c, mask=c < CHANNELS, other=1.0)
        v = tl.where(real, (v - m[None, :]) / s[None, :], 0.0)
    tl.store(x + (r * PIXELS + place[:, None]) * PAD + c[None, :], v, mask=ok[:, None])
    if tl.program_id(1) == 0:
        tl.store(y + r, tl.load(labels + sample))
        tl.store(weight + r, tl.where(n >= 0, 1.0, 0.0))


class Again(NamedTuple):
    """What a graph is where there is no GPU: the steps themselves."""

    replay: Callable[[], None]


@dataclass(eq=False)
class Loop:
    """One kind of fold at its fixed addresses."""

    clients: Clients
    split: str
    dtype: torch.dtype
    keyed: bool  # whether steps draw random numbers
    weighted: bool  # whether any batch can be partial
    body: Body
    carry: list[Tensor]  # each [rows, ...]
    given: list[Tensor]
    batched: list[bool]  # of given
    tables: list[Tensor]  # for each draw [rows, steps, slots]
    keys: list[Tensor]  # for each draw [rows]
    start: Tensor  # [rows]
    at: Tensor  # the step, one number
    pool: Any
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | Again] = field(default_factory=dict)  # by rows and steps
    replayed: dict[int, int] = field(default_factory=dict)  # steps by rows
    steps: Rows | None = None  # the step for any number of rows
    programs: dict[int, Program] = field(default_factory=dict)  # by rows; graphs read their constants

    @classmethod
    def make(
        cls,
        clients: Clients,
        split: str,
        dtype: torch.dtype,
        keyed: bool,
        weighted: bool,
        body: Body,
        inside: list[Tensor],
        batched: list[bool],
        carried: int,
        shape: tuple[int, int, int],
        rows: int,
        pool: Any,
    ) -> Loop:
        """Room for so many rows of tensors like these."""
        room = lambda t, b: torch.empty((rows, *t.shape[1:]) if b else t.shape, dtype=t.dtype, device=t.device)
        places = [room(t, b) for t, b in zip(inside, batched, strict=True)]
        whole = lambda *size: torch.zeros(*size, dtype=torch.int64, device=places[0].device)
        draws, steps, slots = shape
        return cls(
            clients, split, dtype, keyed, weighted, body, places[:carried], places[carried:], batched[carried:],
            [whole(rows, steps, slots) for _ in range(draws)], [whole(rows) for _ in range(draws)], whole(rows),
            whole(1), pool,
        )  # fmt: skip

    def load(self, inside: list[Tensor], index: list[Tensor], keys: list[Tensor], start: Tensor) -> list[Tensor]:
        """Put a fold here; returns where its carry is."""
        rows = len(start)
        carry = [c[:rows] for c in self.carry]
        given = [g[:rows] if b else g for g, b in zip(self.given, self.batched, strict=True)]
        for place, tensor in zip([*carry, *given], inside, strict=True):
            kernels.fill(place, tensor)
        for table, found, key, fresh in zip(self.tables, index, self.keys, keys, strict=True):
            _, steps, slots = found.shape
            table[:rows, :steps, :slots] = found
            table[:rows, :steps, slots:] = -1
            key[:rows] = fresh
        self.start[:rows] = start
        self.at.zero_()
        return carry

    @property
    def rows(self) -> int:
        return len(self.start)

    def _batch(self, table: Tensor, key: Tensor, width: int) -> list[Tensor]:
        source = self.clients.split(self.split)
        slots = table.shape[2]
        images = source.x.dtype == torch.uint8 and source.x.dim() == 4 and source.x.shape[1] <= 4
        images = images and source.x.is_contiguous()  # the kernel counts on it
        if images and self.dtype == torch.float32:
            x, y, weight = self._images(table, width, slots)
        else:
            index = table[:width].index_select(1, self.at)[:, 0]
            rows = (index.clamp_min(0) + self.start[:width, None]).clamp_max(len(source.y) - 1)
            x = self.clients.ready(source.x[rows.flatten()], self.dtype).unflatten(0, rows.shape)
            y, weight = source.y[rows], (index >= 0).to(self.dtype)
        keys = kernels.step_keys(key[:width], self.at) if self.keyed else key[:width]
        return [x, y, weight, keys] if self.weighted else [x, y, keys]

    def _images(self, table: Tensor, width: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        source = self.clients.split(self.split)
        _, channels, high, wide = source.x.shape
        pad = 4  # channels, as the convolution wants them
        x = torch.empty(width, slots, high, wide, pad, device=table.device)
        y = torch.empty(width, slots, dtype=torch.int64, device=table.device)
        weight = torch.empty(width, slots, device=table.device)
        normal = self.clients.mean is not None and self.clients.std is not None
        mean, std = (self.clients.mean, self.clients.std) if normal else (x, x)
        block = 256
        _gather[(width * slots, triton.cdiv(high * wide, block))](
            table, self.at, self.start, source.x, source.y, mean, std, x, y, weight, table.shape[1],
            len(source.y) - 1,
            slots, channels, pad, high * wide, normal, block,
        )  # fmt: skip
        return x[..., :channels].permute(0, 1, 4, 2, 3), y, weight

    def _inputs(self, width: int) -> tuple[list[Tensor], list[Tensor]]:
        batches = [t for table, key in zip(self.tables, self.keys, strict=True) for t in self._batch(table, key, width)]
        given = [g[:width] if b else g for g, b in zip(self.given, self.batched, strict=True)]
        return batches, given

    def _operations(self, width: int) -> fx.Graph:
        if self.steps is None and width > 2:
            other = width // 2 if width > 3 else width - 1  # far apart: what is no straight line shows
            self.steps = Rows((width, self._traced(width)), (other, self._traced(other)))
        graph = self.steps(width) if self.steps is not None else None
        return self._traced(width) if graph is None else graph

    def _traced(self, width: int) -> fx.Graph:
        batches, given = self._inputs(width)
        carry = [c[:width] for c in self.carry]
        with fast():
            graph = record(self._ordered, *carry, *batches, *given)
        (results,) = next(n for n in graph.nodes if n.op == "output").args
        after = [r.meta["val"] for r in results]
        refuse_other_form(form(carry), [(kind.shape, kind.dtype) for kind in after])
        return graph

    def _ordered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Carry first: a program may overwrite argument k with result k.
        cut = len(self.carry)
        end = len(tensors) - len(self.given)
        return self.body(*tensors[cut:end], *tensors[:cut], *tensors[end:])

    def record(self, width: int, steps: int) -> None:
        """Make the graph of this number of rows and steps."""
        known = width in self.programs
        if not known:
            # Made once all is timed: what is constant in it is worked out for good.
            self.programs[width] = Program(autotune.prepared(lambda: self._operations(width)))
        program = self.programs[width]

        def once(carry: list[Tensor]) -> None:
            batches, given = self._inputs(width)
            program(*carry, *batches, *given, into=carry)

        carry = [c[:width] for c in self.carry]

        def run() -> None:
            for _ in range(steps):
                once(carry)
                self.at.add_(1)

        if not self.at.is_cuda:  # nothing to record on: the same without a graph
            self.graphs[width, steps] = Again(run)
            return
        if not known:
            side = queue(self.at.device, -1)  # the one that is recorded in: what it has cached serves both
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                once([c.clone() for c in carry])  # everything is compiled and tuned before it is recorded
            torch.cuda.current_stream().wait_stream(side)
        made: list[torch.cuda.CUDAGraph] = []
        record = lambda: made.append(capture(run, self.at.device, self.pool))
        if not autotune.fits(record):  # inside a recording nothing is handed back by itself
            record()
        self.graphs[width, steps] = made[0]


@dataclass
class Recorder:
    """All loops of an engine, sharing one pool of memory."""

    loops: dict[Any, Loop] = field(default_factory=dict)
    pool: Any = None
    seconds: float = 0.0  # spent on tracing, tuning and recording

    def loop(self, key: Any, rows: int, make: Callable[[Any], Loop]) -> Loop:
        """The loop of this kind, made at first use and again where it has too few rows."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else ()
        if key not in self.loops or self.loops[key].rows < rows:
            self.loops[key] = make(self.pool)
        return self.loops[key]

    def run(self, loop: Loop, width: int, steps: int) -> None:
        """So many steps of the first rows."""
        done = loop.replayed.get(width, 0)
        loop.replayed[width] = done + steps
        small = sum(c[:width].numel() for c in loop.carry) <= SMALL
        for size in (MANY, 1) if small and done >= WORTH else (1,):
            while steps >= size:
                self._graph(loop, width, size).replay()
                steps -= size

    def _graph(self, loop: Loop, width: int, steps: int) -> torch.cuda.CUDAGraph | Again:
        if (width, steps) not in loop.graphs:
            began = time.monotonic()
            loop.record(width, steps)
            self.seconds += time.monotonic() - began
        return loop.graphs[width, steps]
