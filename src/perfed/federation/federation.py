"""The server's side of a run: its state, and one round of it. No files, no clocks, no printing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.data import Plan
from perfed.core.errors import Problem, SettingsProblem
from perfed.core.messages import Cohort, Down, Uploads, is_single
from perfed.core.method import Method, State
from perfed.core.random import COHORT, choose, derive
from perfed.core.rounds import Chosen, Known, Phase, chosen
from perfed.core.tree import leaves, rows, send
from perfed.engines.base import ClientInfo, Engine, EvaluationRequest, Reply, Request, kind_of, shares_one_model
from perfed.engines.forms import refuse_misfits
from perfed.engines.rules import treatment_told
from perfed.engines.scores import Scores
from perfed.engines.trees import paths
from perfed.federation import reduce
from perfed.federation.admit import Refusal, Standing, Verdict, inspect, only, pick
from perfed.federation.faults import Answers, Faults
from perfed.federation.optimizers import Moments, ServerOptimizer
from perfed.federation.system import System
from perfed.federation.traffic import PUBLIC_DATA, Traffic

EVALUATED_AT_ONCE = 64  # clients per piece of an evaluation, so that memory does not grow with all clients
ON_A_GPU = 256  # where a piece is one computation
PATIENCE = 3  # abandoned rounds in a row after which a run ends
FIRST = -1  # the number of the exchange that comes before all others, of clients that take part for the first time
Save = Callable[[int, dict[str, Any]], None]


class Turn(NamedTuple):
    """An exchange of a round."""

    exchange: int
    phase: str
    ids: list[int]


def cohort_size(clients: int, participation: float) -> int:
    """Return the number of clients per round: the whole part of the share, at least one.

    Args:
        clients: number of clients in all.
        participation: share of them that takes part in a round.
    """
    return max(1, int(clients * participation + 1e-9))


@dataclass
class Federation:
    """One run's server: the method's state, traffic, faults, and who is refused.

    It knows of a client its name, its sizes and the number of classes; data and private states are the engine's. A
    round in which too few clients send something usable is abandoned: it leaves the server as it was.

    Args:
        engine: whoever has the clients and trains them.
        run: its place among the engine's runs.
        server: the method's state to go on from; None: the initial one.
        round: number of rounds that are done.
        traffic: bytes sent so far.
        faults: clients that fail, as a simulation.
        system: the machines that clients are, as a simulation.
        clock: simulated seconds that have passed.
        quorum: share of those asked who must send something usable, or the round is abandoned.
        patience: number of abandoned rounds in a row after which the run has diverged.
        optimizer: what becomes of a mean change before the method adds it; None: nothing.
        advice: asked for what may help once the training has diverged; empty: a smaller lr.
        lazy: leave verdicts about uploads on the device until `look`, where the method allows; None: on a GPU.

    Example:
        >>> from perfed.contract.toy import plain_net, toy_clients
        >>> from perfed.core.model import Model
        >>> from perfed.engines.base import Job
        >>> from perfed.engines.local import Sequential
        >>> from perfed.methods.fedavg import FedAvg
        >>> method = FedAvg(Model(plain_net), epochs=1)
        >>> federation = Federation(Sequential(Job(method, toy_clients(), cohort=2)))
        >>> for _ in range(3):
        ...     clients = federation.step()
        >>> federation.round, len(clients)
        (3, 2)
        >>> list(federation.evaluate().means("test"))
        ['personal']
    """

    engine: Engine
    run: int = 0
    server: State = None
    round: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    faults: Faults = field(default_factory=Faults)
    system: System = field(default_factory=System)
    clock: float = 0.0
    quorum: float = 0.5
    patience: int = PATIENCE
    lazy: bool | None = None
    advice: Callable[[], str] | None = None
    optimizer: ServerOptimizer | None = None

    def __post_init__(self) -> None:
        self._method: tuple[Method, Method] | None = None  # the engine's, and the same one between two rounds
        if self.server is None:
            try:
                self.server = self.method.init_server(len(self.clients))
            except Problem as problem:  # such as more teams than clients
                raise SettingsProblem(str(problem)) from problem
        self.answers = Answers([], [])  # of the round that is going on, or of the last one
        self.known = Known(self.clients.names, self.clients.sizes["train"], self.clients.able)
        self.known.fetch, self.known.afford = self._fetch, self._affordable
        self.took: dict[int, float] = {}  # simulated seconds of each client that answered in the last round
        self._phase, self._turns = Phase(), []  # of the round that is going on: its kind, and its exchanges
        self._joined: list[int] = []  # those whose first exchange was in it
        self.refusals: list[Refusal] = []  # known since the last `look`
        self.strikes = 0  # rounds in a row that were abandoned, as far as known
        self.diverged = ""  # why the run cannot go on, as far as known
        self.moments: Moments = {}  # the optimizer's
        self._before: State = None  # the server when the round began
        self._moments_before: Moments = {}
        self._counts: bool | Tensor = True  # whether the round counts so far, or is abandoned
        self._unread: list[tuple[Verdict, Tensor | None]] = []  # still on the device, with the losses reported
        self._unseen: Standing | None = None  # on the device, and newer than `strikes`

    @property
    def method(self) -> Method:
        """The run's method, as it is between two rounds."""
        method = self.engine.jobs[self.run].method
        if self._method is None or self._method[0] is not method or self._method[1].context.round != self.round:
            self._method = method, method.at(round=self.round)  # it is asked for many times in a round
        return self._method[1]

    def _now(self, exchange: int, phase: str) -> Method:
        """Return the method as it is in an exchange of the round that goes on."""
        return self.method.at(round=self.round + 1, exchange=exchange, phase=phase)

    @property
    def clients(self) -> ClientInfo:
        """What a server may know of its clients."""
        return self.engine.infos[self.run]

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.engine.jobs[self.run].seed

    @property
    def fallible(self) -> bool:
        """Return True if it is simulated that clients fail, cannot be asked, or cannot do all of their work."""
        return self.faults != Faults() or self.system.limits or self.system.availability < 1

    # ------------------------------------------------------------------ a round

    def sample(self) -> list[int]:
        """Return the next round's cohort: a function of seed and round alone, alike for every method.

        It is drawn from the clients that have training samples and can be asked.
        """
        able = self._available()
        count = len(able)
        size = min(self.method.context.cohort, count)
        return [able[place] for place in choose(derive(self.seed, COHORT, self.round + 1), size, count)]

    def _available(self) -> Sequence[int]:
        return self.system.available(self.seed, self.round + 1, self.clients.able)

    def _affordable(self) -> list[float] | None:
        return self.system.affordable(self.seed, self.round + 1, range(len(self.clients)))

    def step(self, cohort: Iterable[int] | None = None) -> list[int]:
        """Carry out one round.

        Args:
            cohort: who is drawn, among whom the method may choose; None: drawn by the run's seed.

        Returns:
            The clients that took part.
        """
        return step([self], None if cohort is None else [cohort])[0]

    def begin(self, cohort: Iterable[int] | None = None) -> None:
        """Let the method say what kind of round comes next and who takes part, less those who are lost.

        Args:
            cohort: who is drawn, but for clients without training samples; None: drawn by the run's seed.
        """
        if self.round == 0 and self.method.refine_before:
            self.server = self._refined(self.method, self.server, None)
        self.known.available, self.took = self._available(), {}
        sizes, method = self.clients.sizes["train"], self.method.at(round=self.round + 1)
        drawn = None if cohort is None else [id for id in cohort if sizes[id]]
        self.known.draw = lambda: self.sample() if drawn is None else sorted(drawn)
        self.server = method.before_round(self.server, self.known)
        self._phase = phase = method.phase(self.server)
        method = method.at(phase=phase.name)
        choice = self.known.available if phase.everybody else method.cohort_of(self.server, self.known)
        wanted = chosen(choice, phase.exchanges, self.known, type(method).__name__, method.epochs)
        self.answers = self._answers(wanted, method.epochs)
        self._turns = self._planned(wanted, phase)
        self._before, self._counts, self._joined = self.server, not self.diverged, []
        if method.sends_public:
            self._send_public(wanted.ids)
        self.known.ask(self.round + 1, wanted.ids)
        self._moments_before = self.moments
        if self.answers.lost:  # they were sent what the others were: it counts, though nothing comes back
            self.known.fail(self.answers.lost)
            down = method.broadcast(self.server, self._send(self.answers.lost))
            self._count(self.answers.lost, down)

    def _answers(self, wanted: Chosen, epochs: int) -> Answers:
        """Return who of those that are asked answers, and how much of the work each does; note it."""
        answers = self.faults.draw(self.seed, self.round + 1, wanted.ids, epochs)
        most = self.system.affordable(self.seed, self.round + 1, answers.ids)
        answers = answers.limited(wanted, most, epochs, self.faults.discard)
        if self.faults.stragglers or most is not None or wanted.epochs is not None:
            done = answers.done or [epochs] * len(answers.ids)
            self.known.note("epochs", dict.fromkeys(answers.lost, 0) | dict(zip(answers.ids, done, strict=True)))
        return answers

    def _planned(self, wanted: Chosen, phase: Phase) -> list[Turn]:
        """Return the exchanges of a round, with those of their clients that answer."""
        there = {*self.answers.ids}
        turns = [
            Turn(number, phase.name, [id for id in ids if id in there]) for number, ids in enumerate(wanted.exchanges)
        ]
        if phase.first:
            joined = self.known.table["joined"]
            turns.insert(0, Turn(FIRST, phase.first, [id for id in self.answers.ids if not joined[id]]))
        return [turn for turn in turns if turn.ids]

    def _send_public(self, ids: Sequence[int]) -> None:
        """Count the public samples, which a client is sent when it is first asked."""
        fresh, method = sum(not self.known.asked[id] for id in ids), self.method
        sent = fresh * method.public_sent * self.clients.public // max(method.context.public, 1)
        self.traffic.extra[PUBLIC_DATA] = self.traffic.extra.get(PUBLIC_DATA, 0) + sent

    @property
    def open(self) -> bool:
        """True while the round goes on: somebody answers, and nobody knows that it is abandoned."""
        return bool(self.answers.ids) and self._counts is not False

    def requests(self) -> Iterator[Request]:
        """Yield what the round's clients are asked, one exchange after another; each follows from what came before."""
        for turn in self._turns:
            if self._turns[0].exchange == FIRST and turn.exchange != FIRST:  # those that failed in it wait
                late = {*self._turns[0].ids} - {*self._joined}
                turn = turn._replace(ids=[id for id in turn.ids if id not in late])
            if not self.open or not turn.ids:
                continue
            down, done = self._now(turn.exchange, turn.phase).broadcast(self.server, self._send(turn.ids)), None
            if self.answers.done:
                finishes = dict(zip(self.answers.ids, self.answers.done, strict=True))
                done = [finishes[id] for id in turn.ids]
            place = (self.run, self.round + 1, turn.exchange)
            yield Request(*place, turn.ids, down, done, turn.phase, self._phase.steps, self.system.timed)

    def receive(self, request: Request, reply: Reply) -> None:
        """Use what an exchange gave: count, inspect and reduce it, and let the method make its new state of it.

        Args:
            request: what was asked.
            reply: what the engine answered.
        """
        before = self.traffic.down, self.traffic.up
        self._count(request.ids, request.down, reply)
        self.traffic.count_batches(self._now(request.exchange, request.phase), self._samples(request, reply))
        if reply.looked is not None and reply.ids:
            down, up = self.traffic.down - before[0], self.traffic.up - before[1]
            self._wait(reply.ids, reply.looked.tolist(), down / len(request.ids), up / len(reply.ids))
        uploads = self._received(reply.uploads)
        self.refusals += [Refusal(self.round + 1, id, tensor, reason) for id, reason, tensor in reply.failures]
        self.known.fail([failure.id for failure in reply.failures])
        verdict = inspect(self.round + 1, reply, uploads, self.method.groups)
        needed = max(1, math.ceil(self.quorum * len(request.ids) - 1e-9))
        use = self._use_unread if self._leaves_unread(uploads) else self._use
        use(self._now(request.exchange, request.phase), reply, uploads, verdict, needed)

    def _samples(self, request: Request, reply: Reply) -> int:
        """Return how many training samples the clients that delivered something went through, in all epochs."""
        sizes, method = self.engine.jobs[self.run].clients.train.size, self.method  # with samples that they have made
        plan = Plan(method.batch_size, None if request.steps else method.epochs, request.steps)
        done = dict(zip(request.ids, request.done or [method.epochs] * len(request.ids), strict=True))
        mine = {id: plan.shortened(done[id], method.epochs) for id in reply.ids}
        return sum(own.samples(sizes[id], own.total(sizes[id])) for id, own in mine.items())

    def _wait(self, ids: Sequence[int], samples: Sequence[int], down: float, up: float) -> None:
        """Let the simulated clock go on until the slowest client has answered; who has failed is not waited for."""
        seconds = self.system.seconds(self.seed, self.round + 1, ids, samples, down, up)
        self.took |= {id: self.took.get(id, 0) + each for id, each in zip(ids, seconds, strict=True)}
        self.known.note("seconds", {id: self.took[id] for id in ids})
        self.clock += max(seconds)

    def _count(self, ids: Sequence[int], down: Down, reply: Reply | None = None) -> None:
        """Count the bytes of an exchange; a row of theta has the size of the network of the client whose row it is."""
        several, uploads = self.method.context.networks, None if reply is None else reply.uploads
        if several is None:
            self.traffic.count(self.method, len(ids), down, uploads)
            return
        for number, method in enumerate(self.engine.methods[self.run]):
            places = several.members(number, ids)
            theirs = Down(down.shared, rows(down.own, places), None if down.mask is None else down.mask[places])
            if reply is not None:
                uploads = only(reply.uploads, self._send(several.members(number, reply.ids)))
            self.traffic.count(method, len(places), theirs, uploads)

    def _received(self, uploads: Uploads) -> Uploads:
        """Return uploads after the server half of what happens to them on their way."""
        wire = self.engine.jobs[self.run].wire
        with treatment_told(wire, self.method):
            uploads = wire.server(uploads)
            if not isinstance(uploads, Uploads):
                raise TypeError(f"server must return Uploads, not {kind_of(uploads)}")
            for leaf, name in zip(leaves(uploads.mean), paths(uploads.mean, "mean"), strict=True):
                if not leaf.is_floating_point():
                    raise TypeError(f"server must give back '{name}' as floating-point numbers, not as {leaf.dtype}")
        if not is_single(uploads.weight):
            refuse_misfits(uploads.mean, uploads.weight, type(self.method).__name__)
        return uploads

    def _leaves_unread(self, uploads: Uploads) -> bool:
        """Return True if a verdict stays on the device.

        That needs a method whose server reads means alone, in which a row of weight 0 leaves no trace, and has only
        tensors in its state, so that `pick` can choose between two of them.
        """
        wanted = uploads.ids.is_cuda if self.lazy is None else self.lazy
        wanted = wanted and not self._phase.first  # whoever fails in the first exchange is not asked in the next
        return wanted and not leaves(uploads.own) and all(isinstance(leaf, Tensor) for leaf in leaves(self.server))

    def _use(self, method: Method, reply: Reply, uploads: Uploads, verdict: Verdict, needed: int) -> None:
        """Read the verdict, drop the rows that are refused, and use the others if they are enough."""
        counts = self._counts
        self._fetch()  # what an exchange before it left on the device
        wrong = verdict.wrong.tolist()
        self.refusals += verdict.refusals(wrong)
        self._note(verdict, wrong, uploads.loss)
        used = [row for row, place in enumerate(wrong) if place < 0]
        first = method.context.exchange == FIRST  # others go on without those that fail in it
        enough = len(used) >= (1 if first else needed)
        self._counts = bool(counts) and not self.diverged and (first or enough)
        if first:
            self._joined = [verdict.ids[row] for row in used]
        if self._counts and enough:
            everybody = len(used) == len(wrong)
            cohort = self._reduced(uploads if everybody else only(uploads, self._send(used)))
            self.server, self.moments = self._aggregated(method, cohort)
            reply.settle(None if everybody else used)

    def _use_unread(self, method: Method, reply: Reply, uploads: Uploads, verdict: Verdict, needed: int) -> None:
        """Do what `_use` does without reading the verdict, for which the host would wait until the GPU is idle.

        Rows that are refused keep their place with weight 0, and whether the others are enough is a tensor. `look`
        reads the verdict later; a run that has ended by then has not changed since.
        """
        self._unread.append((verdict, uploads.loss))
        ended = 0 if self._unseen is None else self._unseen.ended
        self._counts = (verdict.usable.sum() >= needed) & self._counts & (ended == 0)
        new, moments = self._aggregated(method, self._reduced(uploads, verdict.usable))
        self.server, self.moments = pick(self._counts, (new, moments), (self.server, self.moments))
        reply.settle(verdict.usable & self._counts)

    def _aggregated(self, method: Method, cohort: Cohort) -> tuple[State, Moments]:
        """Return the server's state, and the optimizer's moments, after an exchange."""
        moments = self.moments
        if self.optimizer is not None:
            moments = self.optimizer.moments(method, cohort, moments)
            if moments is not self.moments:  # the first ones, or of another form: there are no others to go back to
                self.moments = self._moments_before = moments
            cohort, moments = self.optimizer.step(method, cohort, moments)
        return self._refined(method, method.aggregate(self.server, cohort), cohort), moments

    def _refined(self, method: Method, server: State, cohort: Cohort | None) -> State:
        """Return the server's state after the training at the server, where a method has such."""
        return self.engine.refine(self.run, method.context, server, cohort)

    def _reduced(self, uploads: Uploads, used: Tensor | None = None) -> Cohort:
        return reduce.mean(uploads, self.method.groups, self.engine.weighted_sum, used)

    def end(self) -> None:
        """End a round; one that was abandoned leaves the server as it was.

        Clients keep the states of those of its exchanges that counted.
        """
        if self.answers.ids and not self.diverged:
            if len(self._turns) > 1:  # with only one, the server has not been touched
                self.server = pick(self._counts, self.server, self._before)
                self.moments = pick(self._counts, self.moments, self._moments_before)
            standing = self._unseen or Standing(self.strikes)
            standing = standing.after(self.round + 1, self._counts, self.patience)
            if isinstance(standing.strikes, Tensor):
                self._unseen = standing
            else:
                self._learn(standing)
            if self._counts is not False:
                self.known.join(self._joined)
                last = self._turns[-1]
                method = self._now(last.exchange, last.phase)
                for name, numbers in method.extra_traffic(self.server).items():
                    sent = numbers * self.method.model.dtype.itemsize
                    self.traffic.extra[name] = self.traffic.extra.get(name, 0) + sent
        self._before = None
        self.round += 1

    def _learn(self, standing: Standing) -> None:
        """Take over a standing that is known; where the run has ended, say why."""
        self._unseen, self.strikes = None, int(standing.strikes)
        if not standing.ended or self.diverged:
            return
        refused = [refusal for refusal in self.refusals if refusal.round == standing.ended]
        example = ""
        if refused:
            name = self.clients.names[refused[0].client]
            example = f" (client '{name}', {refused[0].tensor}: {refused[0].reason})"
        when = f"{self.patience} rounds in a row, the last of them round {standing.ended}"
        self.diverged = (
            f"training diverged: too few clients of {type(self.method).__name__} sent something usable in "
            f"{when if self.patience > 1 else f'round {standing.ended}'}{example}; "
            f"{(self.advice and self.advice()) or f'a smaller lr (now {self.method.lr:g}) may help'}"
        )

    def _note(self, verdict: Verdict, wrong: Sequence[int], loss: Tensor | None) -> None:
        """Note who answered in an exchange, given the verdict in the host's memory."""
        usable = [place < 0 for place in wrong]
        self.known.answer(verdict.round, verdict.ids, usable, None if loss is None else loss.tolist())

    def look(self) -> list[Refusal]:
        """Return the refusals that are known since the last look, after fetching what is still on the device."""
        self._fetch()
        known, self.refusals = sorted(self.refusals, key=lambda refusal: refusal.round), []
        return known

    def _fetch(self) -> None:
        """Fetch what is still on the device."""
        tensors = [verdict.wrong for verdict, _ in self._unread]
        if self._unseen is not None:
            tensors += [torch.as_tensor(number).view(1) for number in self._unseen]
        if tensors:
            numbers = iter(torch.cat(tensors).tolist())  # the host waits once for all
            for verdict, loss in self._unread:
                wrong = list(islice(numbers, len(verdict.ids)))
                self.refusals += verdict.refusals(wrong)
                self._note(verdict, wrong, loss)
            self._unread = []
            if self._unseen is not None:
                self._learn(Standing(*numbers))

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
        """Yield what is asked in an evaluation: all clients at once where they share a model, else some at a time.

        Args:
            keep: the models are wanted, too.
            full: also macro-F1 and AUC.
        """
        count, first = len(self.clients), self.show([0])
        if shares_one_model(self.method, first):
            yield EvaluationRequest(self.run, self.round, list(range(count)), first, keep, full)
            return
        general = self._general()
        at_once = ON_A_GPU if self.method.model.device.type == "cuda" else EVALUATED_AT_ONCE
        for begin in range(0, count, at_once):
            ids = list(range(begin, min(begin + at_once, count)))
            yield EvaluationRequest(self.run, self.round, ids, self.show(ids), keep, full, general=general)

    def _general(self) -> Tensor | None:
        """Return the theta that clients without training samples predict with, where an engine has such clients.

        None where the server has no such model: they predict with what the method makes of their initial state.
        """
        alike = self.method.context.networks is None
        if not alike or all(len(info.able) == len(info) for info in self.engine.infos):  # of all runs: one batch
            return None
        try:
            theta = self.method.global_model(self.server)
        except Problem:
            return None
        return theta if theta.shape == (self.method.model.width,) else None

    def show(self, ids: list[int]) -> Down:
        """Return what some clients receive for an evaluation.

        Args:
            ids: the clients.
        """
        return self.method.show(self.server, self._send(ids))

    def shared(self) -> dict[str, Any] | None:
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
    asking = [(federation, federation.requests()) for federation in federations]
    while asked := [(federation, request) for federation, left in asking if (request := next(left, None))]:
        replies = federations[0].engine.exchange([request for _, request in asked])
        for (federation, request), reply in zip(asked, replies, strict=True):
            federation.receive(request, reply)
    for federation in federations:
        federation.end()
    return [federation.answers.ids for federation in federations]


