"""A cohort is one computation: vmap of `local` over a block of clients.

`local` is written for one client, and `blocks` runs its loops for all clients of a block at once. Here a cohort is cut
into blocks, and put together again; several runs that are alike share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from perfed.accel.autotune import prepared
from perfed.accel.fast import fast as with_kernels
from perfed.accel.fast import use_kernels
from perfed.core.clients import SPLITS, Clients, alike, join
from perfed.core.errors import Problem
from perfed.core.messages import Down
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import PERSONALISE, TRAIN, derive
from perfed.core.tree import integers, tree_map
from perfed.engines.base import Asked, Engine, Evaluation, Scores, Task, Training, Uploads, uploads
from perfed.engines.blocks import Block, BlockData, Runner, holding

if TYPE_CHECKING:
    from perfed.accel.loops import Recorder


def _recorder() -> Recorder:
    from perfed.accel.loops import Recorder  # needs Triton

    return Recorder()


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
        fast: bool = False,  # kernels for whole cohorts, and recorded steps
        **options: Any,
    ):
        super().__init__(method, clients.to(method.model.device), **options)
        self.block = block  # clients per block; 0 is the whole cohort
        self.runner = Runner(compile, tuple(sorted(sizes)), _recorder() if fast else None)
        if fast:
            use_kernels()
        for split in SPLITS:
            y = self.clients.split(split).y
            if fast and len(y) and not 0 <= int(y.min()) <= int(y.max()) < clients.classes:  # kernels do not look
                raise Problem(f"a label of the {split} samples is not one of the {clients.classes} classes")

    @property
    def useful(self) -> float:
        """Share of the executed sample slots that held a sample."""
        return self.runner.useful / max(self.runner.executed, 1)

    def _each(self, task: Task, key: Tensor, asked: Asked) -> dict[str, Any]:
        return self._all([Part(self, task, key, asked)])[0]

    def _all(self, parts: Sequence[Part], clients: Clients | None = None) -> list[dict[str, Any]]:
        """Results of every part; the clients of all parts are rows of the same blocks."""
        size = [part.engine.clients.train.size for part in parts]
        rows = [(at, row) for at, part in enumerate(parts) for row in range(len(part.ids))]
        rows.sort(key=lambda r: -size[r[0]][parts[r[0]].ids[r[1]]])  # alike clients share a block
        step = self.block or len(rows)
        blocks = [rows[first : first + step] for first in range(0, len(rows), step)]
        clients = clients or self.clients
        out = [self._block(parts, block, clients) for block in blocks]
        joined = tree_map(lambda *t: t[0] if len(t) == 1 else torch.cat(t), *out)
        if len(parts) == 1 and rows == sorted(rows):
            return [joined]
        found = []
        for at, part in enumerate(parts):
            place = {row: k for k, (p, row) in enumerate(rows) if p == at}
            back = self._send([place[row] for row in range(len(part.ids))])
            found.append(tree_map(lambda t, b=back: t.index_select(0, b), joined))
        return found

    def _rate(self, batch: Batch, models: dict[str, Tensor]) -> Any:
        if self.runner.recorder is None:
            return super()._rate(batch, models)
        with with_kernels():  # a block of one: the same kernels
            one = lambda x, y: self.method.rate(Batch(x, y, None, batch.key), models)
            return tree_map(lambda t: t[0], prepared(lambda: vmap(one)(batch.x[None], batch.y[None])))

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return integers(numbers, self.method.model.device)

    def _block(self, parts: Sequence[Part], rows: list[tuple[int, int]], clients: Clients) -> dict[str, Any]:
        m, task = self.method, parts[0].task
        ids = [parts[at].ids[row] for at, row in rows]
        held = tuple(parts[at].offset + parts[at].ids[row] for at, row in rows)  # where their samples are
        where, whose = self._send(ids), self._send([at for at, _ in rows])
        first = [0, *accumulate(len(part.ids) for part in parts)]
        row = self._send([first[at] + row for at, row in rows])  # of all parts' rows, one after another
        kept = len(parts) == 1 and rows == [(0, at) for at in range(len(parts[0].ids))]  # nothing to sort
        pick = lambda t: t if kept else t.index_select(0, row)
        take = lambda trees: tree_map(lambda *t: pick(t[0] if len(t) == 1 else torch.cat(t)), *trees)
        done = [parts[at].finishes(row) for at, row in rows] if any(part.asked.done for part in parts) else None
        block = Block(clients, held, self._send(held), self.runner, m.model.dtype, m.epochs, done)
        states, own = take([part.asked.states for part in parts]), take([part.asked.down.own for part in parts])
        keys = derive(torch.stack([part.key for part in parts]).index_select(0, whose), where)
        varied = {k: v.index_select(0, whose) for k, v in _varied([p.engine.method for p in parts]).items()}
        shared = parts[0].asked.down.shared  # the same for all rows, where there is one part
        if len(parts) > 1:
            shared = tree_map(lambda *t: torch.stack(t).index_select(0, whose), *(p.asked.down.shared for p in parts))

        def one(
            state: State, own: Any, key: Tensor, size: Any, varied: dict[str, Tensor], done: Any, shared: Any
        ) -> Any:
            mine = task._replace(method=holding(m, varied))
            return mine(state, Down(shared, own), BlockData(block, key, size, m.batch_size, m.epochs, done), key)

        sizes = {split: block.sizes(split) for split in SPLITS}
        dims = (0, 0, 0, 0, 0, None if done is None else 0, None if len(parts) == 1 else 0)
        each = None if done is None else self._send(done)
        return vmap(one, in_dims=dims)(states, own, keys, sizes, varied, each, shared)


@dataclass(frozen=True)
class Part:
    """What one run asks for: its method's work for some clients."""

    engine: Engine
    task: Any
    key: Tensor
    asked: Asked
    offset: int = 0  # of this run's clients among those of all runs

    @property
    def ids(self) -> Sequence[int]:
        return self.asked.ids

    def finishes(self, row: int) -> int:
        """The epochs that a client finishes."""
        return self.asked.done[row] if self.asked.done else self.engine.method.epochs


