"""The door between a federation and whoever carries its rounds out.

An engine holds the clients' data, their private states, and the client half of what happens to an upload. It serves one
or more runs: a run's federation sends a request and gets a reply. Every engine computes the same function;
`sequential` is the reference that the others must equal.
"""

from __future__ import annotations

import time
import warnings
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
from perfed.core.context import Context
from perfed.core.data import Data, Meter
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Cohort, Down, Up, Uploads, covers, cut
from perfed.core.method import Method, State
from perfed.core.model import Batch
from perfed.core.random import EXTEND, PERSONALISE, REFINE, TRAIN, WIRE, derive
from perfed.core.rates import Rates
from perfed.core.task import Task
from perfed.core.tree import leaves, rows, send, tree_map
from perfed.engines.client_states import States
from perfed.engines.extension import Extending, Extensions, Grown
from perfed.engines.forms import Form, digest, fault, kinds, refuse_unusable
from perfed.engines.public import size_of, visible
from perfed.engines.rules import treatment_told
from perfed.engines.scores import Scores, Table
from perfed.engines.scoring import Piece, Scorer
from perfed.engines.trees import first_not_finite, paths
from perfed.wire.base import Transform
from perfed.wire.identity import Identity

AT_ONCE = 1 << 26  # numbers that a sum on a GPU holds in float64 at a time


@dataclass(frozen=True)
class Job:
    """One run as an engine sees it: a method and the clients that train with it.

    Args:
        method: the method, with its settings and its network.
        clients: the clients' samples.
        seed: what the run's initial model, cohorts, batches and dropout are drawn from.
        cohort: number of clients in a round; 0: all.
        wire: what happens to uploads on their way.
        folder: where clients' states are written that memory has no room for; None: the system's temporary folder.
        rates: what the method's learning rate is multiplied by in each round, and how many rounds the run has.
    """

    method: Method
    clients: Clients
    seed: int = 0
    cohort: int = 0
    wire: Transform = Identity()  # noqa: RUF009 (it has no state)
    folder: Path | None = None
    rates: Rates = Rates()  # noqa: RUF009 (nor has this)

    def at(self, *, round: int, **place: Any) -> Method:
        """Return the method at a place in the run, with that round's learning rate.

        Args:
            round: the round; an evaluation has that of the round before it.
            place: what else its context says, such as `exchange=1`.
        """
        method, factor = self.method.at(round=round, **place), self.rates.factor(round)
        return method if factor == 1 else method.at_rate(method.lr * factor)


@dataclass(frozen=True)
class ClientInfo:
    """All that is known of the clients outside an engine."""

    names: tuple[str, ...]
    sizes: dict[str, tuple[int, ...]]  # split -> samples of each client
    classes: int
    task: Task
    public: int = 0  # bytes of the public samples

    @classmethod
    def of(cls, clients: Clients) -> ClientInfo:
        """Return what may be known of these clients."""
        sizes = {split: clients.split(split).size for split in SPLITS}
        return cls(clients.names, sizes, clients.classes, clients.task, size_of(clients.public))

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def able(self) -> list[int]:
        """The clients that have training samples: nobody else is asked to train."""
        return [id for id, size in enumerate(self.sizes["train"]) if size]


# ---------------------------------------------------------------------- what passes through the door


class Request(NamedTuple):
    """What a run asks of some of its clients in one exchange."""

    run: int  # its place among the engine's runs
    round: int  # from 1
    exchange: int  # from 0; most methods have one in a round
    ids: Sequence[int]  # ascending
    down: Down  # what they receive; `own` has a row for each
    done: Sequence[float] | None = None  # epochs that each of them finishes, where some do not finish all
    phase: str = ""  # the name of the round's phase
    steps: int | None = None  # what a loop has that says neither epochs nor steps; None: the method's epochs
    counted: bool = False  # the reply says how many samples each client's steps have looked at


class Failure(NamedTuple):
    """A client whose work is lost."""

    id: int
    reason: str
    tensor: str = ""  # where the reason lies in one tensor


