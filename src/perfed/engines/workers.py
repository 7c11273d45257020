"""One single-threaded process per core, each training one client at a time.

On a CPU there is no launch overhead to save by batching clients, and small working sets stay in the cache; two
processes beat two threads on one client. Workers are forked, so method and data are shared without a copy. Tensors
travel through shared memory and short JSON messages through a pipe; nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.messages import Down
from perfed.core.tree import pack, rows, stack, tree_map, unpack
from perfed.engines.base import Asked, Evaluation, Task, Training, Values
from perfed.engines.local import Sequential


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Memory:
    """A piece of memory that parent and worker both see; it grows as needed."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.file = tempfile.TemporaryFile(dir=shared if shared.is_dir() else None)  # noqa: SIM115
        self.map: mmap.mmap | None = None

    def _mapped(self, size: int) -> mmap.mmap:
        if self.map is None or len(self.map) < size:
            if os.fstat(self.file.fileno()).st_size < size:
                os.ftruncate(self.file.fileno(), size)
            # The old map is dropped, not closed: tensors may still look at it.
            self.map = mmap.mmap(self.file.fileno(), os.fstat(self.file.fileno()).st_size)
        return self.map

    def close(self) -> None:
        """Give the memory back; what was read stays valid."""
        self.file.close()

    def write(self, tree: Any) -> dict[str, Any]:
        """Put a tree of tensors here; the note says how to read it."""
        skeleton, tensors = pack(tree)
        places, end = [], 0
        for t in tensors:
            places.append({"at": end, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")})
            end += -(-t.numel() * t.element_size() // 64) * 64
        target = self._mapped(max(end, 64))
        for place, t in zip(places, tensors, strict=True):
            _view(target, place).copy_(t)
        return {"skeleton": skeleton, "places": places, "size": max(end, 64)}

    def read(self, note: dict[str, Any]) -> Any:
        """The tree, as views of this memory: valid until the next write."""
        source = self._mapped(note["size"])
        return unpack(note["skeleton"], [_view(source, place) for place in note["places"]])


def _view(memory: mmap.mmap, place: dict[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, place["dtype"]), place["shape"]
    count = int(torch.Size(shape).numel())
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place["at"]).view(shape)


class _Worker:
    """The parent's end of one process."""

    def __init__(self, engine: Workers, others: list[_Worker]):
        context = multiprocessing.get_context("fork")
        self.pipe, end = context.Pipe()
        self.inbox, self.outbox = Memory(), Memory()
        parents = [w.pipe for w in others] + [self.pipe]
        self.process = context.Process(target=_serve, args=(engine, end, parents, self.inbox, self.outbox), daemon=True)
        with warnings.catch_warnings():  # forking beside idle threads is what this engine is about
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        end.close()

    def send(self, message: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        return json.loads(self.pipe.recv_bytes())


class Workers(Sequential):
    """Sequential, spread over processes; the result does not depend on how many or on who finishes first."""

    name = "workers"

    def __init__(self, *args: Any, workers: int = 0, **options: Any):
        super().__init__(*args, **options)
        self.count = workers or cores()
        self.shared: Memory | None = None
        self.workers: list[_Worker] = []

    def _each(self, task: Task, key: Tensor, asked: Asked) -> dict[str, Any]:
        ids, states, down, done = asked
        size = self.clients.train.size
        order = sorted(range(len(ids)), key=lambda row: -size[ids[row]])  # the largest is taken first
        # Clients that only predict are quick: several go together.
        some = max(1, len(ids) // (4 * self.count)) if isinstance(task, Evaluation) else 1
        groups = [order[first : first + some] for first in range(0, len(order), some)]
        how = {"task": _describe(task), "key": int(key)}
        whose = lambda g: {"ids": [ids[row] for row in g], "done": None if done is None else [done[row] for row in g]}
        jobs = [({**how, **whose(g)}, lambda g=g: rows((states, down.own), g)) for g in groups]
        found = self._spread(down.shared, jobs)
        back = torch.tensor([row for group in groups for row in group]).argsort()
        return tree_map(lambda *t: torch.cat(t)[back], *found)

    def _score(self, models: dict[str, Tensor], full: bool) -> list[Any]:
        return self._spread(models, [({"piece": (full, *piece)}, tuple) for piece in self._pieces])

    def judge(self, ids: Sequence[int], models: dict[str, Tensor]) -> Values:
        some = -(-len(ids) // (4 * self.count))
        groups = [slice(first, first + some) for first in range(0, len(ids), some)]
        found = self._spread((), [({"judge": list(ids[g])}, lambda g=g: rows(models, g)) for g in groups])
        return tree_map(lambda *t: torch.cat(t), *found)

    def _spread(self, shared: Any, jobs: list[tuple[dict[str, Any], Callable[[], Any]]]) -> list[Any]:
        """What the workers make of the jobs, each a message and what makes its tensors; `shared` is for all."""
        self.shared = self.shared or Memory()  # before the workers: they inherit it
        while len(self.workers) < self.count:
            self.workers.append(_Worker(self, self.workers))
        note = self.shared.write(shared)
        waiting = list(range(len(jobs)))[::-1]
        found: list[Any] = [None] * len(jobs)
        busy: dict[Connection, tuple[_Worker, int]] = {}

        def hand_out(worker: _Worker) -> None:
            if waiting:
                job = waiting.pop()
                message, tensors = jobs[job]
                worker.send({**message, "shared": note, "note": worker.inbox.write(tensors())})
                busy[worker.pipe] = (worker, job)

        for worker in self.workers:
            hand_out(worker)
        while busy:
            for pipe in wait(list(busy)):
                worker, job = busy.pop(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    answer = worker.receive()
                except (EOFError, ConnectionResetError):
                    self.close()
                    names = [self.clients.names[id] for id in jobs[job][0].get("ids", [])]
                    who = f"trained client {names[0]}" if names else "evaluated"
                    raise RuntimeError(f"the worker process that {who} died (out of memory?)") from None
                if "error" in answer:
                    self.close()
                    raise (Problem if answer["problem"] else RuntimeError)(answer["error"])
                found[job] = tree_map(torch.clone, worker.outbox.read(answer))
                hand_out(worker)
        return found

    def answer(self, message: dict[str, Any], shared: Any, tensors: Any) -> Any:
        """What a worker makes of a job."""
        if "piece" in message:
            return self.score_piece(shared, *message["piece"])
        if "judge" in message:
            return super().judge(message["judge"], tensors)
        how, key = message["task"], torch.tensor(message["key"])
        task = Evaluation(self.method, tuple(how["splits"]), how["keep"]) if how else Training(self.method, self.wire)
        each, done = [], message["done"]
        for row, id in enumerate(message["ids"]):
            state, own = rows(tensors, row)
            each.append(self.one(task, key, id, state, Down(shared, own), done and done[row]))
        return stack(each)

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.inbox.close()
            worker.outbox.close()
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        if self.shared is not None:
            self.shared.close()
        self.workers, self.shared = [], None


def _describe(task: Task) -> dict[str, Any]:
    if isinstance(task, Evaluation):
        return {"splits": list(task.splits), "keep": task.keep}
    return {}


def _serve(engine: Workers, pipe: Connection, parents: list[Connection], inbox: Memory, outbox: Memory) -> None:
    """A worker's life: one client after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    for other in parents:
        other.close()  # or this end would never see the parent go
    torch.set_num_threads(1)
    shared = engine.shared
    assert shared is not None  # made before this process was
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            found = engine.answer(message, shared.read(message["shared"]), inbox.read(message["note"]))
            answer = outbox.write(found)
        except Exception as error:
            if "fork-based multiprocessing" in str(error):
                error = Problem(
                    "where there is a GPU, 'workers' cannot start once this process has trained: use another engine"
                )
            text = str(error) if isinstance(error, Problem) else f"{error}\n{traceback.format_exc()}"
            answer = {"error": text, "problem": isinstance(error, Problem)}
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except BrokenPipeError:
            return
