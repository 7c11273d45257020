"""The training loop: every method of one or more runs, from its checkpoint where it has one, to its result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.engines.base import Engine, Job
from perfed.engines.scores import PERSONAL, Scores
from perfed.federation.faults import tally
from perfed.federation.federation import PATIENCE, Federation, Save, cohort_size, evaluate, step
from perfed.federation.traffic import Traffic
from perfed.training import catalog
from perfed.training.config import Config
from perfed.training.engine import can_record, make_engine
from perfed.training.folder import MANY, MethodFolder, RunFolder, preparation_of, save_models
from perfed.training.observers import Observer, Round
from perfed.training.observers.checkpoint import BestRound, Checkpoints, restore
from perfed.training.observers.log import MetricsLog
from perfed.training.observers.progress import ProgressLine
from perfed.training.prepare import Experiment, about_inputs, faults_of, headline, optimizer_of, rates_of, system_of
from perfed.training.settings import FIXED, decisive, difference, in_words, outdated
from perfed.wire import treatment

SHOWN = 10  # refused uploads that a result names; the log has all
Watch = Callable[[MethodFolder, int], Observer]  # where it writes, and the round that the training goes on from


def train(
    experiments: Sequence[Experiment],
    folders: Sequence[Path],
    console: Console,
    watch: Watch | None = None,
    allow_change: bool = False,
) -> dict[Path, str]:
    """Train every method that has no result yet; what was interrupted goes on from its checkpoint.

    Several runs are alike but for their seeds or learning rates. Where cohorts are batches (the engine 'vectorised'),
    the runs' cohorts are one batch; elsewhere one run follows another. Batching does not change any run's result; if
    one run diverges the others continue.

    Args:
        experiments: the runs.
        folders: a folder for each.
        console: where progress goes.
        watch: makes one more observer for each method of each run.
        allow_change: go on with other settings than a method was begun with, and beside methods that ended with other
            ones; the results say so.

    Returns:
        The run folders in which a method diverged, and why.
    """
    diverged: dict[Path, str] = {}
    with ExitStack() as locks:
        opened = [RunFolder(path) for path in folders]
        for folder in opened:
            locks.enter_context(folder.lock())
        _say_notices(experiments, opened, console)
        entries = experiments[0].config.entries()
        for experiment, folder in zip(experiments, opened, strict=True):
            for entry in entries:
                if folder.method(entry.name).finished:
                    _look_back(experiment.config, entry, folder, console, allow_change)
        for entry in entries:
            todo = []
            for experiment, folder, path in zip(experiments, opened, folders, strict=True):
                run = MethodRun(experiment, entry, folder, console, watch, allow_change)
                if run.folder.finished:
                    run.folder.forget_best()
                    if why := run.folder.result().get("diverged"):
                        diverged[path] = why
                else:
                    todo.append(run)
            alike = len({_form(run.experiment.clients) for run in todo}) < 2
            batched = alike and all(run.experiment.engine == "vectorised" and run.method.vectorised for run in todo)
            batched = batched and len({run.experiment.class_weights for run in todo}) < 2  # else the losses differ
            for group in [todo] if batched and todo else [[run] for run in todo]:
                diverged |= {run.run_folder.path: why for run, why in _train(group, console).items()}
    return diverged


def _form(clients: Clients) -> tuple[object, ...]:
    """Return what samples of runs in one batch share; where each seed has its own split, its scales may differ."""
    scale = (None if values is None else tuple(values.flatten().tolist()) for values in (clients.mean, clients.std))
    public = None if clients.public is None else len(clients.public.y)
    return (clients.shape, clients.task, public, *scale)


def _say_notices(experiments: Sequence[Experiment], folders: Sequence[RunFolder], console: Console) -> None:
    """Say what whoever begins a run should know of its data and its network; runs that are alike say it once."""
    entries = experiments[0].config.entries()
    if not any(folder.files.has_folder(folder.method(entry.name).path) for folder in folders for entry in entries):
        for notice in experiments[0].notices:
            console.print(notice, highlight=False, markup=False)


def _look_back(config: Config, entry: catalog.Entry, folder: RunFolder, console: Console, allow_change: bool) -> None:
    """Look at a method that has ended: at its files, and whether its settings are those of the others.

    Models are read up to the number of clients for which they are written unless somebody says otherwise.
    """
    about, training = folder.raw_clients(), folder.method(entry.name)
    training.check(thorough=len(about["clients"]) <= MANY)
    change = outdated(training.result(), config, entry, about)
    if change and not allow_change:
        raise Problem(
            f"{entry.name} in '{folder.path}' has ended with other settings: {in_words(change)}; put them back, "
            "start a new run, or go on with --allow-change, and the report will say so"
        )
    if change:
        words = f"{entry.name} has ended with other settings, and stays as it is: {in_words(change)}"
        console.print(words, highlight=False, markup=False)


class MethodRun:
    """One method's training in one run folder."""

    federation: Federation

    def __init__(
        self,
        experiment: Experiment,
        entry: catalog.Entry,
        run_folder: RunFolder,
        console: Console,
        watch: Watch | None = None,
        allow_change: bool = False,
    ):
        self.experiment, self.entry, self.console, self.watch = experiment, entry, console, watch
        self.run_folder, self.folder, self.allow_change = run_folder, run_folder.method(entry.name), allow_change
        run_folder.files.make(self.folder.path)
        self.config, self.method = experiment.config.run, experiment.method(entry)
        self.settings = decisive(experiment.config, entry, run_folder.raw_clients())
        self.changes: list[dict] = []  # of the settings, since round 1
        self.saved: dict[Path, str] = {}  # files of models, and their SHA-256
        self.every_model = self.config.save_models == "all" or (
            self.config.save_models == "auto" and len(experiment.clients) <= MANY
        )
        self.scores: Scores | None = None
        self.refused: list[dict] = []  # since the last look
        task = self.method.model.task
        self.shown = task.scores[task.headline].metric  # in logs, and while it trains
        self.judged = task.scores[headline(self.config, run_folder.raw_clients())].metric  # best rounds, and patience
        self.sign = task.sign(self.judged)
        validated = bool(len(experiment.clients.val.y)) and self.config.scores != "none"
        self.always_full = validated and self.judged in task.whole
        self.best: tuple[int, float] | None = None  # a round, and its mean validation score

    def job(self) -> Job:
        """Return what the engine needs."""
        wire = treatment(self.config.wire)
        clients, seed = self.experiment.clients, self.config.seed
        cohort = cohort_size(len(clients), self.config.participation)
        rates = rates_of(self.config)
        return Job(self.method, clients, seed, cohort, wire=wire, folder=self.folder.path, rates=rates)

    def begin(self, engine: Engine, run: int) -> None:
        """Go on from the newest checkpoint, or begin."""
        config = self.config
        patience = min(PATIENCE, config.rounds)
        agreed = (self.experiment.clients.preparation or {}).get("traffic", {})  # sent before the first round
        advice = lambda: about_inputs(self.experiment.clients)
        rules = {"faults": faults_of(config), "quorum": config.quorum, "patience": patience, "advice": advice}
        rules["system"] = system_of(self.experiment.config.system)
        rules["optimizer"] = optimizer_of(config) if self.method.averages else None  # the baseline sends nothing
        self.federation = Federation(engine, run, traffic=Traffic(**agreed), **rules)
        sizes = restore(self.folder, self.federation, self._say, self._why_not)
        self.log = log = MetricsLog(self.folder, sizes, self.shown, self.judged)
        self.folder.seconds()  # a damaged line is better known now than at the end
        self.observers: list[Observer] = [log]
        if self.watch is not None:
            self.observers.append(self.watch(self.folder, self.federation.round))
        # The last one: a run goes on only from what all others have seen.
        about = {"settings": self.settings, "changes": self.changes}
        self.observers.append(Checkpoints(self.folder, config.checkpoint_every, log, about))
        wanted = config.save_round == "best" or (config.save_round == "auto" and config.patience > 0)
        wanted = wanted and config.save_models != "none"
        self.best_round = BestRound(self.folder, log, self.federation.round) if wanted else None
        for line in self.folder.rounds():
            if line.get("judged", "accuracy") == self.judged:  # it may have been another one then; perfed 0.1 had one
                self._compare(line["round"], line.get("validation", {}).get(PERSONAL))

    def _why_not(self, checkpoint: dict) -> str:
        """Say why the training must not go on from a checkpoint, or nothing; note what has changed since."""
        round, rounds, path = checkpoint["round"], self.config.rounds, self.run_folder.path
        self.changes = checkpoint.get("changes", [])
        change = difference(checkpoint.get("settings", {}), self.settings)
        fixed = {key: values for key, values in change.items() if key.startswith(FIXED)}
        if fixed:
            return (
                f"{self.entry.name} in '{path}' has been trained up to round {round} with other settings, which "
                f"cannot change on the way: {in_words(fixed)}; put them back, or start a new run"
            )
        if change and not self.allow_change:
            return (
                f"{self.entry.name} in '{path}' has been trained up to round {round} with other settings: "
                f"{in_words(change)}; put them back, or go on with --allow-change, and the report will say so"
            )
        if round >= rounds:
            return f"{self.entry.name} in '{path}' has been trained up to round {round}: run.rounds cannot be {rounds}"
        if change:
            self.changes = [*self.changes, {"round": round, "settings": change}]
            self._say(f"{self.entry.name}: goes on after round {round} with other settings: {in_words(change)}")
        return ""

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def notices(self) -> None:
        """Say what is not as somebody may expect."""
        config, on_gpu = self.config, self.experiment.device.startswith("cuda")
        if self.experiment.engine == "vectorised" and not self.method.vectorised:
            self._say(f"{self.entry.name} cannot be vectorised: its clients run one by one")
        if on_gpu and config.fast and not config.compile and not can_record(config, "cuda"):
            self._say("Triton is not installed: steps run as they are, several times slower")
        if config.compile and on_gpu and any(model.keyed for model in self.method.networks):
            self._say("steps with dropout are not compiled on a GPU: they run as they are")

    def saver(self, last: bool) -> Save | None:
        """Return where models go after the last round; those of the best one are saved at the very end."""
        return self._save_client() if last and self.every_model and self.best_round is None else None

    def _save_client(self) -> Save:
        """Return what writes a client's models into the client's folder."""
        method, about = self.entry.name, self.run_folder.clients()
        homes = [self.folder.client(client["folder"]) for client in about["clients"]]
        form = [preparation_of(about, client["name"]) for client in about["clients"]]

        def save(id: int, models: dict[str, Any]) -> None:
            self.saved |= save_models(self.folder.files, self.method.own_model(id), homes[id], method, models, form[id])

        return save

    def judge(self, scores: Scores) -> None:
        """Look at an evaluation; `stopped` says whether it was the last one."""
        self.scores = scores
        self._compare(self.federation.round, scores.models[PERSONAL].mean("val", self.judged))
        if self.best_round is not None and self.best is not None and self.best[0] == self.federation.round:
            self.best_round.write(self.federation)

    def _compare(self, round: int, score: float | None) -> None:
        if score is None:
            return
        if self.best is not None:  # engines may differ in the last bits
            gain, size = self.sign * (score - self.best[1]), abs(self.best[1])
            size = size if self.sign < 0 else max(1.0, size)  # an error is of any size
            if not gain > 1e-9 * size:
                return
        self.best = round, score

    def look(self) -> None:
        """Fetch who was refused, and whether the run can go on."""
        names = self.federation.clients.names
        self.refused += [refusal.plain(names) for refusal in self.federation.look()]

    @property
    def stopped(self) -> str:
        """Why the training ends here, before its last round; empty where it does not."""
        round, patience = self.federation.round, self.config.patience
        if self.federation.diverged:
            return self.federation.diverged
        if not patience or self.best is None or round - self.best[0] < patience or round == self.config.rounds:
            return ""
        what = self.judged.replace("_", " ")
        return f"no better mean validation {what} since round {self.best[0]} ({self.best[1]:.4f})"

    def tell(self, cohort: list[int], scored: bool, seconds: float, over: bool) -> None:
        """Let all observers see the round."""
        scores = self.scores if scored else None
        event = Round(self.federation, cohort, scores, seconds, over, self.stopped if over else "", self.refused)
        for observer in self.observers:
            observer.see(event)
        self.refused = []

    def finish(self) -> None:
        """Write what the training ends with."""
        federation, method = self.federation, self.method
        rounds, diverged = federation.round, federation.diverged
        if self.stopped:
            self._say(f"{self.entry.name}: stopped after round {rounds}, {self.stopped}")
        saved = None if self.best_round is None else self._go_back(self.best_round)
        shared = None if self.every_model else federation.shared()
        if shared is not None:
            form = preparation_of(self.run_folder.clients())
            self.saved |= save_models(self.folder.files, method.model, self.folder.path, self.entry.name, shared, form)
        if not self.every_model and self.config.save_models == "auto":
            written = "the model that all clients share" if shared is not None else "no model"
            self._say(
                f"{self.entry.name}: over {MANY:,} clients, so {written} is written; --save-models all writes every one"
            )
        assert self.scores is not None  # the last round is always evaluated
        result = {"method": self.entry.name, "title": self.entry.title, "rounds": rounds}
        if saved is not None:
            result["saved_round"] = saved
        if self.best is not None:
            result["best"] = {"round": self.best[0], "validation": self.best[1]}
        result |= {"evaluates": method.evaluates, "bytes": dataclasses.asdict(federation.traffic)}
        result |= {"clients": self.scores.by_client(), "parameters": method.model.P}
        if several := method.context.networks:  # of each of them, and the number of each client's
            parameters = {name: model.P for name, model in zip(several.names, several.models, strict=True)}
            result |= {"parameters": parameters, "networks": list(several.of)}
        log = self.folder.rounds()
        if federation.fallible:
            result["faults"] = tally(log)
        if federation.system.timed:
            result["clock"] = federation.clock
        if known := federation.engine.extended[federation.run].known:
            names = federation.clients.names
            result["extended"] = {names[id]: each.counts for id, each in sorted(known.items())}
        if refused := [refusal for line in log for refusal in line.get("refused", [])]:
            result["refused"] = {"count": len(refused), "first": refused[:SHOWN]}
        if diverged:
            result["diverged"] = diverged
        if self.changes:
            result["changes"] = self.changes
        written = self.saved | self.log.digests()
        written[self.folder.server_file] = self.folder.write_server(federation.server)
        digests = {self.folder.name_of(path): digest for path, digest in written.items()}
        self.folder.write_result(result | {"settings": self.settings, "sha256": digests | self.run_folder.digests()})
        self.folder.forget_best()

    def _go_back(self, best: BestRound) -> int | None:
        """Go back to the round with the best models, score them once more and save them; None where it is lost."""
        federation = self.federation
        traffic, clock, round = federation.traffic, federation.clock, self.best[0] if self.best else 0
        try:
            there = round == federation.round or best.restore(federation, round)
        except Problem as problem:
            self.folder.forget_best()
            raise Problem(f"{problem}; `perfed resume` trains on, and saves the last round's models") from None
        federation.traffic, federation.clock = traffic, clock  # of all rounds
        save = self._save_client() if self.every_model else None
        self.scores = federation.evaluate(save, self.config.scores != "none")
        which = f"of round {round}, the best on validation samples" if there else f"of the last round: {round} is lost"
        self._say(f"{self.entry.name}: the models are those {which}")
        return round if there else None