@dataclass(frozen=True)
class Reply:
    """What an exchange gave."""

    ids: Sequence[int]  # of the clients that delivered something
    uploads: Uploads  # theirs, a row for each
    spoiled: Tensor  # [m]: the place in `tensors` of a client's first state tensor that is not finite; -1: none
    tensors: list[str]  # names of the tensors of a client's state
    failures: list[Failure]  # of the clients that delivered nothing
    settle: Callable[[Tensor | list[int] | None], None]
    """Keep the new states of the clients whose uploads are used; those of all others stay as they were.

    It takes the rows that are used as a list; or as a mask on the device, which is not looked at; None means all.
    """
    looked: Tensor | None = None  # [m], samples that each client's steps looked at, where they are counted


class EvaluationRequest(NamedTuple):
    """What a run wants to know of the models of some of its clients."""

    run: int  # its place among the engine's runs
    round: int
    ids: Sequence[int]  # ascending
    down: Down  # what they receive; `own` has a row for each
    keep: bool = False  # return the models, too
    full: bool = False  # also scores such as AUC, for which the samples pass through the models once more
    score: bool = True  # False: the models alone
    general: Tensor | None = None  # the theta that clients without training samples predict with; None: their own


class EvaluationReply(NamedTuple):
    """What an evaluation gave."""

    models: dict[str, Any]  # name -> a tree with a row for each client, one row where all share it; empty unless kept
    scores: Scores


# ---------------------------------------------------------------------- what a client does


class Training(NamedTuple):
    """A client's part in an exchange."""

    method: Method
    wire: Transform
    counted: bool = False  # samples that steps look at

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:
        if self.counted:
            data.meter = Meter(torch.zeros_like(data.size))
        state, up = self._trained(self.method.client_part(state, _received(down), data))
        up = replace(up, mean=cut(up.mean, up.mask)) if up.mask is not None else up
        if type(self.wire) is not Identity:  # whoever derives from it may do more
            with treatment_told(self.wire, self.method, ClientError):  # this client's alone, as far as it knows
                up = self.wire.client(up, derive(key, WIRE))
                if not isinstance(up, Up):
                    raise TypeError(f"client must return an Up, not {kind_of(up)}")
                up = replace(up, mean=cut(up.mean, up.mask))  # whatever it has put there
        self._refuse_mixed(up)
        for leaf in leaves((state, up.mean, up.own)):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"local must return tensors in its state and in Up, not {type(leaf).__name__}")
        out = {"state": state, "mean": up.mean, "own": up.own, "weight": _weight(up.weight, data.size)}
        if up.loss is not None:
            out["loss"] = torch.as_tensor(up.loss, dtype=torch.float64, device=data.size.device)
        group = None if up.group is None else torch.as_tensor(up.group, device=data.size.device)
        more = {"group": group, "mask": up.mask, "looked": data.meter and data.meter.samples}
        return out | {name: part for name, part in more.items() if part is not None}

    def _refuse_mixed(self, up: Up) -> None:
        """Refuse a mean of models whose entries mean something else at other clients."""
        width, several = self.method.model.width, self.method.context.networks
        if several is None or up.group is not None:
            return
        if any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[-1] == width for leaf in leaves(up.mean)):
            raise Problem(
                f"{type(self.method).__name__} averages models of clients whose networks differ "
                f"({', '.join(several.names)}): Up(group=self.context.network) averages those of each network, or "
                "Up.own keeps them apart"
            )

    def _trained(self, result: Any) -> tuple[State, Up]:
        """Return what `local` gave, a client's state and its upload; refuse anything else."""
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Up):
            return result
        parts = f"({', '.join(map(kind_of, result))})" if isinstance(result, tuple) else kind_of(result)
        raise Problem(
            f"{type(self.method).__name__}.{self.method.client_part.__name__} must return (state, Up), not {parts}"
        )


