"""Steps of a block as CUDA graphs: recorded once for each number of active clients, then replayed.

A step of a small network is a hundred short kernels, and telling a GPU about each of them takes longer than running
them. Everything a step needs lies at fixed addresses: the carry, what is given, the table of sample numbers and a
counter of steps, which the step itself advances. So a whole fold is a row of replays, and nothing waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from perfed.accel import autotune
from perfed.accel.cuda_graph import capture, queue
from perfed.accel.kernels.hash import mix, step_keys, tickets
from perfed.accel.kernels.rows import batches, fill, gather, weighted_sum
from perfed.accel.schedule import Program
from perfed.accel.trace import Rows, record
from perfed.core.augment import moved
from perfed.core.clients import Clients
from perfed.core.data import form, refuse_other_form

MANY = 8  # steps to a graph, where that pays: to begin one takes microseconds, and a small step not much longer
WORTH = 512  # steps of a number of rows after which it pays
SMALL = 1 << 20  # numbers in the carry of a step that is small

Body = Callable[..., tuple[Tensor, ...]]  # (x, y, weight, key, index) for each draw, then carry, then given -> carry


class Again(NamedTuple):
    """Stand for a graph where there is no GPU: replaying it runs the steps."""

    replay: Callable[[], None]


class Loop:
    """Hold one kind of fold at its fixed addresses."""

    def __init__(
        self,
        rows: int,
        pool: Any,
        inside: list[Tensor],
        batched: list[bool],
        shape: tuple[int, int, int],
        clients: Clients,
        split: str,
        dtype: torch.dtype,
        keyed: bool,
        weighted: bool,
        body: Body,
        carried: int,
    ):
        """Make room for a fold.

        Args:
            rows: clients at most.
            pool: memory that graphs share.
            inside: tensors like the carry and what is given.
            batched: True for those of them that have a row for each client.
            shape: batches that each step gets, steps at most, and slots of a batch.
            clients: whose samples are read.
            split: which of them.
            dtype: type of the samples.
            keyed: every step has keys of its own.
            weighted: a batch can be partial.
            body: the step of all rows.
            carried: how many of `inside` are the carry.
        """
        self.pool, self.clients, self.split, self.dtype = pool, clients, split, dtype
        self.keyed, self.weighted, self.body = keyed, weighted, body
        self.draws = self.looks_up = False  # whether a step reads its keys and its samples' index, known once traced
        room = lambda t, b: torch.empty((rows, *t.shape[1:]) if b else t.shape, dtype=t.dtype, device=t.device)
        places = [room(t, b) for t, b in zip(inside, batched, strict=True)]
        self.carry, self.given, self.batched = places[:carried], places[carried:], batched[carried:]
        whole = lambda *size: torch.zeros(*size, dtype=torch.int64, device=places[0].device)
        draws, steps, slots = shape
        self.tables = [whole(rows, steps, slots) for _ in range(draws)]  # samples of every step, -1: none
        self.keys = [whole(rows) for _ in range(draws)]
        augmented = self.tables if keyed and clients.augment != "none" else []
        self.moves = [torch.zeros_like(table, dtype=torch.uint8) for table in augmented]  # what happens to images
        self.start, self.counter = whole(rows), whole(1)  # first sample of each row, and the number of the step
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | Again] = {}  # by rows and steps
        self.replayed: dict[int, int] = {}  # steps by rows
        self.step: Rows | None = None  # the operations of a step, for any number of rows
        self.programs: dict[int, Program] = {}  # by rows; graphs read their constants

    def load(
        self,
        inside: list[Tensor],
        index: list[Tensor],
        keys: list[Tensor],
        start: Tensor,
        moves: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Put a fold here, and return where its carry is."""
        rows = len(start)
        carry = [c[:rows] for c in self.carry]
        given = [g[:rows] if b else g for g, b in zip(self.given, self.batched, strict=True)]
        for place, tensor in zip([*carry, *given], inside, strict=True):
            fill(place, tensor)
        for table, samples, key, fresh in zip(self.tables, index, self.keys, keys, strict=True):
            _, steps, slots = samples.shape
            table[:rows, :steps, :slots] = samples
            table[:rows, :steps, slots:] = -1
            key[:rows] = fresh
        for place, drawn in zip(self.moves, moves or (), strict=True):
            place[:rows, : drawn.shape[1], : drawn.shape[2]] = drawn
        self.start[:rows] = start
        self.counter.zero_()
        return carry

    @property
    def rows(self) -> int:
        return len(self.start)

    def _batch(self, table: Tensor, key: Tensor, moves: Tensor | None, width: int, looks_up: bool) -> list[Tensor]:
        clients, source = self.clients, self.clients.split(self.split)
        images = source.x.dtype == torch.uint8 and source.x.dim() == 4 and source.x.shape[1] <= 4
        if images and source.x.is_contiguous() and self.dtype == torch.float32:
            normal = None if clients.mean is None or clients.std is None else (clients.mean, clients.std)
            x, y, weight = gather(source, normal, table, self.counter, self.start, width, moves)
        else:
            index = table[:width].index_select(1, self.counter)[:, 0]
            sample = (index.clamp_min(0) + self.start[:width, None]).clamp_max(len(source.y) - 1)
            x = source.x[sample.flatten()]
            if moves is not None:
                x = moved(x, moves[:width].index_select(1, self.counter).flatten())
            x = clients.ready(x, self.dtype).unflatten(0, sample.shape)
            y, weight = source.y[sample], (index >= 0).to(self.dtype)
        keys = step_keys(key[:width], self.counter) if self.keyed and self.draws else key[:width]
        # What no step reads is not made.
        numbers = table[:width].index_select(1, self.counter)[:, 0].clamp_min(0) if looks_up else table[:width, 0]
        return [x, y, weight, keys, numbers] if self.weighted else [x, y, keys, numbers]

    def _inputs(self, width: int, looks_up: bool) -> tuple[list[Tensor], list[Tensor]]:
        draws = zip_longest(self.tables, self.keys, self.moves)
        samples = [tensor for draw in draws for tensor in self._batch(*draw, width, looks_up)]
        given = [g[:width] if b else g for g, b in zip(self.given, self.batched, strict=True)]
        return samples, given

    def _operations(self, width: int) -> fx.Graph:
        if self.step is None and width > 2:
            other = width // 2 if width > 3 else width - 1  # far apart: what is no straight line shows
            self.step = Rows((width, self._traced(width)), (other, self._traced(other)))
        graph = self.step(width) if self.step is not None else None
        return self._traced(width) if graph is None else graph

    def _traced(self, width: int) -> fx.Graph:
        samples, given = self._inputs(width, looks_up=True)
        carry = [c[:width] for c in self.carry]
        graph = record(self._ordered, *carry, *samples, *given)
        holders = graph.find_nodes(op="placeholder")
        each = 5 if self.weighted else 4  # of the tensors of a draw, the last two are its keys and its samples' index
        for end in range(len(carry) + each, len(carry) + each * len(self.keys) + 1, each):
            self.draws |= bool(holders[end - 2].users)
            self.looks_up |= bool(holders[end - 1].users)
        (results,) = next(n for n in graph.nodes if n.op == "output").args
        after = [r.meta["val"] for r in results]
        refuse_other_form(form(carry), [(kind.shape, kind.dtype) for kind in after])
        return graph

    def _ordered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Carry comes first, because a program may overwrite argument k with result k.
        cut = len(self.carry)
        end = len(tensors) - len(self.given)
        return self.body(*tensors[cut:end], *tensors[:cut], *tensors[end:])

    def record(self, width: int, steps: int) -> None:
        """Make the graph of so many rows and steps."""
        known = width in self.programs
        if not known:
            # Made once all kernels are timed, because what is constant in it is computed for good.
            self.programs[width] = Program(autotune.prepared(lambda: self._operations(width)))
        program = self.programs[width]

        def once(carry: list[Tensor]) -> None:
            samples, given = self._inputs(width, self.looks_up)
            program(*carry, *samples, *given, into=carry)

        carry = [c[:width] for c in self.carry]

        def run() -> None:
            for _ in range(steps):
                once(carry)
                self.counter.add_(1)

        if not self.counter.is_cuda:
            self.graphs[width, steps] = Again(run)
            return
        if not known:
            side = queue(self.counter.device, -1)  # recording uses it too: what memory it has cached serves both
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                once([c.clone() for c in carry])  # everything is compiled and tuned before it is recorded
            torch.cuda.current_stream().wait_stream(side)
        made: list[torch.cuda.CUDAGraph] = []
        record = lambda: made.append(capture(run, self.counter.device, self.pool))
        if not autotune.fits(record):  # inside a recording nothing is handed back by itself
            record()
        self.graphs[width, steps] = made[0]


