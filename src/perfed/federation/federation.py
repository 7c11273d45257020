"""The server's side of a run: its state, and one round of it. No files, no clocks, no printing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perfed.core.messages import Cohort, Uploads
from perfed.core.method import Method, State
from perfed.core.random import COHORT, choose, derive
from perfed.core.tree import leaves, rows, send, tree_map
from perfed.engines.base import ClientInfo, Engine, EvaluationRequest, Reply, Request, shares_one_model
from perfed.engines.scores import Scores
from perfed.federation import reduce
from perfed.federation.admit import Refusal, Verdict, inspect
from perfed.federation.faults import Answers, Faults
from perfed.federation.traffic import Traffic

EVALUATED_AT_ONCE = 64  # clients per piece of an evaluation, so that memory does not grow with all clients
ON_A_GPU = 256  # where a piece is one computation
PATIENCE = 3  # abandoned rounds in a row after which a run ends
Save = Callable[[int, dict[str, Tensor]], None]


def cohort_size(clients: int, participation: float) -> int:
    """Return the number of clients per round: the whole part of the share, at least one."""
    return max(1, int(clients * participation + 1e-9))


@dataclass
class Unread:
    """An exchange whose verdict is still on the device."""

    round: int
    ids: Sequence[int]
    verdict: Verdict


@dataclass
class Federation:
    """One run's server: the method's state, traffic, faults, and who is refused.

    It knows of a client its name, its sizes and the number of classes; data and private states are the engine's.
    """

    engine: Engine
    run: int = 0  # which of the engine's runs
    server: State = None
    round: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    faults: Faults = field(default_factory=Faults)
    quorum: float = 0.5  # share of those asked who must send something usable; below it a round is abandoned
    patience: int = PATIENCE  # abandoned rounds in a row after which the run has diverged
    patient: bool | None = None  # leave verdicts on the device until `look`; None: on a GPU, where the method allows

    def __post_init__(self) -> None:
        if self.server is None:
            self.server = self.method.init_server(len(self.clients))
        self.answers = Answers([], [])  # of the round that is going on, or of the last one
        self.refusals: list[Refusal] = []  # known since the last `look`
        self.strikes = 0  # rounds in a row that were abandoned, as far as known
        self.diverged = ""  # why the run cannot go on
        self._unread: list[Unread] = []
        self._ended: Tensor | None = None  # [strikes, whether the run has ended], on the device
        self._before: State = None  # the server when the round began
        self._going: Any = True  # whether the round has had its quorum so far; on the device where nobody looks
        self._last: list[Refusal] = []

    @property
    def method(self) -> Method:
        return self.engine.jobs[self.run].method

    @property
    def clients(self) -> ClientInfo:
        return self.engine.infos[self.run]

    @property
    def seed(self) -> int:
        return self.engine.jobs[self.run].seed

    # ------------------------------------------------------------------ a round

    def sample(self) -> list[int]:
        """Return the next round's cohort: a function of seed and round alone, alike for every method."""
        count = len(self.clients)
        return choose(derive(self.seed, COHORT, self.round + 1), min(self.method.cohort or count, count), count)

    def step(self, cohort: Iterable[int] | None = None) -> list[int]:
        """Carry out one round.

        Args:
            cohort: who is asked; drawn by the run's seed where it is None.

        Returns:
            The clients that took part.
        """
        return step([self], None if cohort is None else [cohort])[0]

    def begin(self, cohort: Iterable[int] | None = None) -> None:
        """Choose who takes part in the next round: who was drawn, less those who are lost."""
        chosen = self.method.select(self.server, self.sample() if cohort is None else sorted(cohort))
        self.answers = self.faults.draw(self.seed, self.round + 1, chosen, self.method.epochs)
        self._before, self._going, self._last = self.server, True, []
        if self.answers.lost:  # they were sent what the others were: it counts, though nothing comes back
            down = self.method.broadcast(self.server, self._send(self.answers.lost))
            self.traffic.count(self.method.model, len(self.answers.lost), down)

    @property
    def open(self) -> bool:
        """Whether the round goes on: somebody answers, and it has not been abandoned."""
        return bool(self.answers.ids) and self._going is not False and not self.diverged

    def request(self, exchange: int) -> Request:
        """Return what the round's clients are asked in an exchange."""
        ids = self.answers.ids
        down = self.method.broadcast(self.server, self._send(ids))
        return Request(self.run, self.round + 1, exchange, ids, down, self.answers.done)

    def receive(self, request: Request, reply: Reply) -> None:
        """Count, inspect and reduce what an exchange gave, and let the method make its new state of it."""
        self.traffic.count(self.method.model, len(request.ids), request.down, reply.uploads)
        uploads = self.engine.jobs[self.run].wire.server(reply.uploads)
        self._refuse([Refusal(self.round + 1, id, tensor, why) for id, why, tensor in reply.failures])
        verdict = inspect(reply, uploads)
        needed = max(1, math.ceil(self.quorum * len(request.ids) - 1e-9))
        if self._nobody_waits(uploads):
            self._receive_unread(reply, uploads, verdict, needed)
        else:
            self._receive(reply, uploads, verdict, needed)

    def _nobody_waits(self, uploads: Uploads) -> bool:
        """Return True if verdicts may stay on the device: the method reads means alone, and its state is tensors."""
        if self.patient is not None:
            return self.patient
        plain = all(isinstance(leaf, Tensor) for leaf in leaves(self.server))
        return uploads.ids.is_cuda and plain and not leaves(uploads.own)

    def _receive(self, reply: Reply, uploads: Uploads, verdict: Verdict, needed: int) -> None:
        wrong = verdict.wrong.tolist()
        used = [row for row, place in enumerate(wrong) if place < 0]
        bad = [(reply.ids[row], place) for row, place in enumerate(wrong) if place >= 0]
        self._refuse([Refusal(self.round + 1, id, *verdict.reason(place)) for id, place in bad])
        if len(used) < needed:
            self._going = False
            return
        if bad:
            index = self._send(used)
            pick = lambda tree: tree_map(lambda tensor: tensor.index_select(0, index), tree)
            group = None if uploads.group is None else pick(uploads.group)
            uploads = Uploads(pick(uploads.ids), pick(uploads.mean), pick(uploads.own), pick(uploads.weight), group)
        self.server = self.method.aggregate(self.server, self._reduced(uploads))
        reply.settle(used if bad else None)

    def _receive_unread(self, reply: Reply, uploads: Uploads, verdict: Verdict, needed: int) -> None:
        """Do what `_receive` does where nobody knows yet which rows are used: they are zeroed, not dropped."""
        used, ended = verdict.used, self._state_of_ending()[1] > 0
        enough = (used.sum() >= needed) & ~ended & self._going
        new = self.method.aggregate(self.server, self._reduced(uploads, used))
        self.server = tree_map(lambda after, before: torch.where(enough, after, before), new, self.server)
        reply.settle(used & enough)
        self._going = enough
        self._unread.append(Unread(self.round + 1, reply.ids, verdict))

    def _reduced(self, uploads: Uploads, used: Tensor | None = None) -> Cohort:
        return reduce.mean(uploads, self.method.groups, self.engine.weighted_sum, used)

    def _refuse(self, refusals: list[Refusal]) -> None:
        self.refusals += refusals
        self._last += refusals

    def end(self) -> None:
        """End a round; one that was abandoned leaves the server as it was."""
        if isinstance(self._going, Tensor):
            going, (strikes, ended) = self._going, self._state_of_ending()
            if self.method.exchanges > 1:
                self.server = tree_map(lambda now, old: torch.where(going, now, old), self.server, self._before)
            strikes = torch.where(going, 0, strikes + 1)
            self._ended = torch.stack([strikes, ended | (strikes >= self.patience).to(ended.dtype)])
        elif self.answers.ids:
            self.strikes = 0 if self._going else self.strikes + 1
            if not self._going:
                self.server = self._before
            if self.strikes >= self.patience:
                self.diverged = self._why(self._last)
        moved = self.method.extra_traffic(self.server) if self.answers.ids and self._going is not False else {}
        for name, numbers in moved.items():
            sent = numbers * self.method.model.dtype.itemsize
            self.traffic.extra[name] = self.traffic.extra.get(name, 0) + sent
        self._before = None
        self.round += 1

    def _state_of_ending(self) -> Tensor:
        if self._ended is None:
            self._ended = send(torch.tensor([self.strikes, 0]), self.method.model.device)
        return self._ended

    def look(self) -> list[Refusal]:
        """Return the refusals that are known since the last look, after fetching what is still on the device."""
        if self._unread:
            flat = torch.cat([self._state_of_ending(), *(each.verdict.wrong for each in self._unread)]).tolist()
            (strikes, ended), wrong = flat[:2], iter(flat[2:])
            last: list[Refusal] = []
            for each in self._unread:
                refused = [
                    Refusal(each.round, id, *each.verdict.reason(place))
                    for id, place in zip(each.ids, [next(wrong) for _ in each.ids], strict=True)
                    if place >= 0
                ]
                self.refusals += refused
                last = refused or last
            self.strikes, self._unread = strikes, []
            if ended and not self.diverged:
                self.diverged = self._why(last)
        known, self.refusals = self.refusals, []
        return known

    def _why(self, last: list[Refusal]) -> str:
        name, names = type(self.method).__name__, self.clients.names
        example = f" (client '{names[last[0].client]}', {last[0].tensor}: {last[0].reason})" if last else ""
        ended = last[0].round if last else self.round + 1
        return (
            f"training diverged: too few clients of {name} sent something usable in {self.patience} rounds in a row, "
            f"the last of them round {ended}{example}; a smaller lr (now {self.method.lr:g}) may help"
        )

    # ------------------------------------------------------------------ evaluations

    def evaluate(self, save: Save | None = None, full: bool = False) -> Scores:
        """Score every client's models on its own samples.

        Args:
            save: called with each client and its models.
            full: also macro-F1 and AUC.

        Returns:
            The scores, in the host's memory.
        """
        return evaluate([self], [save], full)[0]

    def evaluations(self, keep: bool, full: bool) -> Iterator[EvaluationRequest]:
        """Yield what is asked in an evaluation: all clients at once where they share a model, else some at a time."""
        count = len(self.clients)
        first = self.show([0])
        if shares_one_model(self.method, first):
            yield EvaluationRequest(self.run, self.round, list(range(count)), first, keep, full)
            return
        step = ON_A_GPU if self.method.model.device.type == "cuda" else EVALUATED_AT_ONCE
        for begin in range(0, count, step):
            ids = list(range(begin, min(begin + step, count)))
            yield EvaluationRequest(self.run, self.round, ids, self.show(ids), keep, full)

    def show(self, ids: list[int]) -> Any:
        """Return what these clients receive for an evaluation."""
        return self.method.show(self.server, self._send(ids))

    def shared(self) -> dict[str, Tensor] | None:
        """Return the models that all clients predict with; None where they have their own."""
        down = self.show([0])
        if not shares_one_model(self.method, down):
            return None
        (reply,) = self.engine.evaluate([EvaluationRequest(self.run, self.round, [0], down, keep=True, score=False)])
        return rows(reply.models, 0)

    def _send(self, ids: Sequence[int]) -> Tensor:
        return send(torch.tensor(ids, dtype=torch.int64), self.method.model.device)


