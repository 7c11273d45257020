"""The state of one method's training, and one round of it. No files, no clocks, no printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.messages import Up, count_bytes, reduce
from perfed.core.method import Method, State
from perfed.core.random import COHORT, choose, derive
from perfed.core.tree import leaves, rows, send, tree_map
from perfed.engines.base import Asked, Engine, Scores, Uploads, Values
from perfed.engines.client_states import States
from perfed.engines.vectorised import Together
from perfed.federation.faults import Answers, Faults

DIVERGED, BAD_WEIGHT = 0, 1  # what can be wrong with an upload
EVALUATED_AT_ONCE = 64  # clients per piece of an evaluation, so that memory does not grow with all clients
ON_A_GPU = 256  # the same where a piece is one computation


class Diverged(Problem):
    """Training came to numbers that are not finite."""

    def __init__(self, text: str, runs: dict[Any, str] | None = None):
        super().__init__(text)
        self.runs = runs or {}  # of several runs, those that diverged, each with its own text


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
    states: States = None  # pyright: ignore[reportAssignmentType]  # made below where none is given
    round: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        device = self.method.model.device
        if self.server is None:
            self.server = self.method.init_server(len(self.clients))
        if self.states is None:
            self.states = States(self.method.init_client(), device)
        self.answers = Answers([], [])  # of the round that is going on, or of the last one
        # The first upload that was not usable: (what is wrong, round, client), or -1s. On the device, so that no
        # round waits for it.
        self._wrong = torch.full((3,), -1, device=device)

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
        return choose(key, min(self.method.cohort or count, count), count)

    def step(self, cohort: Iterable[int] | None = None) -> list[int]:
        """One round; returns who took part."""
        self.begin(cohort)
        self.exchange()
        self.end()
        return self.answers.ids

    def begin(self, cohort: Iterable[int] | None = None) -> list[int]:
        """Who takes part in the next round: who was chosen, less those who are lost."""
        chosen = self.method.select(self.server, self.sample() if cohort is None else sorted(cohort))
        self.answers = self.faults.draw(self.engine.seed, self.round + 1, chosen, self.method.epochs)
        if self.answers.lost:  # they were sent what the others were: it counts, though nothing comes back
            down = self.method.broadcast(self.server, send(torch.tensor(self.answers.lost), self.method.model.device))
            self._count(len(self.answers.lost), down, Up())
        return self.answers.ids

    def exchange(self, alone: bool = True) -> None:
        """All exchanges of a round; where nobody answers, the server stays as it is."""
        for exchange in range(self.method.exchanges if self.answers.ids else 0):
            asked = self.ask(self.answers.ids)
            self.receive(asked, *self.engine.train(self.round + 1, exchange, asked), alone=alone)

    def ask(self, ids: list[int]) -> Asked:
        """An exchange as an engine wants it."""
        down = self.method.broadcast(self.server, send(torch.tensor(ids), self.method.model.device))
        return Asked(ids, self.states.take(ids), down, self.answers.done)

    def receive(self, asked: Asked, states: State, up: Uploads, alone: bool = True) -> None:
        """What an exchange gave: counted, looked at, and made into the server's and the clients' new states.

        Not `alone`: other runs are in the middle of the same round, and must not be stopped by what is wrong in this.
        """
        ids, _, down, _ = asked
        rows_of = send(torch.tensor(ids), self.method.model.device)
        self._inspect(rows_of, states, up)
        if alone and not rows_of.is_cuda:
            self.check()
        self._count(len(ids), down, up)
        self.server = self.method.aggregate(
            self.server, reduce(rows_of, up.mean, up.own, up.weight, up.group, self.method.groups)
        )
        self.states.put(ids, states)

    def end(self) -> None:
        """A round is over."""
        moved = self.method.extra_traffic(self.server) if self.answers.ids else {}
        for name, numbers in moved.items():
            sent = numbers * self.method.model.dtype.itemsize
            self.traffic.extra[name] = self.traffic.extra.get(name, 0) + sent
        self.round += 1

    def state(self, id: int) -> State:
        """A client's private state; that of a client that never took part is the initial one."""
        return self.states[id] if id in self.states else self.method.init_client()

    def evaluate(self, save: Callable[[int, dict[str, Tensor]], None] | None = None, full: bool = False) -> Values:
        """Scores of every client's model(s) on its own samples; `save(client, models)` gets each client's models.

        `full`: macro-F1 and AUC, too.
        """
        if save is not None:
            self.check()
        values = self._scores(save, full)
        self.check()  # not before: a GPU would stand still while the host makes up what comes next
        return tree_map(torch.Tensor.cpu, values)

    def _scores(self, save: Callable[[int, dict[str, Tensor]], None] | None, full: bool) -> Values:
        """The same, still on the device, and not looked at."""
        if (shared := self.shared()) is not None:
            values = self.engine.score_all(shared, full and self.method.usual)
            if save is not None:
                for id in range(len(self.clients)):
                    save(id, shared)
            return values
        pieces = []
        for ids in pieces_of(self):
            found = self.engine.evaluate(self.round, self.show(ids), keep=save is not None, full=full)
            self._save(ids, found, save)
            pieces.append(found.values)
        return tree_map(lambda *t: torch.cat(t), *pieces)

    def show(self, ids: list[int]) -> Asked:
        """An evaluation as an engine wants it."""
        down = self.method.show(self.server, send(torch.tensor(ids), self.method.model.device))
        return Asked(ids, self.states.take(ids), down)

    @staticmethod
    def _save(ids: list[int], found: Scores, save: Callable[[int, dict[str, Tensor]], None] | None) -> None:
        if save is not None:
            for row, id in enumerate(ids):
                save(id, rows(found.models, row))

    def shared(self) -> dict[str, Tensor] | None:
        """The model(s) that all clients predict with, where they are the same for all."""
        if not self.method.one_for_all:
            return None
        asked = self.show([0])
        if leaves(asked.down.own):
            return None
        return rows(self.engine.models(self.round, asked), 0)

    def _count(self, receivers: int, down: Any, up: Any) -> None:
        model = self.method.model
        size = lambda tree: count_bytes([tree], model.width, model.size)
        self.traffic.down_shared += size(down.shared) * receivers
        self.traffic.down_own += size(down.own)
        self.traffic.up_mean += size(up.mean)
        self.traffic.up_own += size(up.own)

    def _inspect(self, ids: Tensor, states: State, up: Uploads) -> None:
        """Look for the first client with numbers that cannot be used, without waiting for the device."""
        finite = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        for leaf in leaves((states, up.mean, up.own)):
            if leaf.is_floating_point() and leaf.numel():
                # The largest number of a row tells whether all are finite, in one look at each.
                finite &= torch.linalg.vector_norm(leaf[:, None].flatten(1), torch.inf, dim=1).isfinite()
        weighted = up.weight.isfinite() & (up.weight >= 0)
        wrong = torch.where(finite, torch.where(weighted, -1, BAD_WEIGHT), DIVERGED)
        row = (wrong >= 0).to(torch.uint8).argmax(0, keepdim=True)  # the first; an index of no axis would be waited for
        found = torch.cat([wrong[row], torch.full_like(row, self.round + 1), ids[row]])
        self._wrong = torch.where(self._wrong < 0, torch.where(wrong[row] < 0, -1, found), self._wrong)

    def check(self) -> None:
        """Stop where a client has sent what is not a number: averaged once, it is in every model.

        On a CPU every round does this; a GPU would have to be waited for, so there evaluations and checkpoints do.
        """
        what, round, client = self._wrong.tolist()
        if what < 0:
            return
        who, name = f"client '{self.clients.names[client]}'", type(self.method).__name__
        if what == BAD_WEIGHT:
            raise Problem(f"{name} gave {who} in round {round} a weight that is negative or not finite")
        raise Diverged(
            f"training diverged: {who} has numbers that are not finite in round {round} of {name}; "
            f"a smaller lr (now {self.method.lr:g}) helps"
        )