def _weight(given: Any, samples: Tensor) -> Any:
    """Return the weight of an upload; a count of samples stays a whole number, by which the server knows it."""

    def usable(given: Tensor | float | None) -> Tensor:
        weight = torch.as_tensor(samples if given is None else given, device=samples.device)
        if weight.dtype == torch.bool or weight.is_complex():
            kind = str(weight.dtype).removeprefix("torch.")
            raise TypeError(f"Up.weight must be a number of at least 0, not {kind}")
        return weight if weight.dim() else weight.double()  # those of entries are sent as they are

    return samples if given is None else tree_map(usable, given)


class Evaluation(NamedTuple):
    """A client's models, and their scores on the client's own samples."""

    method: Method
    splits: tuple[str, ...]
    keep: bool
    general: bool = False  # `down.shared` is a pair: what the method's server sent, and a theta for the untrained

    def __call__(self, state: State, down: Down, data: Data, key: Tensor) -> dict[str, Any]:  # noqa: ARG002
        if self.general:
            shared, theta = down.shared
            models = self.method.models(state, _received(Down(shared, down.own)), data)
            fits = lambda model: isinstance(model, Tensor) and model.shape == theta.shape  # a mixture has several
            choose = lambda model: torch.where(data.size > 0, model, theta) if fits(model) else model
            models = {name: choose(model) for name, model in models.items()}
        else:
            models = self.method.models(state, _received(down), data)
        mean = lambda split: data.mean(self.method.score, models, split)
        finish = lambda means: {name: self.method.model.task.finish(each) for name, each in means.items()}
        by_split = {split: finish(mean(split)) for split in self.splits}
        scores = {model: {split: scores[model] for split, scores in by_split.items()} for model in models}
        return {"models": models if self.keep else {}, "scores": scores}


MASK = "mask of what is sent"  # a key with which it is a part of `Down.own` on its way


def _packed(method: Method, down: Down, count: int) -> Down:
    """Return a message as engines hand it on: `own` with a row for each client, and the masks among it."""
    refuse_other_rows(method, down, count)
    if down.mask is None:
        return down
    mask, name = down.mask, type(method).__name__
    if mask.dtype != torch.bool or mask.dim() != 2 or len(mask) != count:
        kind = f"{str(mask.dtype).removeprefix('torch.')} of shape {tuple(mask.shape)}"
        raise Problem(
            f"{name}: Down.mask is True or False for each entry, in a row for each of {count} clients, not {kind}"
        )
    if not any(covers(mask, leaf) for leaf in leaves((down.shared, down.own))):
        raise Problem(
            f"{name}: Down.mask has rows of {mask.shape[1]} entries, but no tensor of the message has so many"
        )
    return Down(down.shared, {MASK: mask, "own": down.own})


def _received(down: Down) -> Down:
    """Return a client's message as its method is given it."""
    if not isinstance(down.own, dict) or MASK not in down.own:
        return down
    mask = down.own[MASK]
    return Down(cut(down.shared, mask), cut(down.own["own"], mask), mask)


@dataclass(frozen=True)
class Work:
    """A task for some clients of one run, with everything that it reads but their samples."""

    run: int
    task: Training | Evaluation | Extending
    key: Tensor  # of the purpose and the round; each client derives its own
    ids: Sequence[int]
    states: State  # a row for each
    down: Down
    done: Sequence[float] | None = None
    steps: int | None = None

    @property
    def context(self) -> Context:
        """Where in the run this is done."""
        return self.task.method.context


@dataclass(frozen=True)
class Results:
    """What became of a piece of work."""

    out: dict[str, Any]  # what the task returned, stacked: a row for each client that did not fail
    rows: list[int] | None = None  # these clients' places in the work; None: all of them
    failures: tuple[Failure, ...] = ()


