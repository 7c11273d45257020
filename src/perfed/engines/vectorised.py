"""Vectorised: a block of clients as one batched computation (vmap): made for GPUs.

`local` is written for one client, and `blocks` runs its loops for all clients of a block at once. Here a cohort is cut
into blocks, and put together again; the cohorts of several runs that are alike share them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from perfed.accel import autotune
from perfed.accel.autotune import prepared
from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.context import Context
from perfed.core.errors import Problem
from perfed.core.further import models_of
from perfed.core.messages import Cohort, Down
from perfed.core.method import Method, State
from perfed.core.model import Batch, Model
from perfed.core.random import derive, mix
from perfed.core.tree import flatten, integers, send, tree_map, unflatten
from perfed.engines.base import (
    Engine,
    EvaluationReply,
    EvaluationRequest,
    Job,
    Reply,
    Request,
    Results,
    Work,
    other_form,
)
from perfed.engines.blocks import Block, BlockData, Runner, holding
from perfed.engines.extension import Grown, view
from perfed.engines.forms import fault, kinds
from perfed.engines.local import reason_of
from perfed.engines.rules import rules_told

SEED = "seed"  # what runs in one batch may differ in, beside settings


class Vectorised(Engine):
    """Run all clients of a block at once; on a GPU as fast as one client."""

    name = "vectorised"

    def __init__(
        self,
        *jobs: Job,
        block: int = 0,
        compile: bool | str = False,
        sizes: Sequence[int] = (),
        fast: bool = False,
        **options: Any,
    ):
        """Make an engine.

        Args:
            jobs: the runs that it serves, alike but for their seeds and learning rates.
            block: clients per block; 0 is the whole cohort.
            compile: compile steps with torch.compile; text names its backend.
            sizes: allowed numbers of rows of a step; empty: any.
            fast: use kernels for whole cohorts, and recorded steps.
            options: those of every engine.
        """
        self.kernels, self.block = fast, block
        self._tuned_before = autotune.seconds
        super().__init__(*jobs, **options)
        self.clients, self.offsets = self._one_table()
        self.public, self.public_places = self._public_table()
        self.runner = Runner(compile, tuple(sorted(sizes)))
        if fast:
            from perfed.accel.loops import Recorder  # needs Triton

            self.runner.recorder = Recorder()
        _refuse_unlike(self.jobs)
        self._models_of_all = self._with_all_starts()
        for split in SPLITS if fast else ():  # kernels do not look
            self.clients.task.refuse(self.clients.split(split).y, f"the {split} samples")

    def _longest(self, job: Job, jobs: Sequence[Job]) -> int:  # noqa: ARG002
        return max(each.clients.train.longest for each in jobs)  # they are in one table

    def _one_table(self) -> tuple[Clients, list[int]]:
        """Lay the clients of all runs into one table; return it, and each run's first place in it."""
        device = self.method.model.device
        tables = [job.clients for job in self.jobs]
        if all(_same_samples(table, tables[0]) for table in tables):
            table, count = tables[0].to(device), len(tables)
            self.jobs = [replace(job, clients=table) for job in self.jobs]
            if count > 1 and self.method.extends:  # each run's clients will have samples of their own
                return _repeated(table, count), [len(table) * run for run in range(count)]
            return table, [0 for _ in self.jobs]
        table = join(tables).to(device)
        offsets = [0, *accumulate(len(clients) for clients in tables)]
        parts = [part(table, begin, end) for begin, end in pairwise(offsets)]
        public = [None if each.public is None else each.to(device).public for each in tables]
        parts = [replace(each, public=public) for each, public in zip(parts, public, strict=True)]
        self.jobs = [replace(job, clients=clients) for job, clients in zip(self.jobs, parts, strict=True)]
        return table, offsets[:-1]

    def _public_table(self) -> tuple[Clients | None, list[int]]:
        """Return the public samples of all runs as those of one client, or of one for each run; and whose are whose."""
        tables = [job.clients for job in self.jobs]
        if any(table.public is None for table in tables):
            return None, []
        if all(table is tables[0] for table in tables):
            return tables[0].public_table, [0 for _ in tables]
        return join([table.public_table for table in tables]), list(range(len(tables)))

    def _with_all_starts(self) -> list[dict[str, Model]]:
        """Return the models of each network, that of the clients and further ones, with the starts of all runs."""
        seeds, all_models = [job.seed for job in self.jobs], [models_of(method) for method in self.methods[0]]
        if len(seeds) == 1:
            return all_models
        return [{name: with_starts(model, seeds) for name, model in models.items()} for models in all_models]

    def _seeded(self, method: Method, network: int = 0) -> Method:
        """Return the method with models that begin, under vmap, as each row's own run does."""
        several = method.context.networks
        if several is not None:
            models = tuple(models["model"] for models in self._models_of_all)
            method = method.at(networks=replace(several, models=models))
        return holding(method, self._models_of_all[network])

    # ------------------------------------------------------------------ with help, and without

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        """Let clients train, see `Engine.exchange`; without recording and kernels where these fail."""
        return self._carry_out(super().exchange, requests)

    def evaluate(self, requests: Sequence[EvaluationRequest]) -> list[EvaluationReply]:
        """Let clients predict, see `Engine.evaluate`; without recording and kernels where these fail."""
        return self._carry_out(super().evaluate, requests)

    def _carry_out(self, do: Callable[[Any], Any], requests: Any) -> Any:
        """Do what is requested; where kernels, recording or the compiler fail, again and from here on without them.

        Nothing has changed by then, since states are kept by a reply's `settle`. What fails without them too is the
        method's or the network's own error, and comes out as it is.
        """
        if self.runner.recorder is None and not self.runner.compile:
            return do(requests)
        try:
            results = do(requests)
        except Problem:
            raise
        except Exception as error:  # the machine's, or somebody's own code's: the second time tells
            reason, what = reason_of(error), "recording" if self.runner.recorder else "compiling"
        else:
            models = [model for method in self.methods[0] for model in models_of(method).values()]
            if self.runner.compile and any(model.draws for model in models):
                self.runner.compile = False
                self.notice("steps whose dropout is a function are not compiled: they run as they are")
            return results
        self._do_without()
        results = do(requests)
        self.notice(f"{what} the steps failed, so they run as they are, several times slower ({reason})")
        return results

    def _do_without(self) -> None:
        self.kernels = False
        self.runner.recorder, self.runner.compile = None, False
        self._prepare(self.jobs)
        self._models_of_all = self._with_all_starts()

    @property
    def useful(self) -> float:
        """Return the share of the executed sample slots that held a sample."""
        return self.runner.useful / max(self.runner.executed, 1)

    @property
    def tuning_seconds(self) -> float:
        """Time spent on choosing kernels since this engine was made."""
        return autotune.seconds - self._tuned_before

    @property
    def recording_seconds(self) -> float | None:
        """Time spent on recording steps, with the choice of kernels; None where steps are not recorded."""
        return None if self.runner.recorder is None else self.runner.recorder.seconds

    def _each(self, works: Sequence[Work]) -> list[Results]:
        """Return results of every piece of work; what is done at the same place of several runs is done at once."""
        alike: dict[Any, list[int]] = {}
        for number, work in enumerate(works):
            where = work.context.round, work.context.exchange, work.context.phase, work.steps
            alike.setdefault(where, []).append(number)
        results = {}
        for numbers in alike.values():
            results |= zip(numbers, self._together([works[number] for number in numbers]), strict=True)
        return [results[number] for number in range(len(works))]

    def _together(self, works: Sequence[Work]) -> list[Results]:
        """Return results of every piece of work; the clients of all runs are rows of the same blocks."""
        size = [self.jobs[work.run].clients.train.size for work in works]
        order = [(place, row) for place, work in enumerate(works) for row in range(len(work.ids))]
        order.sort(key=lambda pair: -size[pair[0]][works[pair[0]].ids[pair[1]]])  # alike clients share a block
        network = {pair: self.network_of(works[pair[0]].run, works[pair[0]].ids[pair[1]]) for pair in order}
        order.sort(key=network.__getitem__)  # a block has one network
        blocks = []
        for number, clients in groupby(order, network.__getitem__):
            rows = [*clients]
            step = self.block or len(rows)
            blocks += [(number, rows[first : first + step]) for first in range(0, len(rows), step)]
        out = [self._block(works, rows, number) for number, rows in blocks]
        for (number, _), part in zip(blocks, out, strict=True):
            if number and (wrong := fault(kinds(part, 1), kinds(out[0], 1))):
                raise other_form(works[0].task.method, number, *wrong)
        joined = tree_map(lambda *parts: parts[0] if len(parts) == 1 else torch.cat(parts), *out)
        if len(works) == 1 and order == sorted(order):
            return [Results(joined)]
        results = []
        for place, work in enumerate(works):
            position = {row: where for where, (owner, row) in enumerate(order) if owner == place}
            back = self._send([position[row] for row in range(len(work.ids))])
            results.append(Results(tree_map(lambda tensor, back=back: tensor.index_select(0, back), joined)))
        return results

    def _table(self, run: int, made: int) -> tuple[Grown, int]:
        if not self.tables:
            self.tables[0] = Grown(self.clients, self.method.model.dtype, made)
        return self.tables[0], self.offsets[run]

    def _use_tables(self) -> None:
        train = self.tables[0].split
        self.clients = replace(self.clients, train=train)
        pairs = [
            (job, replace(job.clients, train=view(train, first, first + len(job.clients))))
            for job, first in zip(self.jobs, self.offsets, strict=True)
        ]
        self.jobs = [replace(job, clients=clients) for job, clients in pairs]

    def _public_block(self, runs: Sequence[int], done: list[int] | None = None) -> Block:
        """Return the public samples as a block: each row has those of its run."""
        assert self.public is not None
        places, method = [self.public_places[run] for run in runs], self.method
        return Block(
            self.public, tuple(places), self._send(places), self.runner, method.model.dtype, method.epochs, done
        )

    def refine(self, run: int, context: Context, server: State, cohort: Cohort | None) -> State:
        """Let a run's server train, see `Engine.refine`; without recording and kernels where these fail."""
        if not self.method.refines:
            return server
        refine = super().refine
        return self._carry_out(lambda _: refine(run, context, server, cohort), ())

    def _refine(self, run: int, context: Context, key: Tensor, server: State, cohort: Cohort | None) -> State:
        """Train as a block of one client does, so that steps are recorded as any others."""
        block, method, kept = self._public_block([run]), self.method.at(**vars(context)), []
        varied = {name: values[run : run + 1] for name, values in _varied(self.jobs).items()}
        if self.jobs[run].rates.schedule != "constant":  # as in `_block`
            rate = torch.tensor([self.jobs[run].at(**vars(context)).lr], dtype=method.model.dtype)
            varied["lr"] = send(rate, key.device)
        if SEED in varied:
            method = self._seeded(method)

        def refined(key: Tensor, size: Tensor, varied: dict[str, Tensor]) -> list[Tensor]:
            data = BlockData(block, key, {"train": size}, method.batch_size, method.epochs, None)
            parts, nesting = flatten(_varying(method, varied).refine(server, cohort, data))
            kept.extend((parts, nesting))
            return [part for part in parts if isinstance(part, Tensor)]

        with self._told(method):
            tensors = iter(vmap(refined)(key[None], block.sizes("train"), varied))
        parts, nesting = kept
        return unflatten([next(tensors)[0] if isinstance(part, Tensor) else part for part in parts], nesting)

    def _told(self, method: Method) -> contextlib.AbstractContextManager[None]:
        """Tell errors as rules that were broken, unless they may be those of recording or compiling."""
        helped = self.runner.recorder is not None or bool(self.runner.compile)
        return contextlib.nullcontext() if helped else rules_told(method)

    def _rate(self, method: Method, batch: Batch, models: dict[str, Tensor]) -> Any:
        if self.runner.recorder is None:
            return super()._rate(method, batch, models)
        client = lambda x, y: method.rate(Batch(x, y, None, batch.key), models)  # a block of one, for the kernels
        return tree_map(lambda t: t[0], prepared(lambda: vmap(client)(batch.x[None], batch.y[None])))

    def weighted_sum(self, share: Tensor, stacked: Tensor) -> Tensor:
        """Return share.T @ stacked in float64; with kernels on a GPU in a single launch."""
        machine = self.runner.machine(stacked.device)
        return machine.weighted_sum(share, stacked) if machine else super().weighted_sum(share, stacked)

    def _send(self, numbers: Sequence[int]) -> Tensor:
        return integers(numbers, self.method.model.device)

    def _send_done(self, done: Sequence[float]) -> Tensor:
        """Return numbers of epochs on the device; whole ones as whole numbers."""
        if all(epochs == int(epochs) for epochs in done):
            return self._send([int(epochs) for epochs in done])
        return send(torch.tensor(done, dtype=torch.float64), self.method.model.device)

    def _block(self, works: Sequence[Work], rows: list[tuple[int, int]], network: int) -> dict[str, Any]:
        jobs = [self.jobs[work.run] for work in works]
        task = self.own_task(works[0], network)
        method = task.method
        ids = [works[place].ids[row] for place, row in rows]
        # Where their samples are in the table of all runs.
        table = tuple(self.offsets[works[place].run] + works[place].ids[row] for place, row in rows)
        where, whose = self._send(ids), self._send([place for place, _ in rows])
        first = [0, *accumulate(len(work.ids) for work in works)]
        order = self._send([first[place] + row for place, row in rows])  # of all runs' rows, one after another
        sorted_already = len(works) == 1 and rows == [(0, row) for row in range(len(works[0].ids))]
        pick = lambda tensor: tensor if sorted_already else tensor.index_select(0, order)
        take = lambda trees: tree_map(lambda *t: pick(t[0] if len(t) == 1 else torch.cat(t)), *trees)
        finishes = lambda work, row: work.done[row] if work.done else method.epochs
        done = [finishes(works[place], row) for place, row in rows] if any(work.done for work in works) else None
        public = self._public_block([works[place].run for place, _ in rows], done) if method.sends_public else None
        about = (self.runner, method.model.dtype, method.epochs, done, public)
        block = Block(self.clients, table, self._send(table), *about)
        states, own = take([work.states for work in works]), take([work.down.own for work in works])
        machine = self.runner.machine(where.device)
        keys = torch.stack([work.key for work in works]).index_select(0, whose)
        keys = derive(keys, where, mix=machine.mix if machine else mix)
        varied = {name: values.index_select(0, whose) for name, values in _varied(jobs).items()}
        if any(job.rates.schedule != "constant" for job in jobs):  # a number that records read, not one they hold
            rates = torch.tensor([work.task.method.lr for work in works], dtype=method.model.dtype)
            varied["lr"] = send(rates, where.device).index_select(0, whose)
        if SEED in varied:
            method = self._seeded(method, network)
        shared = works[0].down.shared  # for all rows, where there is one run
        if len(works) > 1:
            shared = tree_map(lambda *t: torch.stack(t).index_select(0, whose), *(work.down.shared for work in works))

        def client(
            state: State, own: Any, key: Tensor, size: Any, varied: dict[str, Tensor], done: Any, shared: Any
        ) -> Any:
            mine = task._replace(method=_varying(method, varied))
            data = BlockData(block, key, size, method.batch_size, method.epochs, done, works[0].steps)
            return mine(state, Down(shared, own), data, key)

        sizes = {split: block.sizes(split) for split in SPLITS}
        if public is not None:
            sizes["public"] = public.sizes("train")
        dims = (0, 0, 0, 0, 0, None if done is None else 0, None if len(works) == 1 else 0)
        epochs = None if done is None else self._send_done(done)
        with self._told(method):
            return vmap(client, in_dims=dims)(states, own, keys, sizes, varied, epochs, shared)


