"""The door between a federation and whoever carries its rounds out.

An engine holds the clients' data, their private states, and the client half of what happens to an upload. It serves one
or more runs: a run's federation sends a request and gets a reply. Every engine computes the same function;
`sequential` is the reference that the others must equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from perfed.accel.fast_model import FastModel
from perfed.core.clients import SPLITS, Clients
from perfed.core.data import CHUNK, Data
from perfed.core.errors import Problem
from perfed.core.messages import Down, Up, Uploads
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import PERSONALISE, TRAIN, WIRE, derive
from perfed.core.tree import integers, leaves, rows, send, tree_map
from perfed.engines.client_states import States
from perfed.engines.f1_auc import full_scores
from perfed.engines.scores import Scores
from perfed.engines.trees import first_not_finite
from perfed.wire.base import Transform
from perfed.wire.identity import Identity

ON_GPU = 1 << 14  # samples that a model is given at once
ROWS_SAVED = 64  # clients' states that are in memory at a time when they are saved
AT_ONCE = 1 << 26  # numbers that a sum on a GPU holds in float64 at a time


@dataclass(frozen=True)
class Job:
    """One run as an engine sees it: a method and the clients that train with it."""

    method: Method
    clients: Clients
    seed: int = 0
    wire: Transform = Identity()  # noqa: RUF009 (it has no state)
    folder: Path | None = None  # where clients' states are written that memory has no room for


@dataclass(frozen=True)
class ClientInfo:
    """All that is known of the clients outside an engine."""

    names: tuple[str, ...]
    sizes: dict[str, tuple[int, ...]]  # split -> samples of each client
    classes: int

    @classmethod
    def of(cls, clients: Clients) -> ClientInfo:
        """Return what may be known of these clients."""
        return cls(clients.names, {split: clients.split(split).size for split in SPLITS}, clients.classes)

    def __len__(self) -> int:
        return len(self.names)


class Request(NamedTuple):
    """What a run asks of some of its clients in one exchange."""

    run: int  # which of the engine's runs
    round: int
    exchange: int
    ids: Sequence[int]  # ascending
    down: Down  # what they receive; `own` has a row for each
    done: Sequence[int] | None = None  # epochs that each of them finishes, where there are stragglers


class Failure(NamedTuple):
    """A client whose work is lost."""

    id: int
    reason: str
    tensor: str = ""  # where the reason lies in one tensor


@dataclass(frozen=True)
class Reply:
    """What an exchange gave."""

    ids: Sequence[int]  # of the clients that delivered something
    uploads: Uploads  # theirs
    spoiled: Tensor  # [m]: the place in `tensors` of a client's first state tensor that is not finite; -1: none
    tensors: list[str]  # names of the tensors of a client's state
    failures: list[Failure]  # of the clients that delivered nothing
    settle: Callable[[Tensor | list[int] | None], None]
    """Keep the new states of the clients whose uploads are used; the states of all others stay as before.

    It takes rows that are used (a list), or a mask on the device, which nobody has to wait for; None means all.
    """


class EvaluationRequest(NamedTuple):
    """What a run wants to know of the models of some of its clients."""

    run: int
    round: int
    ids: Sequence[int]
    down: Down
    keep: bool = False  # return the models, too
    full: bool = False  # also macro-F1 and AUC, for which the samples pass through the models once more
    score: bool = True


class EvaluationReply(NamedTuple):
    """What an evaluation gave."""

    models: dict[str, Tensor]  # name -> [m, width], or [1, width] where all clients share one; empty unless kept
    scores: Scores


Task = Callable[[State, Down, Data, Tensor], dict[str, Any]]


class Training(NamedTuple):
    """A client's part in an exchange."""

    method: Method
    wire: Transform

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:
        state, up = self.method.local(state, down, data)
        if not isinstance(up, Up):
            raise TypeError(f"local must return (state, Up), not (state, {type(up).__name__})")
        if not isinstance(self.wire, Identity):
            up = self.wire.client(up, derive(key, WIRE))
        weight = data.size if up.weight is None else torch.as_tensor(up.weight, device=data.size.device)
        out = {"state": state, "mean": up.mean, "own": up.own, "weight": weight.double()}
        return out if up.group is None else {**out, "group": up.group}