def _refuse_other_task(job: Job) -> None:
    """Refuse a network that would learn something else than its clients' labels are made for."""
    mine, theirs = job.method.model.task, job.clients.task
    if mine.kind != theirs.kind or (mine.kind != "classification" and mine != theirs):
        raise Problem(
            f"the model learns {mine.in_words}, but its clients' labels are of {theirs.in_words}: make it with "
            "Model(..., task=clients.task)"
        )


def _refuse_moved_and_made(job: Job) -> None:
    """Refuse crops of images that clients make: those lie there normalised, where the border of a crop is not black."""
    if job.method.extends and job.clients.augment != "none":
        name = type(job.method).__name__
        raise Problem(f"clients of {name} make samples of their own, which run.augment does not know how to move: none")


def _computed(method: Method) -> Method:
    """Return the method after computing what is computed once: here, as every exchange has a copy of its own."""
    for name in method.computed_once():
        getattr(method, name)
    return method


def other_form(method: Method, network: int, tensor: str, what: str) -> Problem:
    """Return what is wrong where clients with another network have states or messages of another form."""
    several = method.context.networks
    assert several is not None  # nobody has another network
    first, other = (f"'{several.names[number]}'" for number in (0, network))
    return Problem(
        f"{type(method).__name__}: with the network {other} '{tensor}' has another form than with {first} ({what}): "
        "states and messages have one form for all networks, as rows of theta have"
    )


def kind_of(value: Any) -> str:
    """Return the name of a value's type for a sentence."""
    return "None" if value is None else type(value).__name__


def shares_one_model(method: Method, down: Down) -> bool:
    """Return True if all clients predict with the model that `down` holds, so that it can be scored at once."""
    return method.one_for_all and not leaves(down.own) and down.mask is None


def refuse_other_rows(method: Method, down: Down, count: int) -> None:
    """Refuse a message whose `own` has not one row for each of `count` clients: they would get each other's."""
    for leaf, name in zip(leaves(down.own), paths(down.own, "Down.own"), strict=True):
        rows = "no rows" if not isinstance(leaf, Tensor) or not leaf.dim() else f"{len(leaf)} rows"
        if rows != f"{count} rows":
            raise Problem(
                f"{type(method).__name__} sends {name} with {rows} to {count} clients: `own` holds one row for each of "
                "the clients `ids`, and what is for everybody belongs into `shared`"
            )


