"""What an engine is: it carries out one exchange, or one evaluation, for a list of clients.

Every engine computes the same function; `sequential` is the reference that the others must equal. An engine holds the
data and the method and nothing of a run's state: states and messages go in, states and messages come out. States, like
messages, are stacked: one tree of tensors, one row per client asked for (a method without states has the empty tree).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from perfed.core.clients import Clients
from perfed.core.data import Data
from perfed.core.messages import Down, Up
from perfed.core.method import Method, State
from perfed.core.random import PERSONALISE, TRAIN, WIRE, derive
from perfed.wire import Transform, identity


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


class Engine(ABC):
    """How a round is carried out."""

    name: ClassVar[str]

    def __init__(self, method: Method, clients: Clients, *, seed: int = 0, wire: Transform = identity):
        self.method = method if method.population else replace(method, population=len(clients))
        self.clients, self.seed, self.wire = clients, seed, wire

    def train(self, round: int, exchange: int, ids: Sequence[int], states: State, down: Down) -> tuple[State, Uploads]:
        """One exchange: every client's `local`, with its row of `states` and of `down.own`; returns the new rows."""
        out = self._each(_Training(self.method, self.wire), self.key(TRAIN, round, exchange), ids, states, down)
        return out["state"], Uploads(out["mean"], out["own"], out["weight"], out.get("group"))

    def evaluate(self, round: int, ids: Sequence[int], states: State, down: Down, keep: bool = False) -> Scores:
        """Every client's model(s), and their scores on the client's own validation and test samples."""
        splits = tuple(name for name in ("val", "test") if len(self.clients.split(name).y))
        out = self._each(_Evaluation(self.method, splits, keep), self.key(PERSONALISE, round), ids, states, down)
        return Scores(out["models"], out["values"])

    def key(self, *parts: int) -> Tensor:
        """The key of a purpose and a round, from which each client derives its own."""
        return derive(self.seed, *parts).to(self.method.model.device)

    @abstractmethod
    def _each(self, task: Task, key: Tensor, ids: Sequence[int], states: State, down: Down) -> dict[str, Any]:
        """Stacked results of `task(state, down, data, key)` for each client, with its rows of states and down.own."""

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Give back what the engine holds."""


Task = Callable[[State, Down, Data, Tensor], dict[str, Any]]


class _Training(NamedTuple):
    method: Method
    wire: Transform

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:
        state, up = self.method.local(state, down, data)
        if not isinstance(up, Up):
            raise TypeError(f"local must return (state, Up), not (state, {type(up).__name__})")
        up = self.wire(up, derive(key, WIRE))
        weight = data.size if up.weight is None else torch.as_tensor(up.weight, device=data.size.device)
        out = {"state": state, "mean": up.mean, "own": up.own, "weight": weight.double()}
        return out if up.group is None else {**out, "group": up.group}


class _Evaluation(NamedTuple):
    method: Method
    splits: tuple[str, ...]
    keep: bool

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:  # noqa: ARG002
        models = self.method.models(state, down, data)
        values = {split: data.mean(self.method.score, models, split) for split in self.splits}
        return {"models": models if self.keep else {}, "values": values}