class Evaluation(NamedTuple):
    """A client's models and what they score on the client's own samples."""

    method: Method
    splits: tuple[str, ...]
    keep: bool

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:  # noqa: ARG002
        models = self.method.models(state, down, data)
        tables = {split: data.mean(self.method.score, models, split) for split in self.splits}
        scores = {model: {split: table[model] for split, table in tables.items()} for model in models}
        return {"models": models if self.keep else {}, "scores": scores}


@dataclass(frozen=True)
class Work:
    """A task for some clients of one run, with everything that it reads but their samples."""

    run: int
    task: Any
    key: Tensor  # of the purpose and the round; each client derives its own
    ids: Sequence[int]
    states: State  # a row for each
    down: Down
    done: Sequence[int] | None = None


@dataclass(frozen=True)
class Results:
    """What became of a piece of work."""

    out: dict[str, Any]  # stacked: a row for each client that came to an end
    rows: list[int] | None = None  # these clients' places in the work; None: all of them
    failures: tuple[Failure, ...] = ()


def shares_one_model(method: Method, down: Down) -> bool:
    """Return True if all clients predict with the model that `down` holds, so that it can be scored at once."""
    return method.one_for_all and not leaves(down.own)


class Engine(ABC):
    """Whoever carries out exchanges and evaluations, for one or more runs that are alike but for seed and rate."""

    name: ClassVar[str]
    kernels = False  # whether a method's model uses kernels for whole cohorts

    def __init__(self, *jobs: Job, train_scores: bool = False, memory: Sequence[int | None] = (None,)):
        """Make an engine.

        Args:
            jobs: the runs that it serves; requests name them by their place here.
            train_scores: score the training samples in evaluations, too.
            memory: bytes of clients' states that are kept on the device, then in the host's memory; None: no limit.
        """
        self.jobs = [self._prepared(job) for job in jobs]
        self.train_scores = train_scores
        self.states = [
            States(job.method.init_client(), job.method.model.device, memory, job.folder) for job in self.jobs
        ]

    def _prepared(self, job: Job) -> Job:
        """Return the job with a model that makes use of the machine."""
        model = FastModel.of(job.method.model, kernels=self.kernels)
        population = job.method.population or len(job.clients)
        return replace(job, method=replace(job.method, model=model, population=population))

    @property
    def method(self) -> Method:
        """The first run's method."""
        return self.jobs[0].method

    @cached_property
    def infos(self) -> list[ClientInfo]:
        """What federations may know of each run's clients."""
        return [ClientInfo.of(job.clients) for job in self.jobs]

    # ------------------------------------------------------------------ the door

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        """Let clients train: each one's `local`, then the client half of what happens to uploads.

        Args:
            requests: at most one for each run.

        Returns:
            A reply to each request. The clients' new states count once `settle` of the reply is called.
        """
        works = []
        for run, round, exchange, ids, down, done in requests:
            job = self.jobs[run]
            task = Training(job.method, job.wire)
            works.append(
                Work(run, task, self._key(run, TRAIN, round, exchange), ids, self.states[run].take(ids), down, done)
            )
        return [self._reply(work, results) for work, results in zip(works, self._each(works), strict=True)]

    def _reply(self, work: Work, results: Results) -> Reply:
        out, kept = results.out, results.rows
        ids = work.ids if kept is None else [work.ids[row] for row in kept]
        new, table = out["state"], self.states[work.run]
        old = work.states if kept is None else rows(work.states, kept)
        places = send(torch.tensor(ids, dtype=torch.int64), self.method.model.device)

        def settle(used: Tensor | list[int] | None) -> None:
            if isinstance(used, Tensor):
                mask = lambda tensor: used.view(-1, *(1,) * (tensor.dim() - 1))
                table.put(ids, tree_map(lambda after, before: torch.where(mask(after), after, before), new, old))
            elif used is None:
                table.put(ids, new)
            elif used:
                table.put([ids[row] for row in used], rows(new, used))

        spoiled, tensors = first_not_finite(new, len(ids), places.device, "state")
        uploads = Uploads(places, out["mean"], out["own"], out["weight"], out.get("group"))
        return Reply(ids, uploads, spoiled, tensors, list(results.failures), settle)

    def evaluate(self, requests: Sequence[EvaluationRequest]) -> list[EvaluationReply]:
        """Let clients predict: each one's models, and their scores on its own samples.

        Args:
            requests: at most one for each run.

        Returns:
            A reply to each request, its numbers still on the device.
        """
        replies: dict[int, EvaluationReply] = {}
        works: dict[int, Work] = {}
        for place, request in enumerate(requests):
            run, round, ids, down, keep, full, score = request
            method, one = self.jobs[run].method, shares_one_model(self.jobs[run].method, request.down)
            asked = ids[:1] if one else ids
            splits = () if one or not score else self.splits(run)
            task = Evaluation(method, splits, keep or one or (full and method.usual))
            states = self.states[run].take(asked)
            works[place] = Work(run, task, self._key(run, PERSONALISE, round), asked, states, down)
        for (place, work), results in zip(works.items(), self._each(list(works.values())), strict=True):
            replies[place] = self._evaluated(requests[place], work, results.out)
        return [replies[place] for place in range(len(requests))]

    def _evaluated(self, request: EvaluationRequest, work: Work, out: dict[str, Any]) -> EvaluationReply:
        run, models, tables = request.run, out["models"], out["scores"]
        full = request.full and request.score and work.task.method.usual
        if shares_one_model(work.task.method, request.down):
            shared = {name: theta[0] for name, theta in models.items()}
            tables = self._score_shared(run, shared, full) if request.score else {}
        elif full:
            tables = joined(tables, self._full_scores(run, request.ids, models))
        return EvaluationReply(models if request.keep else {}, Scores.of(tables))

    def save(self, run: int) -> tuple[list[int], Iterator[bytes]]:
        """Return the clients of a run that have a state, and their states as bytes, some rows at a time."""
        ids = list(self.states[run])
        return ids, self.states[run].pieces(ids, ROWS_SAVED)

    def restore(self, run: int, ids: Sequence[int], read: Callable[[int], bytes]) -> None:
        """Replace all clients' states of a run by what `save` returned.

        Args:
            run: which run.
            ids: the clients that have a state.
            read: returns the next so many bytes of their states, fewer at the end of a damaged file.
        """
        states = self.states[run]
        states.clear()
        for first in range(0, len(ids), ROWS_SAVED):
            clients = ids[first : first + ROWS_SAVED]
            piece = bytearray(read(len(clients) * states.width))
            if len(piece) == len(clients) * states.width:
                states.load(clients, torch.frombuffer(piece, dtype=torch.uint8).view(len(clients), -1))

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Give back what the engine holds."""

    def weighted_sum(self, share: Tensor, stacked: Tensor) -> Tensor:
        """Return share.T @ stacked in float64: [groups, ...] of rows [m, ...] with weights [m, groups].

        On a CPU one client is added after another, so the sum does not depend on how a library orders it.
        """
        if stacked.is_cuda:
            flat = stacked[:, None].flatten(1)
            parts = [share.T @ piece.double() for piece in flat.split(max(1, AT_ONCE // len(flat)), 1)]
            return torch.cat(parts, 1).view(-1, *stacked.shape[1:])
        out = torch.zeros(share.shape[1], *stacked.shape[1:], dtype=torch.float64, device=stacked.device)
        for weight, row in zip(share, stacked, strict=True):
            out += weight.view(-1, *(1,) * row.dim()) * row.double()
        return out

    # ------------------------------------------------------------------ what an engine is made of

    @abstractmethod
    def _each(self, works: Sequence[Work]) -> list[Results]:
        """Return stacked results of `task(state, down, data, key)` for each client of each piece of work."""

    def _key(self, run: int, *parts: int) -> Tensor:
        """Return the key of a purpose and a round, from which each client derives its own."""
        return send(derive(self.jobs[run].seed, *parts), self.method.model.device)

    # ------------------------------------------------------------------ scores

    def splits(self, run: int) -> tuple[str, ...]:
        """Return the splits that an evaluation looks at."""
        names = SPLITS if self.train_scores else SPLITS[1:]
        return tuple(name for name in names if len(self.jobs[run].clients.split(name).y))

    def _full_scores(self, run: int, ids: Sequence[int], models: dict[str, Tensor]) -> dict[str, Any]:
        """Return macro-F1 and AUC of every client's models, `models` holding a row for each client."""
        clients = self.jobs[run].clients
        tables: dict[str, Any] = {name: {} for name in models}
        for split in self.splits(run):
            source = clients.split(split)
            ranges = [(source.start[id], source.start[id] + source.size[id]) for id in ids]
            y = torch.cat([source.y[first:last] for first, last in ranges])
            for name, thetas in models.items():
                pairs = zip(thetas, ranges, strict=True)
                outputs = [out for theta, span in pairs for out in self._outputs(run, theta, split, *span)]
                whole = torch.cat(outputs) if outputs else thetas.new_zeros(0, 1)  # nobody here has samples
                tables[name][split] = full_scores(whole, y, [last - first for first, last in ranges])
        return tables

    def _outputs(self, run: int, theta: Tensor, split: str, first: int, last: int) -> list[Tensor]:
        """Return a model's outputs for these rows of a split, in pieces."""
        clients, model = self.jobs[run].clients, self.jobs[run].method.model
        x, step = clients.split(split).x, self._samples_at_once
        pieces = [x[begin : min(begin + step, last)] for begin in range(first, last, step)]
        return [model.apply(theta, clients.ready(piece, model.dtype))[0] for piece in pieces]

    def _score_shared(self, run: int, models: dict[str, Tensor], full: bool) -> dict[str, Any]:
        """Score models that all clients share: samples in large pieces, then means for each client."""
        tables: dict[str, Any] = {name: {} for name in models}
        pieces = self._pieces(run)
        for (split, _, _), scores in zip(pieces, self._score_pieces(run, models, full, pieces), strict=True):
            for name, table in scores.items():
                tables[name].setdefault(split, []).append(table)
        put_together = lambda tables: tree_map(lambda *parts: torch.cat(parts), *tables)
        return {name: {split: put_together(parts) for split, parts in each.items()} for name, each in tables.items()}

    def _score_pieces(self, run: int, models: dict[str, Tensor], full: bool, pieces: list[Any]) -> list[Any]:
        return [self._score_piece(run, models, full, *piece) for piece in pieces]

    def _score_piece(
        self, run: int, models: dict[str, Tensor], full: bool, split: str, first: int, last: int
    ) -> dict[str, dict[str, Tensor]]:
        """Score the clients from `first` to before `last`, whose samples lie side by side."""
        clients, method = self.jobs[run].clients, self.jobs[run].method
        source, step = clients.split(split), self._samples_at_once
        begin, size = source.start[first], source.size[first:last]
        end, key = begin + sum(size), self._key(run)
        parts = [slice(start, min(start + step, end)) for start in range(begin, end, step)]
        ready = lambda part: clients.ready(source.x[part], method.model.dtype)
        each = [self._rate(method, Batch(ready(part), source.y[part], None, key), models) for part in parts]
        count = integers(size, source.y.device)

        def mean(*pieces: Tensor) -> Tensor:
            total = torch.segment_reduce(torch.cat(pieces).double(), "sum", lengths=count, unsafe=True)
            return (total / count).to(pieces[0].dtype)  # NaN for a client without samples

        scores = tree_map(mean, *each)
        if not full:
            return scores
        outputs = {name: torch.cat(self._outputs(run, theta, split, begin, end)) for name, theta in models.items()}
        return joined(scores, {name: full_scores(out, source.y[begin:end], size) for name, out in outputs.items()})

    def _rate(self, method: Method, batch: Batch, models: dict[str, Tensor]) -> Any:
        return method.rate(batch, models)

    @cached_property
    def _samples_at_once(self) -> int:
        return ON_GPU if self.jobs[0].clients.train.y.is_cuda else CHUNK

    def _pieces(self, run: int) -> list[tuple[str, int, int]]:
        """Return (split, first client, last client + 1) of neighbours who together have enough samples."""
        clients = self.jobs[run].clients
        enough, pieces = ON_GPU if clients.train.y.is_cuda else 8 * CHUNK, []
        for split in self.splits(run):
            first, samples = 0, 0
            for id, size in enumerate(clients.split(split).size):
                samples += size
                if samples >= enough:
                    pieces.append((split, first, id + 1))
                    first, samples = id + 1, 0
            if samples:
                pieces.append((split, first, len(clients)))
            elif first < len(clients):  # the last ones have no samples: they go with those before them
                pieces[-1] = (split, pieces[-1][1], len(clients))
        return pieces


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two dicts of dicts, down to what they hold."""
    both = lambda a, b: joined(a, b) if isinstance(a, dict) else b
    return first | {key: both(first[key], value) if key in first else value for key, value in second.items()}


def all_failed(errors: dict[int, Exception]) -> Exception:
    """Return what to raise where every client failed: an error that hits all is the method's own."""
    error = next(iter(errors.values()))
    return error if isinstance(error, Problem | RuntimeError | TypeError) else RuntimeError(str(error))
