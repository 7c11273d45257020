"""What an engine is: it carries out one exchange, or one evaluation, for a list of clients.

Every engine computes the same function; `sequential` is the reference that the others must equal. An engine holds the
data and the method and nothing of a run's state: states and messages go in, states and messages come out. States, like
messages, are stacked: one tree of tensors, one row per client asked for (a method without states has the empty tree).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from perfed.core.clients import Clients
from perfed.core.data import CHUNK, Data
from perfed.core.messages import Down, Up
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import PERSONALISE, TRAIN, WIRE, derive
from perfed.core.tree import integers, send, tree_map
from perfed.engines.f1_auc import full_scores
from perfed.wire import Transform, identity

_ON_GPU = 1 << 14  # samples that a model is given at once


class Asked(NamedTuple):
    """Clients that are asked for something."""

    ids: Sequence[int]
    states: State  # theirs, a row for each
    down: Down  # what they receive; `own` has a row for each
    done: Sequence[int] | None = None  # epochs that each of them finishes, where there are stragglers


class Uploads(NamedTuple):
    """Rows of uploads, in the order of the clients asked for."""

    mean: Any
    own: Any
    weight: Tensor  # [m]
    group: Tensor | None  # [m]


Values = dict[str, dict[str, dict[str, Tensor]]]  # split -> model -> metric -> [m]


class Scores(NamedTuple):
    """What an evaluation found, one row per client."""

    models: dict[str, Tensor]  # name -> [m, width]; empty unless asked for
    values: Values


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two dicts of dicts as one, down to what they hold."""
    both = lambda a, b: joined(a, b) if isinstance(a, dict) else b
    return one | {key: both(one[key], value) if key in one else value for key, value in other.items()}


def uploads(out: dict[str, Any]) -> tuple[State, Uploads]:
    """What an exchange gave, from the results of its task."""
    return out["state"], Uploads(out["mean"], out["own"], out["weight"], out.get("group"))


