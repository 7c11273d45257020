"""Sequential: one client after another: the reference.

It runs plain loops.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from perfed.core.augment import moved, moves
from perfed.core.clients import Clients
from perfed.core.context import Context
from perfed.core.data import CHUNK, Data, Plan, form, order_key, refuse_other_form, refuse_other_rows, step_key
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Cohort, Down
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import PUBLIC, derive, shuffle
from perfed.core.tree import rows, stack, tree_map
from perfed.engines.base import Engine, Failure, Results, Training, Work, other_form
from perfed.engines.forms import Form, fault, kinds, most_frequent, specimen

AT_ONCE = 2**18  # numbers that are made ready for a plain loop at once: they should stay in the cache


class Sequential(Engine):
    """One client after another: the reference."""

    name = "sequential"

    def _each(self, works: Sequence[Work]) -> list[Results]:
        return [self._work(work) for work in works]

    def _work(self, work: Work) -> Results:
        outcomes = []
        for row, id in enumerate(work.ids):
            state, own = rows((work.states, work.down.own), row)
            done = None if work.done is None else work.done[row]
            outcomes.append(self._attempt(work, id, state, Down(work.down.shared, own), done))
        return self._gathered(work, outcomes)

    def _attempt(self, work: Work, id: int, state: State, down: Down, done: float | None) -> dict[str, Any] | Exception:
        """Return the results of one client, or the error with which its training failed; other errors are raised."""
        key = derive(work.key, id)
        try:
            task = self.own_task(work, self.network_of(work.run, id))
            return task(state, down, self._samples(work, id, key, done), key)
        except Problem:
            raise
        except Exception as error:
            if not isinstance(work.task, Training):
                raise
            return error

    def _refine(self, run: int, context: Context, key: Tensor, server: State, cohort: Cohort | None) -> State:
        job = self.jobs[run]
        method = job.at(**vars(context))
        return method.refine(server, cohort, ClientData(job.clients.public_table, 0, key, method))

    def _samples(self, work: Work, id: int, key: Tensor, done: float | None) -> ClientData:
        """Return a client's samples as its method sees them."""
        job = self.jobs[work.run]
        return ClientData(job.clients, id, key, job.method, done, work.steps)

    def _gathered(self, work: Work, outcomes: Sequence[dict[str, Any] | Exception]) -> Results:
        """Stack the clients' results; whoever failed, or has results of another form than most, is left out.

        An error that hits every client is the method's own and ends the run; one that hits some is theirs.
        """
        if all(isinstance(outcome, Exception) for outcome in outcomes):
            self.close()
            raise self._told(work.run, outcomes[0], work.ids[:1])
        forms = [None if isinstance(outcome, Exception) else kinds(outcome) for outcome in outcomes]
        usual = self._declared(work) or most_frequent(forms)
        kept, failures = [], []
        for row, (id, outcome, sent) in enumerate(zip(work.ids, outcomes, forms, strict=True)):
            if isinstance(outcome, Exception):
                failures.append(Failure(id, reason_of(outcome)))
            elif sent is not None and (wrong := fault(sent, usual)):
                if network := self.network_of(work.run, id):
                    raise other_form(work.task.method, network, *wrong)
                failures.append(Failure(id, wrong[1], wrong[0]))
            else:
                kept.append(row)
        if failures and not isinstance(work.task, Training):  # every client has to be scored
            name = self.infos[work.run].names[failures[0].id]
            raise TypeError(f"client '{name}' has models of another form than the others'")
        nobody = lambda kind: torch.empty(0, *kind.shape, dtype=kind.dtype, device=self.method.model.device)
        out = stack([outcomes[row] for row in kept]) if kept else tree_map(nobody, usual)
        return Results(out, kept if failures else None, tuple(failures))

    def _declared(self, work: Work) -> Form | None:
        """Return the form that uploads of an exchange have to have; None for an evaluation, or where it is unknown."""
        if not isinstance(work.task, Training):
            return None
        if self._message(work) not in self.declared:
            outcome = self._rehearse(work)
            if isinstance(outcome, Exception):  # it cannot train on two samples of zeros: what most send has to do
                return None
            self._declare(work, kinds(outcome))
        return self.declared[self._message(work)]

    def _rehearse(self, work: Work) -> dict[str, Any] | Exception:
        """Return what a specimen of a client makes of a piece of work, or the error with which it failed."""
        state, own = rows((self.states[work.run].initial, work.down.own), 0)
        return self._specimen(work, state, own, work.down.shared)

    def _specimen(self, work: Work, state: State, own: Any, shared: Any) -> dict[str, Any] | Exception:
        job = self.jobs[work.run]
        data = ClientData(specimen(job.clients), 0, work.key, job.method, 1, work.steps)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about two samples of zeros
                return work.task(state, Down(shared, own), data, work.key)
        except Exception as error:
            return error

    def _told(self, run: int, error: Any, ids: Sequence[int], what: str = "scoring") -> Exception:
        """Return an error of clients as a sentence that says whose it is; a Problem is everybody's."""
        if isinstance(error, Problem):
            return error
        names = [f"client '{self.infos[run].names[id]}'" for id in ids]
        several = f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names) or what
        told = ClientError(f"{several} of {type(self.jobs[run].method).__name__}: {reason_of(error)}")
        told.__cause__ = error
        return told