class Together:
    """Several runs of one experiment, alike but for their seeds or learning rates, whose cohorts train as one."""

    def __init__(self, engines: Sequence[Vectorised]):
        self.engines, self.first = list(engines), engines[0]
        self._refuse_others()
        same = all(_same_samples(engine.clients, self.first.clients) for engine in engines)
        self.clients = self.first.clients if same else join([engine.clients for engine in engines])
        counts = [0 if same else len(engine.clients) for engine in engines]
        self.offsets = [0, *accumulate(counts)][:-1]
        self.seeds = tuple(engine.method.seed for engine in engines)
        for seed in self.seeds:
            self.first.method.model.init(seed)  # inside a batch no network can be built

    def _refuse_others(self) -> None:
        """What must be the same in all runs."""
        method, model = self.first.method, self.first.method.model
        for other in self.engines:
            theirs = other.method.model
            if _name(other.method) != _name(method) or other.wire is not self.first.wire:
                raise Problem("runs that train together need the same method and the same treatment of uploads")
            if theirs.shapes != model.shapes or theirs.dtype != model.dtype or theirs.device != model.device:
                raise Problem("runs that train together need the same network, on one device")
        _varied([engine.method for engine in self.engines])

    def _parts(self, tasks: Sequence[Any], keys: Sequence[Tensor], asked: Sequence[Asked]) -> list[Part]:
        self.first.method.model.seeds = self.seeds
        rows = zip(self.engines, tasks, keys, asked, self.offsets, strict=True)
        return [Part(engine, task, key, ask, offset) for engine, task, key, ask, offset in rows]

    def train(self, round: int, exchange: int, asked: Sequence[Asked]) -> list[tuple[State, Uploads]]:
        """One exchange of every run."""
        tasks = [Training(self.first.method, engine.wire) for engine in self.engines]
        keys = [engine.key(TRAIN, round, exchange) for engine in self.engines]
        return [uploads(out) for out in self.first._all(self._parts(tasks, keys, asked), self.clients)]

    def evaluate(self, round: int, asked: Sequence[Asked], keep: bool = False, full: bool = False) -> list[Scores]:
        """Every run's models and their scores."""
        full = full and self.first.method.usual
        tasks = [Evaluation(self.first.method, self.first.splits, keep or full) for _ in self.engines]
        keys = [engine.key(PERSONALISE, round) for engine in self.engines]
        found = self.first._all(self._parts(tasks, keys, asked), self.clients)
        rows = zip(self.engines, found, asked, strict=True)
        return [engine.scored(out, one.ids, keep, full) for engine, out, one in rows]


def _name(method: Method) -> tuple[str, str]:
    return type(method).__module__, type(method).__qualname__  # a user's file is a new class each time it is read


def _same_samples(one: Clients, two: Clients) -> bool:
    if one is two:
        return True
    if not alike(one.mean, two.mean) or not alike(one.std, two.std):
        return False
    pairs = [(one.split(name), two.split(name)) for name in SPLITS]
    return all(a.size == b.size and torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in pairs)


def _varied(methods: Sequence[Method]) -> dict[str, Tensor]:
    """The settings in which these differ, one number for each; refuses what cannot differ inside one batch."""
    first, out = methods[0], {}
    for f in fields(first):
        values = [getattr(m, f.name) for m in methods]
        if f.name == "model" or all(v == values[0] for v in values):
            continue
        if f.name not in ("seed", "lr"):
            raise Problem(f"runs that train together may differ in seed and lr only, not in {f.name}")
        kind = torch.int64 if f.name == "seed" else first.model.dtype
        out[f.name] = torch.tensor(values, dtype=kind, device=first.model.device)
    return out