class Engine(ABC):
    """How a round is carried out."""

    name: ClassVar[str]

    def __init__(
        self,
        method: Method,
        clients: Clients,
        *,
        seed: int = 0,
        wire: Transform = identity,
        train_scores: bool = False,  # evaluations look at the training samples, too
    ):
        self.method = method if method.population else replace(method, population=len(clients))
        self.clients, self.seed, self.wire, self.train_scores = clients, seed, wire, train_scores

    def train(self, round: int, exchange: int, asked: Asked) -> tuple[State, Uploads]:
        """One exchange: every client's `local`; returns the new rows of states, and what they send."""
        return uploads(self._each(Training(self.method, self.wire), self.key(TRAIN, round, exchange), asked))

    def evaluate(self, round: int, asked: Asked, keep: bool = False, full: bool = False) -> Scores:
        """Every client's model(s), and their scores on the client's own validation and test samples.

        `full`: also macro-F1 and AUC, for which the samples pass through the models once more.
        """
        full = full and self.method.usual
        task = Evaluation(self.method, self.splits, keep or full)
        return self.scored(self._each(task, self.key(PERSONALISE, round), asked), asked.ids, keep, full)

    def scored(self, out: dict[str, Any], ids: Sequence[int], keep: bool, full: bool) -> Scores:
        """What an evaluation found, from the results of its task."""
        values = joined(out["values"], self.judge(ids, out["models"])) if full else out["values"]
        return Scores(out["models"] if keep else {}, values)

    def judge(self, ids: Sequence[int], models: dict[str, Tensor]) -> Values:
        """Macro-F1 and AUC of every client's model(s), `models` holding a row for each."""
        found: Values = {}
        for split in self.splits:
            source = self.clients.split(split)
            at = [(source.start[id], source.start[id] + source.size[id]) for id in ids]
            y = torch.cat([source.y[first:last] for first, last in at])
            found[split] = {}
            for name, rows in models.items():
                out = [o for theta, where in zip(rows, at, strict=True) for o in self._outputs(theta, split, *where)]
                whole = torch.cat(out) if out else rows.new_zeros(0, 1)  # nobody here has samples
                found[split][name] = full_scores(whole, y, [last - first for first, last in at])
        return found

    def _outputs(self, theta: Tensor, split: str, first: int, last: int) -> list[Tensor]:
        """What a model says of these rows of a split, in pieces."""
        x, model = self.clients.split(split).x, self.method.model
        some = [x[at : min(at + self._step, last)] for at in range(first, last, self._step)]
        return [model.apply(theta, self.clients.ready(rows, model.dtype))[0] for rows in some]

    def models(self, round: int, asked: Asked) -> dict[str, Tensor]:
        """Every client's model(s), not scored."""
        return self._each(Evaluation(self.method, (), True), self.key(PERSONALISE, round), asked)["models"]

    def score_all(self, models: dict[str, Tensor], full: bool = False) -> Values:
        """Scores of models that all clients share: their samples in large pieces, then means for each client."""
        found: dict[str, list[Any]] = {split: [] for split in self.splits}
        for piece, values in zip(self._pieces, self._score(models, full), strict=True):
            found[piece[0]].append(values)
        return {split: tree_map(lambda *t: torch.cat(t), *values) for split, values in found.items()}

    def _score(self, models: dict[str, Tensor], full: bool) -> list[Any]:
        """The scores of every piece."""
        return [self.score_piece(models, full, *piece) for piece in self._pieces]

    def score_piece(
        self, models: dict[str, Tensor], full: bool, split: str, first: int, last: int
    ) -> dict[str, dict[str, Tensor]]:
        """Scores of the clients from `first` to before `last`, whose samples lie side by side."""
        source, step = self.clients.split(split), self._step
        begin, size = source.start[first], source.size[first:last]
        some = [slice(at, min(at + step, begin + sum(size))) for at in range(begin, begin + sum(size), step)]
        key, ready = self.key(), lambda rows: self.clients.ready(source.x[rows], self.method.model.dtype)
        each = [self._rate(Batch(ready(r), source.y[r], None, key), models) for r in some]
        count = integers(size, source.y.device)

        def mean(*parts: Tensor) -> Tensor:
            total = torch.segment_reduce(torch.cat(parts).double(), "sum", lengths=count, unsafe=True)
            return (total / count).to(parts[0].dtype)  # NaN for a client without samples

        found = tree_map(mean, *each)
        if not full:
            return found
        end = begin + sum(size)
        out = {name: torch.cat(self._outputs(theta, split, begin, end)) for name, theta in models.items()}
        return joined(found, {name: full_scores(one, source.y[begin:end], size) for name, one in out.items()})

    @property
    def _step(self) -> int:
        """Samples that a model is given at once."""
        return _ON_GPU if self.clients.train.y.is_cuda else CHUNK

    def _rate(self, batch: Batch, models: dict[str, Tensor]) -> Any:
        return self.method.rate(batch, models)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """What is evaluated."""
        names = ("train", "val", "test") if self.train_scores else ("val", "test")
        return tuple(name for name in names if len(self.clients.split(name).y))

    @cached_property
    def _pieces(self) -> list[tuple[str, int, int]]:
        """(split, first client, last client + 1) of neighbours who together have enough samples, and one at least."""
        enough, pieces = _ON_GPU if self.clients.train.y.is_cuda else 8 * CHUNK, []
        for split in self.splits:
            first, held = 0, 0
            for id, size in enumerate(self.clients.split(split).size):
                held += size
                if held >= enough:
                    pieces.append((split, first, id + 1))
                    first, held = id + 1, 0
            if held:
                pieces.append((split, first, len(self.clients)))
            elif first < len(self.clients):  # the last ones have no samples: they go with those before them
                pieces[-1] = (split, pieces[-1][1], len(self.clients))
        return pieces

    def key(self, *parts: int) -> Tensor:
        """The key of a purpose and a round, from which each client derives its own."""
        return send(derive(self.seed, *parts), self.method.model.device)

    @abstractmethod
    def _each(self, task: Task, key: Tensor, asked: Asked) -> dict[str, Any]:
        """Stacked results of `task(state, down, data, key)` for each client, with its rows of states and down.own."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Give back what the engine holds."""


Task = Callable[[State, Down, Data, Tensor], dict[str, Any]]


class Training(NamedTuple):
    """A client's part in an exchange."""

    method: Method
    wire: Transform

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:
        state, up = self.method.local(state, down, data)
        if not isinstance(up, Up):
            raise TypeError(f"local must return (state, Up), not (state, {type(up).__name__})")
        if self.wire is not identity:
            up = self.wire(up, derive(key, WIRE))
        weight = data.size if up.weight is None else torch.as_tensor(up.weight, device=data.size.device)
        out = {"state": state, "mean": up.mean, "own": up.own, "weight": weight.double()}
        return out if up.group is None else {**out, "group": up.group}


class Evaluation(NamedTuple):
    """A client's model(s) and what they score."""

    method: Method
    splits: tuple[str, ...]
    keep: bool

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:  # noqa: ARG002
        models = self.method.models(state, down, data)
        values = {split: data.mean(self.method.score, models, split) for split in self.splits}
        return {"models": models if self.keep else {}, "values": values}
