"""Workers: one single-threaded process per core, clients shared out as they finish.

On a CPU there is no launch overhead to save by batching clients, and small working sets stay in the cache; two
processes beat two threads on one client. Workers are forked, so method and data are shared without a copy. Tensors
travel through shared memory and short JSON messages through a pipe; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.context import Context
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Cohort, Down
from perfed.core.method import State
from perfed.core.tree import rows, stack, tree_map
from perfed.engines.base import Evaluation, Job, Results, Training, Work
from perfed.engines.extension import Extending
from perfed.engines.local import Sequential, reason_of
from perfed.engines.scores import Table, concatenate
from perfed.engines.scoring import Piece
from perfed.engines.trees import pack, unpack

ALIGNED = 64  # bytes: every tensor in shared memory begins at a multiple of it
SHARED = "/dev/shm"
TRIES = 3  # how often a piece of work is begun whose worker process dies
DIE_WITH_PARENT = 1  # Linux's PR_SET_PDEATHSIG


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Memory:
    """A piece of memory that parent and worker both see; it grows as needed.

    It lies in /dev/shm, and where that has no room (Docker's has 64 MB) in a file in the folder of temporary files.
    Room is reserved before it is used: writing to shared memory that is not there ends a process without a word.
    """

    def __init__(self) -> None:
        self.folders = [folder for folder in (SHARED, tempfile.gettempdir()) if os.access(folder, os.W_OK)]
        self.files = [tempfile.TemporaryFile(dir=folder) for folder in self.folders]  # noqa: SIM115
        self.maps: list[mmap.mmap | None] = [None] * len(self.files)

    def _with_room(self, size: int) -> int:
        """Return the place of the first file that has so many bytes, or can get them."""
        for place, file in enumerate(self.files):
            with contextlib.suppress(OSError):
                _reserve(file.fileno(), size)
                return place
        raise Problem(
            f"there is no room for {size / 1e6:,.0f} MB of tensors in {' or '.join(self.folders)}, through which "
            "workers get them: make one of them larger, or use --engine sequential"
        )

    def _mapped(self, place: int, size: int) -> mmap.mmap:
        known = self.maps[place]
        if known is None or len(known) < size:
            # The old map is dropped, not closed: tensors may still look at it.
            handle = self.files[place].fileno()
            known = self.maps[place] = mmap.mmap(handle, os.fstat(handle).st_size)
        return known

    def close(self) -> None:
        """Give the memory back; what was read stays valid."""
        for file in self.files:
            file.close()

    def write(self, tree: Any) -> dict[str, Any]:
        """Put a tree of tensors here.

        Args:
            tree: what `core.tree.pack` can take apart.

        Returns:
            A note for JSON that says how to read it.
        """
        skeleton, tensors = pack(tree)
        parts, end = [], 0
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts.append({"offset": end, "shape": list(tensor.shape), "dtype": dtype})
            end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        size = max(end, ALIGNED)
        place = self._with_room(size)
        target = self._mapped(place, size)
        for part, tensor in zip(parts, tensors, strict=True):
            _view(target, part).copy_(tensor)
        return {"skeleton": skeleton, "parts": parts, "size": size, "file": place}

    def read(self, note: dict[str, Any]) -> Any:
        """Return the tree of a note as views of this memory, which are valid until the next write."""
        source = self._mapped(note["file"], note["size"])
        return unpack(note["skeleton"], [_view(source, part) for part in note["parts"]])


def _reserve(handle: int, size: int) -> None:
    """Make a file so large, with room on its device for every byte; an OSError where there is none."""
    if os.fstat(handle).st_size < size:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:  # macOS
            os.ftruncate(handle, size)


def _view(memory: mmap.mmap, part: dict[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, part["dtype"]), part["shape"]
    count = int(torch.Size(shape).numel())
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=part["offset"]).view(shape)


class _Worker:
    """The parent's end of one process."""

    def __init__(self, engine: Workers, others: list[_Worker]):
        context = multiprocessing.get_context("fork")
        self.pipe, end = context.Pipe()
        self.inbox, self.outbox = Memory(), Memory()
        parents = [worker.pipe for worker in others] + [self.pipe]
        arguments = (engine, os.getpid(), end, parents, self.inbox, self.outbox)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():  # forking beside idle threads is what this engine is about
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.process.start()
            except OSError as error:
                for handle in (self.pipe, end, self.inbox, self.outbox):
                    handle.close()
                reason = f"{error.strerror}: use fewer --workers, or --engine sequential"
                raise Problem(f"cannot start worker process {len(others) + 1}: {reason}") from error
        end.close()

    def send(self, message: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        return json.loads(self.pipe.recv_bytes())  # an EOFError or OSError where the process is gone

    def close(self) -> None:
        """End the process and give its memory back; what was read stays valid."""
        self.pipe.close()
        self.inbox.close()
        self.outbox.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Assignment(NamedTuple):
    """One thing for a worker to do."""

    message: dict[str, Any]  # its "kind" is train, rehearse, extend, evaluate, refine, piece or full_scores
    tensors: Callable[[], Any]  # what goes with the message, made when a worker is free


class Workers(Sequential):
    """One single-threaded process per core, clients shared out as they finish."""

    name = "workers"

    def __init__(self, *jobs: Job, workers: int = 0, **options: Any):
        """Make an engine; its processes start with the first work.

        Args:
            jobs: the runs that it serves.
            workers: number of processes; 0: one for each core.
            options: those of every engine.
        """
        super().__init__(*jobs, **options)
        self.count = workers or cores()
        self.shared: Memory | None = None
        self.workers: list[_Worker] = []

    # ------------------------------------------------------------------ in the parent

    def _work(self, work: Work) -> Results:
        task, training = work.task, isinstance(work.task, Training)
        size = self.jobs[work.run].clients.train.size
        order = sorted(range(len(work.ids)), key=lambda row: -size[work.ids[row]])  # the largest is taken first
        # Clients that only predict are quick: several go together.
        together = 1 if training else max(1, len(work.ids) // (4 * self.count))
        groups = [order[first : first + together] for first in range(0, len(order), together)]
        about: dict[str, Any] = {"kind": "train", **_about_work(work)}
        if isinstance(task, Evaluation):
            about |= {"kind": "evaluate", "splits": list(task.splits), "keep": task.keep, "general": task.general}
        elif not training:
            about["kind"] = "extend"
        assignments = []
        for group in groups:
            done = None if work.done is None else [work.done[row] for row in group]
            message = {**about, "ids": [work.ids[row] for row in group], "done": done}
            assignments.append(Assignment(message, lambda group=group: rows((work.states, work.down.own), group)))
        answers = self._spread(work.down.shared, assignments, forgiving=training)
        if not training:
            back = torch.tensor([row for group in groups for row in group]).argsort()
            return Results(rows(concatenate(answers), back))
        outcomes: list[Any] = [None] * len(work.ids)
        for (row,), answer in zip(groups, answers, strict=True):
            outcomes[row] = answer if isinstance(answer, Exception) else rows(answer, 0)
        return self._gathered(work, outcomes)

    def _rehearse(self, work: Work) -> dict[str, Any] | Exception:
        message = {"kind": "rehearse", **_about_work(work), "ids": [], "done": None}
        tensors = lambda: rows((self.states[work.run].initial, work.down.own), 0)
        (outcome,) = self._spread(work.down.shared, [Assignment(message, tensors)], forgiving=True)
        return outcome

    def _use_tables(self) -> None:
        super()._use_tables()
        self.close()  # those who work next begin with these samples

    def _refine(self, run: int, context: Context, key: Tensor, server: State, cohort: Cohort | None) -> State:
        parts = None if cohort is None else tuple(getattr(cohort, part.name) for part in fields(cohort))
        message = {"kind": "refine", "run": run, "place": _place(context), "key": int(key)}
        return self._spread((), [Assignment(message, lambda: (server, parts))])[0]

    def _score_pieces(self, run: int, models: dict[str, Tensor], full: bool, pieces: list[Piece]) -> list[Any]:
        messages = [{"kind": "piece", "run": run, "full": full, "piece": list(piece)} for piece in pieces]
        return self._spread(models, [Assignment(message, tuple) for message in messages])

    def _full_scores(self, run: int, ids: Sequence[int], models: dict[str, Tensor]) -> Table:
        size, assignments = -(-len(ids) // (4 * self.count)), []
        for first in range(0, len(ids), size):
            group = slice(first, first + size)
            message = {"kind": "full_scores", "run": run, "ids": list(ids[group])}
            assignments.append(Assignment(message, lambda group=group: rows(models, group)))
        return concatenate(self._spread((), assignments))

    def _spread(self, shared: Any, assignments: list[Assignment], forgiving: bool = False) -> list[Any]:
        """Let the workers do all assignments.

        Args:
            shared: tensors that go to every worker.
            assignments: what to do.
            forgiving: return the error of an assignment that failed in place of its result.

        Returns:
            The results, in the order of the assignments.
        """
        self.shared = self.shared or Memory()  # before the workers: they inherit it
        while len(self.workers) < min(self.count, len(assignments)):
            self.workers.append(_Worker(self, self.workers))
        for worker in [each for each in self.workers if not each.process.is_alive()]:
            self._replace(worker)  # it died while it had nothing to do
        note = self.shared.write(shared)
        waiting = [(place, TRIES) for place in range(len(assignments))][::-1]
        results: list[Any] = [None] * len(assignments)
        busy: dict[Connection, tuple[_Worker, int, int]] = {}

        def hand_out(worker: _Worker) -> None:
            while waiting and worker.pipe not in busy:
                place, tries = waiting.pop()
                message, tensors = assignments[place]
                own_note = worker.inbox.write(tensors())
                try:
                    worker.send({**message, "shared": note, "note": own_note})
                    busy[worker.pipe] = (worker, place, tries - 1)
                except OSError:
                    worker = lose(worker, place, tries - 1)

        def lose(worker: _Worker, place: int, tries: int) -> _Worker:
            """Put another worker in the place of a dead one, and its work back, which is done again from the start."""
            if tries:
                waiting.append((place, tries))
            else:
                results[place] = ClientError(f"its worker process died {TRIES} times (out of memory?)")
            return self._replace(worker)

        for worker in list(self.workers):
            hand_out(worker)
        while busy:
            for pipe in wait(list(busy)):
                worker, place, tries = busy.pop(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    answer = worker.receive()
                except (EOFError, OSError):
                    worker = lose(worker, place, tries)
                else:
                    results[place] = self._result(worker, answer)
                if not isinstance(results[place], Problem) and (forgiving or not isinstance(results[place], Exception)):
                    hand_out(worker)
                else:  # the others need not go on
                    waiting.clear()
                    busy.clear()
                    break
        for (message, _), result in zip(assignments, results, strict=True):
            if isinstance(result, Problem) or (not forgiving and isinstance(result, Exception)):
                self.close()
                what = "the server" if message["kind"] == "refine" else "scoring"
                raise self._told(message["run"], result, message.get("ids", []), what)
        return results

    def _result(self, worker: _Worker, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            own = lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf  # a server keeps plain numbers, too
            return tree_map(own, worker.outbox.read(answer))
        error = (Problem if answer["problem"] else ClientError)(answer["error"])
        error.add_note(answer["trace"])  # for --debug
        return error

    def _replace(self, dead: _Worker) -> _Worker:
        place = self.workers.index(dead)
        dead.close()
        self.workers[place] = _Worker(self, [worker for worker in self.workers if worker is not dead])
        return self.workers[place]

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.close()
        if self.shared is not None:
            self.shared.close()
        self.workers, self.shared = [], None

    # ------------------------------------------------------------------ in a worker

    def answer(self, message: dict[str, Any], shared: Any, tensors: Any) -> Any:
        """Return what a worker makes of an assignment.

        Args:
            message: what to do.
            shared: the tensors that every worker got.
            tensors: those that came with the message.
        """
        kind, run = message["kind"], message["run"]
        if kind == "piece":
            return self._scorer(run).piece(shared, message["full"], Piece(*message["piece"]))
        if kind == "full_scores":
            return self._scorer(run).full_scores(message["ids"], tensors)
        if kind == "refine":
            server, parts = tensors
            context = replace(self.jobs[run].method.context, **message["place"])
            cohort = None if parts is None else Cohort(*parts)
            return super()._refine(run, context, torch.tensor(message["key"]), server, cohort)
        job, done = self.jobs[run], message["done"]
        method = job.at(**message["place"])
        task: Any = Training(method, job.wire, message["counted"])
        if kind == "extend":
            task = Extending(method)
        elif kind == "evaluate":
            task = Evaluation(method, tuple(message["splits"]), message["keep"], message["general"])
        key, ids = torch.tensor(message["key"]), message["ids"]
        work = Work(run, task, key, ids, (), Down(), steps=message["steps"])
        if kind == "rehearse":
            state, own = tensors
            outcome = self._specimen(work, state, own, shared)
            if isinstance(outcome, Exception):
                raise RuntimeError(str(outcome))  # also where it is a Problem: that of a specimen is nobody's
            return outcome
        outcomes = []
        for row, id in enumerate(work.ids):
            state, own = rows(tensors, row)
            outcome = self._attempt(work, id, state, Down(shared, own), None if done is None else done[row])
            if isinstance(outcome, Exception):
                raise outcome
            outcomes.append(outcome)
        return stack(outcomes)


def _serve(
    engine: Workers, parent: int, pipe: Connection, parents: list[Connection], inbox: Memory, outbox: Memory
) -> None:
    """Do one assignment after another in a worker process, until the parent is gone."""
    if sys.platform == "linux":  # also in the middle of a client's training
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone already
        return
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
            result = engine.answer(message, shared.read(message["shared"]), inbox.read(message["note"]))
            answer = outbox.write(result)
        except Exception as error:
            answer = _about(error)
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except BrokenPipeError:
            return


def _about_work(work: Work) -> dict[str, Any]:
    """Return for JSON which run a piece of work is of, and where in it."""
    counted = isinstance(work.task, Training) and work.task.counted
    return {
        "run": work.run,
        "key": int(work.key),
        "place": _place(work.context),
        "steps": work.steps,
        "counted": counted,
    }


def _place(context: Context) -> dict[str, Any]:
    """Return for JSON what differs from place to place in a run; all else a worker knows."""
    return {name: getattr(context, name) for name in ("round", "exchange", "phase")}


def _about(error: Exception) -> dict[str, Any]:
    """Return for JSON what an assignment failed with."""
    if "fork-based multiprocessing" in str(error):
        error = Problem(
            "where there is a GPU, 'workers' cannot start once this process has trained: use another engine"
        )
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, Problem):
        return {"error": str(error), "trace": trace, "problem": True}
    return {"error": reason_of(error), "trace": trace, "problem": False}