def by_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Return one number for each row of `like` in a shape that multiplies or masks whole rows: [m, 1, ...]."""
    return numbers.view(-1, *(1,) * (like.dim() - 1))


class Engine(ABC):
    """Whoever carries out exchanges and evaluations, for one or more runs that are alike but for seed and rate."""

    name: ClassVar[str]
    kernels = False  # whether a method's model uses kernels for whole cohorts

    def __init__(
        self,
        *jobs: Job,
        train_scores: bool = False,
        memory: Sequence[int | None] = (None,),
        notice: Callable[[str], None] = warnings.warn,
    ):
        """Make an engine.

        Args:
            jobs: the runs that it serves; requests name them by their place here.
            train_scores: score the training samples in evaluations, too.
            memory: bytes of clients' states that are kept on the device, then in the host's memory; None: no limit.
            notice: is told in one line what is not as somebody may expect.
        """
        self.notice = notice
        self._prepare(jobs)
        self.train_scores = train_scores
        self.refining = [0.0 for _ in jobs]  # seconds of each run's server, since somebody has set them to 0
        self.extended = [Extensions() for _ in jobs]
        self.tables: dict[int, Grown] = {}  # with samples that were made up
        self.declared: dict[Any, Form] = {}  # by run and by the form of what clients received
        self.states = [self._no_states(run, memory) for run in range(len(jobs))]

    def _prepare(self, jobs: Sequence[Job]) -> None:
        """Take jobs over, with models that make use of the machine."""
        self.jobs = [self._prepared(job, self._longest(job, jobs)) for job in jobs]
        # For each run its method with each of its networks.
        several = [job.method.networks[1:] for job in self.jobs]
        self.methods = [
            [job.method, *(_computed(job.method.with_network(number)) for number, _ in enumerate(others, 1))]
            for job, others in zip(self.jobs, several, strict=True)
        ]

    def _longest(self, job: Job, jobs: Sequence[Job]) -> int:  # noqa: ARG002
        """Return how many rows `data.map` makes of a client's training samples, in one of the engine's runs."""
        return job.clients.train.longest

    def _prepared(self, job: Job, longest: int) -> Job:
        """Return the job with a model that makes use of the machine; of several networks that of the first."""
        _refuse_other_task(job)
        _refuse_moved_and_made(job)
        tokens = job.clients.train.x.dtype == torch.int64
        fast = lambda model: FastModel.of(model, kernels=self.kernels).taking(job.clients.shape, tokens)
        clients = visible(job.method, job.clients)
        run = Context(job.seed, population=len(clients), cohort=job.cohort or len(clients), rounds=job.rates.rounds)
        run = replace(run, longest=longest)
        if job.method.public and clients.public is not None:
            run = replace(run, public=len(clients.public.y))
        several = job.method.context.networks
        if several is None:
            model = fast(job.method.model)
        elif len(several.of) != len(clients):
            raise Problem(f"{len(several.of)} clients have a network, but there are {len(clients)} clients")
        else:
            several = replace(several, models=tuple(map(fast, several.models)))
            model, run = several.models[0], replace(run, networks=several)
        return replace(job, method=_computed(replace(job.method, model=model).at(**vars(run))), clients=clients)

    def _no_states(self, run: int, memory: Sequence[int | None]) -> States:
        """Return a table of clients' states in which nobody has taken part."""
        job, initial = self.jobs[run], [method.init_client() for method in self.methods[run]]
        several, device = job.method.context.networks, job.method.model.device
        if several is None:
            return States(initial[0], device, memory, job.folder)
        for number, state in enumerate(initial):
            if wrong := fault({"state": kinds(state)}, {"state": kinds(initial[0])}):
                raise other_form(job.method, number, *wrong)
        return States(initial, device, memory, job.folder, several.of)

    def own_task(self, work: Work, network: int) -> Training | Evaluation | Extending:
        """Return the task of a piece of work, for clients with one of the networks."""
        if len(self.methods[work.run]) == 1:
            return work.task
        method, place = work.task.method, {**vars(work.context), "network": network}
        return work.task._replace(method=self.methods[work.run][network].at(**place).at_rate(method.lr))

    def network_of(self, run: int, id: int) -> int:
        """Return the number of a client's network."""
        several = self.jobs[run].method.context.networks
        return 0 if several is None else several.of[id]

    @property
    def method(self) -> Method:
        """The first run's method."""
        return self.jobs[0].method

    @cached_property
    def infos(self) -> list[ClientInfo]:
        """What federations may know of each run's clients."""
        return [ClientInfo.of(job.clients) for job in self.jobs]

    # ------------------------------------------------------------------ exchanges

    def exchange(self, requests: Sequence[Request]) -> list[Reply]:
        """Let clients train: each one's `local`, then the client half of what happens to uploads.

        Args:
            requests: at most one for each run.

        Returns:
            A reply to each request. The clients' new states count once `settle` of the reply is called.

        Example:
            >>> from perfed.contract.toy import plain_net, toy_clients
            >>> from perfed.core.model import Model
            >>> from perfed.engines.local import Sequential
            >>> from perfed.methods.fedavg import FedAvg
            >>> method = FedAvg(Model(plain_net), epochs=1)
            >>> engine = Sequential(Job(method, toy_clients()))
            >>> down = method.broadcast(method.init_server(5), torch.tensor([0, 2]))
            >>> (reply,) = engine.exchange([Request(run=0, round=1, exchange=0, ids=[0, 2], down=down)])
            >>> reply.uploads.weight.tolist()  # their numbers of samples
            [23, 41]
            >>> reply.settle(None)
        """
        if self.method.extends:
            self._extend(requests)
        works = [self._training(request) for request in requests]
        return [self._reply(work, results) for work, results in zip(works, self._each(works), strict=True)]

    def _training(self, request: Request) -> Work:
        run, round, exchange, ids, down, done, phase, steps, counted = request
        method = self.jobs[run].at(round=round, exchange=exchange, phase=phase)
        down = _packed(method, down, len(ids))
        task, key = Training(method, self.jobs[run].wire, counted), self._key(run, TRAIN, round, exchange)
        return Work(run, task, key, ids, self.states[run].take(ids), down, done, steps)

    def _reply(self, work: Work, results: Results) -> Reply:
        out, ids, old = results.out, work.ids, work.states
        self._declare(work, kinds(out, 1))
        if results.rows is not None:
            ids, old = [work.ids[row] for row in results.rows], rows(work.states, results.rows)
        new, table = out["state"], self.states[work.run]
        places = send(torch.tensor(ids, dtype=torch.int64), self.method.model.device)

        def settle(used: Tensor | list[int] | None) -> None:
            if used is None:
                table.put(ids, new)
            elif isinstance(used, Tensor):
                chosen = lambda after, before: torch.where(by_row(used, after), after, before)
                table.put(ids, tree_map(chosen, new, old))
            elif used:
                table.put([ids[row] for row in used], rows(new, used))

        spoiled, tensors = first_not_finite(new, len(ids), places.device, "state")
        more = (out.get(name) for name in ("group", "loss", "mask"))
        uploads = Uploads(places, out["mean"], out["own"], out["weight"], *more)
        return Reply(ids, uploads, spoiled, tensors, list(results.failures), settle, out.get("looked"))

    def _declare(self, work: Work, sent: Form) -> Form:
        """Return the form that a method declares for an exchange: that of its first one, if it is not known yet."""
        key, method = self._message(work), type(work.task.method).__name__
        if key not in self.declared:
            if type(self.jobs[work.run].wire) is Identity:  # else what the server half gives back has to be usable
                refuse_unusable(sent, method)
            self.declared[key] = sent
        state = {"state": kinds(self.states[work.run].initial, 1)}
        if wrong := fault({"state": sent["state"]}, state):
            raise TypeError(f"{method}: a client's state changed its form ({wrong[0]}: {wrong[1]})")
        if wrong := fault(sent, self.declared[key]):
            raise TypeError(f"{method}: uploads changed their form ({wrong[0]}: {wrong[1]})")
        return self.declared[key]

    def _message(self, work: Work) -> Any:
        """Return what an upload's form follows from: the run, its place in a round, and what its clients received."""
        return work.run, work.context.phase, work.context.exchange, digest(work.down.shared, work.down.own)

    def weighted_sum(self, share: Tensor, stacked: Tensor) -> Tensor:
        """Return the weighted sum of rows in float64, for each group.

        On a CPU one client is added after another, so the sum does not depend on how a library orders it. A row
        whose weights are all 0 counts as one of zeros, whatever is in it: an upload that is refused may hold NaN.

        Args:
            share: weights [m, groups].
            stacked: rows [m, ...].

        Returns:
            [groups, ...].
        """
        if stacked.is_cuda:
            flat, counts = stacked[:, None].flatten(1), share.any(1)[:, None]
            pieces = flat.split(max(1, AT_ONCE // len(flat)), 1)
            parts = [share.T @ torch.where(counts, piece.double(), 0) for piece in pieces]
            return torch.cat(parts, 1).view(-1, *stacked.shape[1:])
        out = torch.zeros(share.shape[1], *stacked.shape[1:], dtype=torch.float64, device=stacked.device)
        for weight, row in zip(share, stacked, strict=True):
            if weight.any():
                out += by_row(weight, out) * row.double()
        return out

    # ------------------------------------------------------------------ samples that join clients' own

    def _extend(self, requests: Sequence[Request]) -> None:
        """Let the clients that train for the first time extend their training sets."""
        works = []
        for request in requests:
            run, down = request.run, request.down
            refuse_other_rows(self.method, down, len(request.ids))
            if down.mask is not None:
                raise Problem(
                    f"{type(self.method).__name__} has `extend`, and in that no part of a model: no Down.mask"
                )
            new = [row for row, id in enumerate(request.ids) if id not in self.extended[run].known]
            if new and self.method.extends_in in ("", request.phase):
                place = {"round": request.round, "exchange": request.exchange, "phase": request.phase}
                ids, task = [request.ids[row] for row in new], Extending(self.jobs[run].at(**place))
                key, states = self._key(run, EXTEND), self.states[run].take(ids)
                works.append((request.round, Work(run, task, key, ids, states, Down(down.shared, rows(down.own, new)))))
        if not works:
            return
        for (round, work), results in zip(works, self._each([work for _, work in works]), strict=True):
            run, out = work.run, results.out
            self.extended[run].join(round, work.ids, out, *self._table(run, out["x"].shape[1]), self.infos[run])
        self._use_tables()

    def _table(self, run: int, made: int) -> tuple[Grown, int]:
        """Return the table that a run's training samples are in, and the place of its first client there."""
        if run not in self.tables:
            self.tables[run] = Grown(self.jobs[run].clients, self.method.model.dtype, made)
        return self.tables[run], 0

    def _use_tables(self) -> None:
        """Let clients train on what the tables hold now."""
        for run, table in self.tables.items():
            job = self.jobs[run]
            self.jobs[run] = replace(job, clients=replace(job.clients, train=table.split))

    def save_extension(self, run: int) -> dict[str, Any] | None:
        """Return the samples that clients of a run have made, and what they left out, as a tree; None: nothing."""
        return self.extended[run].saved(*self._table(run, 0)) if self.extended[run].known else None

    def restore_extension(self, run: int, about: dict[str, Any] | None) -> None:
        """Give clients of a run the training sets that they had.

        Args:
            run: which run.
            about: what `save_extension` returned.
        """
        if self.extended[run].known or about is not None:
            table = self._table(run, about["room"] if about else 0)
            self.extended[run].restore(about, *table, len(self.infos[run]))
            self._use_tables()

    # ------------------------------------------------------------------ the server's own training

    def refine(self, run: int, context: Context, server: State, cohort: Cohort | None) -> State:
        """Let a run's server train: the method's `refine`, where it has one.

        Args:
            run: which run.
            context: where in the run this is.
            server: the server's state.
            cohort: what it was made of; None before the first round.

        Returns:
            The server's new state.
        """
        if not self.jobs[run].method.refines:
            return server
        began = time.monotonic()
        server = self._refine(run, context, self._key(run, REFINE, context.round, context.exchange), server, cohort)
        if self.method.model.device.type == "cuda":
            torch.cuda.synchronize()  # or its time would be somebody else's
        self.refining[run] += time.monotonic() - began
        return server

    # ------------------------------------------------------------------ evaluations

    def evaluate(self, requests: Sequence[EvaluationRequest]) -> list[EvaluationReply]:
        """Let clients predict: each one's models, and their scores on its own samples.

        Args:
            requests: at most one for each run.

        Returns:
            A reply to each request, its numbers still on the device.
        """
        works = [self._evaluation(request) for request in requests]
        pairs = zip(requests, works, self._each(works), strict=True)
        return [self._evaluated(request, work, results.out) for request, work, results in pairs]

    def _evaluation(self, request: EvaluationRequest) -> Work:
        run, round, ids, down, keep, full, score, general = request
        method = self.jobs[run].at(round=round)
        if shares_one_model(method, down):  # it is enough to ask one client; the model is scored afterwards
            ids, task = ids[:1], Evaluation(method, (), True)
        else:
            down = _packed(method, down, len(ids))
            splits, keep = self.splits(run) if score else (), keep or (full and bool(method.model.task.whole))
            task = Evaluation(method, splits, keep, general is not None)
            down = down if general is None else Down((down.shared, general), down.own)
        return Work(run, task, self._key(run, PERSONALISE, round), ids, self.states[run].take(ids), down)

    def _evaluated(self, request: EvaluationRequest, work: Work, out: dict[str, Any]) -> EvaluationReply:
        run, method, models, table = request.run, work.task.method, out["models"], out["scores"]
        full = request.full and request.score and bool(method.model.task.whole)
        if shares_one_model(method, request.down):
            table = self._score_shared(run, rows(models, 0), full) if request.score else {}
        elif full:
            more = self._full_scores(run, request.ids, models)
            for name, splits in table.items():
                table[name] = {split: scores | more[name][split] for split, scores in splits.items()}
        return EvaluationReply(models if request.keep else {}, Scores.of(table))

    def splits(self, run: int) -> tuple[str, ...]:
        """Return the splits that an evaluation of a run looks at."""
        names = SPLITS if self.train_scores else SPLITS[1:]
        return tuple(name for name in names if len(self.jobs[run].clients.split(name).y))

    def _score_shared(self, run: int, models: dict[str, Tensor], full: bool) -> Table:
        scorer = self._scorer(run)
        pieces = scorer.pieces()
        return scorer.joined(models, pieces, self._score_pieces(run, models, full, pieces))

    def _scorer(self, run: int) -> Scorer:
        job = self.jobs[run]
        own = lambda id: self.methods[run][self.network_of(run, id)]
        clients = replace(job.clients, train=job.clients.train.in_order) if self.train_scores else job.clients
        return Scorer(job.method, clients, self.splits(run), self._rate, self._key(run), own)

    # ------------------------------------------------------------------ clients' states

    def save(self, run: int) -> tuple[list[int], Iterator[memoryview]]:
        """Return the private states of a run's clients.

        Args:
            run: which run.

        Returns:
            The clients that have a state, and their states as bytes, some rows at a time.
        """
        ids = list(self.states[run])
        return ids, self.states[run].pieces(ids)

    def restore(self, run: int, ids: Sequence[int], read: Callable[[int], bytes]) -> None:
        """Replace all clients' states of a run by what `save` returned.

        Args:
            run: which run.
            ids: the clients that have a state.
            read: returns the next so many bytes of their states, fewer at the end of a damaged file.
        """
        states = self.states[run]
        states.clear()
        for clients in states.portions(ids):
            piece = bytearray(read(len(clients) * states.width))
            if len(piece) == len(clients) * states.width:
                states.load(clients, torch.frombuffer(piece, dtype=torch.uint8).view(len(clients), -1))

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Give back what the engine holds."""

    # ------------------------------------------------------------------ what an engine is made of

    @abstractmethod
    def _each(self, works: Sequence[Work]) -> list[Results]:
        """Return stacked results of `task(state, down, data, key)` for each client of each piece of work."""

    @abstractmethod
    def _refine(self, run: int, context: Context, key: Tensor, server: State, cohort: Cohort | None) -> State:
        """Return what the run's `refine` makes of the server's state, with batches drawn from the key."""

    def _score_pieces(self, run: int, models: dict[str, Tensor], full: bool, pieces: list[Piece]) -> list[Any]:
        """Return the scores of models that all clients share, piece by piece."""
        scorer = self._scorer(run)
        return [scorer.piece(models, full, piece) for piece in pieces]

    def _full_scores(self, run: int, ids: Sequence[int], models: dict[str, Tensor]) -> Table:
        """Return scores such as AUC of clients' own models, which have a row for each client."""
        return self._scorer(run).full_scores(ids, models)

    def _rate(self, method: Method, batch: Batch, models: dict[str, Tensor]) -> Any:
        """Return `method.rate` of models that all clients share."""
        return method.rate(batch, models)

    def _key(self, run: int, *parts: int) -> Tensor:
        """Return the key of a purpose and a round, from which each client derives its own."""
        return send(derive(self.jobs[run].seed, *parts), self.method.model.device)