def step(federations: Sequence[Federation], cohorts: Sequence[Iterable[int]] | None = None) -> list[list[int]]:
    """Carry out one round of several runs of one engine, in lockstep.

    Args:
        federations: the runs; each keeps its own server.
        cohorts: who is asked in each run; None: drawn by each run's seed.

    Returns:
        For each run the clients that took part.
    """
    for place, federation in enumerate(federations):
        federation.begin(None if cohorts is None else cohorts[place])
    for exchange in range(federations[0].method.exchanges):
        active = [federation for federation in federations if federation.open]
        if not active:
            break
        requests = [federation.request(exchange) for federation in active]
        replies = active[0].engine.exchange(requests)
        for federation, request, reply in zip(active, requests, replies, strict=True):
            federation.receive(request, reply)
    for federation in federations:
        federation.end()
    return [federation.answers.ids for federation in federations]


def evaluate(federations: Sequence[Federation], savers: Sequence[Save | None], full: bool = False) -> list[Scores]:
    """Score the models of several runs of one engine; `savers` get each client and its models."""
    pairs = zip(federations, savers, strict=True)
    asked = [federation.evaluations(save is not None, full) for federation, save in pairs]
    pieces: list[list[Scores]] = [[] for _ in federations]
    while batch := [(place, request) for place, each in enumerate(asked) if (request := next(each, None)) is not None]:
        replies = federations[0].engine.evaluate([request for _, request in batch])
        for (place, request), reply in zip(batch, replies, strict=True):
            pieces[place].append(reply.scores)
            save = savers[place]
            if save is not None:
                for row, id in enumerate(request.ids):
                    save(id, rows(reply.models, row if len(next(iter(reply.models.values()))) > 1 else 0))
    return [Scores.joined(each).on_host() for each in pieces]