def evaluate(federations: Sequence[Federation], savers: Sequence[Save | None], full: bool = False) -> list[Scores]:
    """Score the models of several runs of one engine.

    Args:
        federations: the runs.
        savers: for each run what is called with each client and its models, or None.
        full: also macro-F1 and AUC.

    Returns:
        Each run's scores, in the host's memory.
    """
    pairs = zip(federations, savers, strict=True)
    asked = [federation.evaluations(save is not None, full) for federation, save in pairs]
    parts: list[list[Scores]] = [[] for _ in federations]
    for batch in zip_longest(*asked):  # a run with fewer clients has fewer requests
        requests = {place: request for place, request in enumerate(batch) if request is not None}
        replies = federations[0].engine.evaluate(list(requests.values()))
        for (place, request), reply in zip(requests.items(), replies, strict=True):
            parts[place].append(reply.scores)
            _hand_over(savers[place], request.ids, reply.models)
    return [Scores.joined(each).on_host() for each in parts]


def _hand_over(save: Save | None, ids: Sequence[int], models: dict[str, Any]) -> None:
    """Give every client's models to `save`; models that all share have one row."""
    if save is not None:
        shared = len(leaves(models)[0]) == 1
        for row, id in enumerate(ids):
            save(id, rows(models, 0 if shared else row))