def pieces_of(federation: Federation) -> list[list[int]]:
    """Clients that are evaluated together."""
    count = len(federation.clients)
    step = ON_A_GPU if federation.method.model.device.type == "cuda" else EVALUATED_AT_ONCE
    return [list(range(first, min(first + step, count))) for first in range(0, count, step)]


def step_together(federations: Sequence[Federation], engine: Together) -> list[list[int]]:
    """One round of several runs, whose cohorts are one batch; `check` of each says whether it may go on."""
    cohorts = [f.begin() for f in federations]
    if not all(cohorts):  # of one run nobody is left: the others go on by themselves
        for f in federations:
            f.exchange(alone=False)
            f.end()
        return cohorts
    for exchange in range(federations[0].method.exchanges):
        asked = [f.ask(ids) for f, ids in zip(federations, cohorts, strict=True)]
        answers = engine.train(federations[0].round + 1, exchange, asked)
        for f, ask, answer in zip(federations, asked, answers, strict=True):
            f.receive(ask, *answer, alone=False)
    for f in federations:
        f.end()
    return cohorts


def evaluate_together(
    federations: Sequence[Federation],
    engine: Together,
    savers: Sequence[Callable[[int, dict[str, Tensor]], None] | None] | None = None,
    full: bool = False,
) -> list[Values]:
    """The evaluation of several runs; `check` of each says whether its scores mean anything."""
    each: Sequence[Any] = savers or [None] * len(federations)
    keep = any(save is not None for save in each)
    for f in federations if keep else ():
        f.check()
    if any(f.shared() is not None for f in federations):  # one model for all clients is quick to score as it is
        values = [f._scores(save, full) for f, save in zip(federations, each, strict=True)]
        return tree_map(torch.Tensor.cpu, values)
    pieces: list[list[Values]] = [[] for _ in federations]
    for ids in pieces_of(federations[0]):
        scores = engine.evaluate(federations[0].round, [f.show(ids) for f in federations], keep, full)
        for at, (f, found) in enumerate(zip(federations, scores, strict=True)):
            f._save(ids, found, each[at])
            pieces[at].append(found.values)
    return [tree_map(lambda *t: torch.cat(t).cpu(), *values) for values in pieces]