def _train(group: list[MethodRun], console: Console) -> dict[MethodRun, str]:
    """Train a method in one or more runs; returns those in which it diverged, and why."""
    first = group[0]
    for run in group:
        run.notices()
    notice = lambda text: console.print(f"{first.entry.name}: {text}", highlight=False, markup=False)
    engine = make_engine(first.experiment.engine, [run.job() for run in group], first.config, notice)
    try:
        for place, run in enumerate(group):
            run.begin(engine, place)
        if len({run.federation.round for run in group}) == 1:
            return _rounds(group, console)
    finally:
        engine.close()
    # They were interrupted between two checkpoints: each goes on by itself.
    return {run: why for alone in group for run, why in _train([alone], console).items()}


def _rounds(group: list[MethodRun], console: Console) -> dict[MethodRun, str]:
    """Carry out all rounds of runs in lockstep, each as long as it needs to be."""
    first, active, diverged = group[0], group, {}
    config, title = first.config, first.entry.title + (f" x {len(group)}" if len(group) > 1 else "")
    on_gpu = first.experiment.device.startswith("cuda")
    with ProgressLine(console, title, config.rounds, first.federation.round, first.shown) as progress:
        while active:
            began = time.monotonic()
            cohorts = step([run.federation for run in active])
            round = active[0].federation.round
            last = round >= config.rounds
            due = last or round % config.eval_every == 0
            if due:
                _evaluate(active, last)
            if due or not on_gpu or round % config.checkpoint_every == 0:  # a GPU is not waited for in every round
                for run in active:
                    run.look()
            seconds = (time.monotonic() - began) / len(active)
            over = [run for run in active if last or ((due or run.federation.diverged) and run.stopped)]
            for run in over:
                if not last:  # known only now
                    full = config.scores != "none"
                    run.scores = run.federation.evaluate(run.saver(True), full)
            shown = active[0].scores if due else None
            progress.see(Round(active[0].federation, cohorts[0], shown, seconds, over == active))
            for run, cohort in zip(active, cohorts, strict=True):
                run.tell(cohort, due or run in over, seconds, run in over)
                if run in over:
                    run.finish()
                    if run.federation.diverged:
                        diverged[run] = run.federation.diverged
            active = [run for run in active if run not in over]
    return diverged


def _evaluate(active: list[MethodRun], last: bool) -> None:
    """Score every run's models; after the last round, save them."""
    wanted = active[0].config.scores
    full = wanted == "every" or (last and wanted == "last") or any(run.always_full for run in active)
    scores = evaluate([run.federation for run in active], [run.saver(last) for run in active], full)
    for run, each in zip(active, scores, strict=True):
        run.judge(each)