def with_starts(model: Model, seeds: Sequence[int]) -> Model:
    """Return the model with an `init` that also takes a tensor under vmap, each client's own of these seeds."""
    starts, known = torch.stack([model.init(seed) for seed in seeds]), torch.tensor(seeds, device=model.device)

    def init(seed: int | Tensor) -> Tensor:
        if not isinstance(seed, Tensor):
            return model.init(seed)
        return starts.index_select(0, (known == seed).int().argmax(0, True))[0]

    view = copy.copy(model)
    view.init = init
    return view


def join(several: Sequence[Clients]) -> Clients:
    """Put the clients of several federations one after another."""
    first = several[0]
    for other in several:
        if other.shape != first.shape or not _alike(other.mean, first.mean) or not _alike(other.std, first.std):
            raise Problem("runs that train together need samples of one shape, normalised alike")
        if other.augment != first.augment:
            raise Problem("runs that train together need the same augmentation")
    splits = {}
    for name in SPLITS:
        parts = [clients.split(name) for clients in several]
        sizes = tuple(size for part in parts for size in part.size)
        longest = max(part.longest for part in parts)
        splits[name] = Split(
            torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), sizes, longest
        )
    return replace(first, names=tuple(name for clients in several for name in clients.names), **splits)


def _repeated(clients: Clients, times: int) -> Clients:
    """Return clients so many times, each time with the same samples in the same place."""
    again = lambda split: replace(split, size=split.size * times, first=split.start * times)
    return replace(clients, names=clients.names * times, **{name: again(clients.split(name)) for name in SPLITS})


