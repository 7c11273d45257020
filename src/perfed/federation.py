"""The state of one method's training, and one round of it. No files, no clocks, no printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.messages import count_bytes, reduce
from perfed.core.method import Method, State
from perfed.core.random import COHORT, derive, shuffle
from perfed.core.tree import leaves, rows, stack, tree_map
from perfed.engines.base import Engine, Values

EVALUATED_AT_ONCE = 64  # clients per piece of an evaluation, so that memory does not grow with all clients


@dataclass
class Traffic:
    """Bytes sent so far, by direction and compartment; counters and single weights are not counted."""

    down_shared: int = 0
    down_own: int = 0
    up_mean: int = 0
    up_own: int = 0
    extra: dict[str, int] = field(default_factory=dict)  # between servers; in neither `down` nor `up`

    @property
    def down(self) -> int:
        return self.down_shared + self.down_own

    @property
    def up(self) -> int:
        return self.up_mean + self.up_own


def cohort_size(clients: int, participation: float) -> int:
    """Clients per round: the whole part of the share, at least one."""
    return max(1, int(clients * participation + 1e-9))


@dataclass
class Federation:
    """One method, its server's state and every client's private state."""

    engine: Engine
    server: State = None
    states: dict[int, State] = field(default_factory=dict)  # only of clients that have taken part
    round: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        if self.server is None:
            self.server = self.method.init_server(len(self.clients))

    @property
    def method(self) -> Method:
        return self.engine.method

    @property
    def clients(self) -> Clients:
        return self.engine.clients

    def sample(self) -> list[int]:
        """The next round's cohort: a function of seed and round alone, the same for every method."""
        count = len(self.clients)
        key = derive(self.engine.seed, COHORT, self.round + 1)
        order = shuffle(key[None], torch.tensor([count]), count)[0]
        return sorted(order[: self.method.cohort or count].tolist())

    def step(self, cohort: Iterable[int] | None = None) -> list[int]:
        """One round; returns who took part."""
        ids = self.method.select(self.server, self.sample() if cohort is None else sorted(cohort))
        rows_of = torch.tensor(ids, device=self.method.model.device)
        for exchange in range(self.method.exchanges):
            down = self.method.broadcast(self.server, rows_of)
            before = stack([self.state(id) for id in ids])
            after, up = self.engine.train(self.round + 1, exchange, ids, before, down)
            self._refuse_divergence(ids, (after, up.mean, up.own))
            if not bool((up.weight.isfinite() & (up.weight >= 0)).all()):
                raise Problem(f"{type(self.method).__name__} gave an upload a weight that is negative or not finite")
            self._count(len(ids), down, up)
            self.server = self.method.aggregate(
                self.server, reduce(rows_of, up.mean, up.own, up.weight, up.group, self.method.groups)
            )
            # Clones: a row of a block would keep the whole block alive.
            self.states.update((id, tree_map(torch.clone, rows(after, row))) for row, id in enumerate(ids))
        for name, numbers in self.method.extra_traffic(self.server).items():
            sent = numbers * self.method.model.dtype.itemsize
            self.traffic.extra[name] = self.traffic.extra.get(name, 0) + sent
        self.round += 1
        return ids

    def state(self, id: int) -> State:
        """A client's private state; that of a client that never took part is the initial one."""
        return self.states[id] if id in self.states else self.method.init_client()

    def evaluate(self, save: Callable[[int, dict[str, Tensor]], None] | None = None) -> Values:
        """Scores of every client's model(s) on its own samples; `save(client, models)` gets each client's models."""
        pieces = []
        for first in range(0, len(self.clients), EVALUATED_AT_ONCE):
            ids = list(range(len(self.clients)))[first : first + EVALUATED_AT_ONCE]
            down = self.method.show(self.server, torch.tensor(ids, device=self.method.model.device))
            states = stack([self.state(id) for id in ids])
            found = self.engine.evaluate(self.round, ids, states, down, keep=save is not None)
            if save is not None:
                for row, id in enumerate(ids):
                    save(id, rows(found.models, row))
            pieces.append(tree_map(torch.Tensor.cpu, found.values))
        return tree_map(lambda *t: torch.cat(t), *pieces)

    def _count(self, receivers: int, down: Any, up: Any) -> None:
        model = self.method.model
        size = lambda tree: count_bytes([tree], model.width, model.size)
        self.traffic.down_shared += size(down.shared) * receivers
        self.traffic.down_own += size(down.own)
        self.traffic.up_mean += size(up.mean)
        self.traffic.up_own += size(up.own)

    def _refuse_divergence(self, ids: list[int], stacked: tuple[State, Any, Any]) -> None:
        """Stop at the first number that is not finite: averaged once, it is in every model."""
        for row, id in enumerate(ids):
            if not all(map(_finite, leaves(rows(stacked, row)))):
                raise Problem(
                    f"training diverged: client '{self.clients.names[id]}' has numbers that are not finite in round "
                    f"{self.round + 1} of {type(self.method).__name__}; a smaller lr (now {self.method.lr:g}) helps"
                )


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