@dataclass
class Recorder:
    """Hold all loops of an engine, which share one pool of memory, and what else the engine does in kernels."""

    # Each in one launch, and but for the order of a sum bit for bit what PyTorch's own operations give.
    batches, mix, tickets = staticmethod(batches), staticmethod(mix), staticmethod(tickets)
    weighted_sum, shapes_only = staticmethod(weighted_sum), staticmethod(autotune.shapes_only)

    loops: dict[Any, Loop] = field(default_factory=dict)
    pool: Any = None
    seconds: float = 0.0  # spent on tracing, tuning and recording

    def loop(self, key: tuple[Any, ...], inside: list[Tensor], batched: list[bool], shape: Any, *about: Any) -> Loop:
        """Return the loop of this kind, made at first use and again where it has too few rows.

        Args:
            key: what tells its step and its clients from others.
            inside: as `Loop` wants it.
            batched: as `Loop` wants it.
            shape: as `Loop` wants it.
            about: what else `Loop` wants.
        """
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else ()
        pairs = list(zip(inside, batched, strict=True))
        rows = next(len(t) for t, b in pairs if b)
        key = (*key, shape, *((t.shape[1:] if b else t.shape, t.dtype) for t, b in pairs))
        if key not in self.loops or self.loops[key].rows < rows:
            self.loops[key] = Loop(rows, self.pool, inside, batched, shape, *about)
        return self.loops[key]

    def run(self, loop: Loop, width: int, steps: int) -> None:
        """Take so many steps of the first `width` rows."""
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