def reason_of(error: Exception) -> str:
    """Return in one line what a client failed with."""
    words = str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
    return words.partition("\n")[0]


class ClientData(Data):
    """One client's samples, and plain loops over them."""

    def __init__(
        self,
        clients: Clients,
        index: int,
        key: Tensor,
        method: Method,
        done: float | None = None,
        usual: int | None = None,
    ):
        super().__init__(method.batch_size, method.epochs, done, usual)
        self.clients, self.index, self.key, self.method = clients, index, key, method
        self.dtype = method.model.dtype
        self.size = torch.tensor(clients.train.size[index], device=clients.train.y.device)

    @property
    def public(self) -> Data:
        if not self.method.sends_public:
            return super().public
        key, table = derive(self.key, PUBLIC), self.clients.public_table
        public = ClientData(table, 0, key, self.method, self.done, self.usual)
        public.meter = self.meter
        return public

    def count(self, split: str) -> Tensor:
        return torch.tensor(self.clients.split(split).size[self.index], device=self.size.device)

    def _batch(self, split: str, part: slice, key: Tensor) -> Batch:
        source = self.clients.split(split)
        first = max(part.start - source.start[self.index], 0)  # who has no samples borrows one
        index = torch.arange(first, first + part.stop - part.start, device=source.y.device)
        return Batch(self.clients.ready(source.x[part], self.dtype), source.y[part], None, key, index)

    def _batches(self, plan: Plan, draw: int) -> Iterator[Batch]:
        size = self.clients.train.size[self.index]
        key, total = plan.key(self.key, draw), plan.total(size)
        if total == 0:
            return
        step_keys, each = step_key(key, torch.arange(total, device=key.device)), plan.batches(size)
        keys = iter(step_keys.unbind())
        for epoch in range(-(-total // each)):
            left = (total - epoch * each) * plan.batch_size
            order = shuffle(order_key(key, epoch)[None], self.size[None], size, left)[0]
            theirs = step_keys[epoch * each : (epoch + 1) * each]
            for x, y, index in self._ready_batches(order, plan.batch_size, theirs):
                yield Batch(x, y, None, next(keys), index)

    def _ready_batches(self, order: Tensor, batch_size: int, keys: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches of the training samples `order`; many are made ready together, which halves the work."""
        source, start, augment = self.clients.train, self.clients.train.start[self.index], self.clients.augment
        together = max(1, AT_ONCE // (batch_size * max(source.x[0].numel(), 1)))  # batches
        for part, theirs in zip(order.split(together * batch_size), keys.split(together), strict=True):
            x, y = source.x.index_select(0, part + start), source.y.index_select(0, part + start)
            if augment != "none":
                x = moved(x, moves(augment, theirs, min(batch_size, len(order))).flatten()[: len(x)])
            x = self.clients.ready(x, self.dtype)
            yield from zip(x.split(batch_size), y.split(batch_size), part.split(batch_size), strict=True)

    def _fold(self, step: Callable[..., Any], carry: Any, given: Any, plan: Plan) -> Any:
        before = form(carry)
        plan = plan if self.done is None else plan.shortened(self.done, self.epochs)
        draws = [self._batches(plan, draw) for draw in range(plan.draws)]
        for index, batches in enumerate(zip(*draws, strict=True)):
            carry = step(carry, batches[0] if plan.draws == 1 else batches, given)
            if index == 0:
                refuse_other_form(before, form(carry))
        return carry

    def _mean(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any:
        if not (size := self.clients.split(split).size[self.index]):
            return tree_map(lambda t: torch.full_like(t, torch.nan), fn(self._any(split), given))
        total = None
        for count, batch in self._pieces(split, chunk or CHUNK):
            part = tree_map(lambda t, count=count: t * count, fn(batch, given))
            total = part if total is None else tree_map(torch.add, total, part)
        return tree_map(lambda t: t / size, total)

    def _map(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any:
        source, parts = self.clients.split(split), []
        missing = source.longest - source.size[self.index]
        pieces = self._pieces(split, chunk or CHUNK) if source.size[self.index] else [(0, self._any(split))]
        for count, batch in pieces:
            value = fn(batch, given)
            refuse_other_rows(value, len(batch.y))
            parts.append(tree_map(lambda t, count=count: t[:count], value))
        return tree_map(lambda *each: torch.cat([*each, each[0].new_zeros(missing, *each[0].shape[1:])]), *parts)

    def _longest(self, split: str) -> int:
        return self.clients.split(split).longest

    def _pieces(self, split: str, most: int) -> Iterator[tuple[int, Batch]]:
        """Yield the samples of a split in their order, `most` at a time, and how many are in a piece."""
        source = self.clients.split(split)
        start, size = source.start[self.index], source.size[self.index]
        for first in range(0, size, most):
            count = min(most, size - first)
            yield count, self._batch(split, slice(start + first, start + first + count), self.key)

    def _any(self, split: str) -> Batch:
        """Return any sample, from which the form of a function's result shows where a split has none."""
        return self._batch(split if len(self.clients.split(split).y) else "train", slice(0, 1), self.key)