def part(clients: Clients, first: int, last: int) -> Clients:
    """Return the clients from `first` to before `last`; their samples stay where they are."""

    def cut(split: Split) -> Split:
        begin, size = sum(split.size[:first]), split.size[first:last]
        rows = slice(begin, begin + sum(size))
        return Split(split.x[rows], split.y[rows], size, split.longest)

    splits = {name: cut(clients.split(name)) for name in SPLITS}
    return replace(clients, names=clients.names[first:last], **splits)


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Return True if both tensors are equal, or both are missing."""
    return first is second or (first is not None and second is not None and torch.equal(first, second))


def _same_samples(first: Clients, second: Clients) -> bool:
    if first is second:
        return True
    if not _alike(first.mean, second.mean) or not _alike(first.std, second.std) or first.augment != second.augment:
        return False
    pairs = [(first.split(name), second.split(name)) for name in SPLITS]
    pairs += [(a, b) for a, b in [(first.public, second.public)] if a is not None and b is not None]
    alike = lambda a, b: a.size == b.size and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    return (first.public is None) == (second.public is None) and all(a is b or alike(a, b) for a, b in pairs)


def _refuse_unlike(jobs: Sequence[Job]) -> None:
    """Refuse runs that cannot be rows of the same blocks."""
    method, model = jobs[0].method, jobs[0].method.model
    # By name: a user's file is a new class each time it is read.
    name = lambda method: (type(method).__module__, type(method).__qualname__)
    for job in jobs:
        theirs = job.method.model
        if name(job.method) != name(method) or type(job.wire) is not type(jobs[0].wire):
            raise Problem("runs that train together need the same method and the same treatment of uploads")
        shapes, mine = ([each.shapes for each in networks] for networks in (job.method.networks, method.networks))
        if shapes != mine or theirs.dtype != model.dtype or theirs.device != model.device:
            raise Problem("runs that train together need the same network, on one device")
        mine, other = method.context, job.method.context
        if (mine.population, mine.cohort, mine.public) != (other.population, other.cohort, other.public):
            raise Problem("runs that train together need as many clients and public samples, and cohorts of one size")
        if mine.rounds != other.rounds:
            raise Problem(f"runs that train together need as many rounds, not {mine.rounds} and {other.rounds}")
        if theirs.task != model.task:
            raise Problem("runs that train together need the same task, regression with the same shift and scale")
        if not _alike(theirs.class_weights, model.class_weights):
            raise Problem("runs that train together need the same weights of classes")
    _varied(jobs)


def _varied(jobs: Sequence[Job]) -> dict[str, Tensor]:
    """Return the settings in which these runs differ, one number for each; refuse what cannot differ in one batch."""
    method, out = jobs[0].method, {}
    for field in fields(method):
        values = [getattr(job.method, field.name) for job in jobs]
        if field.name == "model" or all(value == values[0] for value in values):
            continue
        if field.name != "lr":
            raise Problem(f"runs that train together may differ in seed and lr only, not in {field.name}")
        out[field.name] = torch.tensor(values, dtype=method.model.dtype, device=method.model.device)
    seeds = [job.seed for job in jobs]
    if len(set(seeds)) > 1:
        out[SEED] = torch.tensor(seeds, device=method.model.device)
    return out


def _varying(method: Method, varied: dict[str, Tensor]) -> Method:
    """Return the method with what a client's own run has in place of the first one's."""
    settings = {name: value for name, value in varied.items() if name != SEED}
    method = holding(method, settings)
    return method.at(seed=varied[SEED]) if SEED in varied else method
