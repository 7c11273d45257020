"""The training loop: every method of one or more runs, from its checkpoint where it has one, to its result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines import can_record, make_engine
from perfed.engines.base import Engine, Job
from perfed.engines.scores import PERSONAL, Scores
from perfed.federation.faults import Faults, faults_of, tally
from perfed.federation.federation import PATIENCE, Federation, Save, evaluate, step
from perfed.training import catalog, files
from perfed.training.experiment import SERVER, Experiment, read_clients
from perfed.training.observers import Observer, Round
from perfed.training.observers.checkpoint import BestRound, Checkpoints, forget_best, restore
from perfed.training.observers.log import ROUNDS, MetricsLog, read
from perfed.training.observers.progress import ProgressLine
from perfed.wire import treatment

MANY = 1000  # clients from which on a file for each is written only where that is asked for
SHOWN = 10  # refused uploads that a result names; the log has all
Watch = Callable[[Path, int], Observer]  # a method's folder, and the round that it goes on from


def train(
    experiments: Sequence[Experiment], folders: Sequence[Path], console: Console, watch: Watch | None = None
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

    Returns:
        The folders of methods that diverged, and why.
    """
    diverged: dict[Path, str] = {}
    with ExitStack() as locks:
        for folder in folders:
            locks.enter_context(files.only_one(folder))
        for entry in experiments[0].config.entries():
            todo = []
            for experiment, folder in zip(experiments, folders, strict=True):
                place = folder / entry.name
                if (place / "result.json").exists():
                    forget_best(place)
                    if why := files.read_json(place / "result.json").get("diverged"):
                        diverged[place] = why
                else:
                    todo.append(MethodRun(experiment, entry, place, console, watch))
            batched = all(run.experiment.engine == "vectorised" and run.method.vectorised for run in todo)
            for group in [todo] if batched and todo else [[run] for run in todo]:
                diverged |= _train(group, console)
    return diverged


class MethodRun:
    """One method's training in one run folder."""

    federation: Federation

    def __init__(
        self, experiment: Experiment, entry: catalog.Entry, place: Path, console: Console, watch: Watch | None = None
    ):
        place.mkdir(exist_ok=True)
        self.experiment, self.entry, self.place, self.console, self.watch = experiment, entry, place, console, watch
        self.config, self.method = experiment.config.run, experiment.method(entry)
        self.every_model = self.config.save_models == "all" or (
            self.config.save_models == "auto" and len(experiment.clients) <= MANY
        )
        self.scores: Scores | None = None
        self.refused: list[dict] = []  # since the last look
        self.best: tuple[int, float] | None = None  # a round, and its mean validation accuracy

    def job(self) -> Job:
        """Return what the engine needs."""
        wire = treatment(self.config.wire)
        return Job(self.method, self.experiment.clients, self.config.seed, wire, self.place)

    def begin(self, engine: Engine, run: int) -> None:
        """Go on from the newest checkpoint, or begin."""
        config = self.config
        patience = min(PATIENCE, config.rounds)
        self.federation = Federation(engine, run, faults=faults_of(config), quorum=config.quorum, patience=patience)
        sizes = restore(self.place, self.federation, self._say)
        log = MetricsLog(self.place, sizes)
        self.observers: list[Observer] = [log]
        if self.watch is not None:
            self.observers.append(self.watch(self.place, self.federation.round))
        # The last one: a run goes on only from what all others have seen.
        self.observers.append(Checkpoints(self.place, config.checkpoint_every, log))
        wanted = config.save_round == "best" or (config.save_round == "auto" and config.patience > 0)
        wanted = wanted and config.save_models != "none"
        self.best_round = BestRound(self.place, log, self.federation.round) if wanted else None
        for line in read(self.place / ROUNDS):
            self._compare(line["round"], line.get("validation", {}).get(PERSONAL))

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def notices(self) -> None:
        """Say what is not as somebody may expect."""
        config, on_gpu = self.config, self.experiment.device.startswith("cuda")
        if self.experiment.engine == "vectorised" and not self.method.vectorised:
            self._say(f"{self.entry.name} cannot be vectorised: its clients run one by one")
        if on_gpu and config.fast and not config.compile and not can_record(config, "cuda"):
            self._say("Triton is not installed: steps run as they are, several times slower")
        if config.compile and on_gpu and self.method.model.keyed:
            self._say("steps with dropout are not compiled on a GPU: they run as they are")

    def saver(self, last: bool) -> Save | None:
        """Return where models go after the last round; those of the best one are saved at the very end."""
        return _saver(self.method.model, self.place) if last and self.every_model and self.best_round is None else None

    def judge(self, scores: Scores) -> None:
        """Look at an evaluation; `stopped` says whether it was the last one."""
        self.scores = scores
        self._compare(self.federation.round, scores.models[PERSONAL].mean("val"))
        if self.best_round is not None and self.best is not None and self.best[0] == self.federation.round:
            self.best_round.write(self.federation)

    def _compare(self, round: int, accuracy: float | None) -> None:
        # Engines may differ in the last bits.
        if accuracy is not None and (self.best is None or accuracy > self.best[1] + 1e-9):
            self.best = round, accuracy

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
        return f"no better mean validation accuracy since round {self.best[0]} ({self.best[1]:.4f})"

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
            save_models(method.model, self.place, self.entry.name, shared)
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
        log = read(self.place / ROUNDS)
        if federation.faults != Faults():
            result["faults"] = tally(log)
        if refused := [refusal for line in log for refusal in line.get("refused", [])]:
            result["refused"] = {"count": len(refused), "first": refused[:SHOWN]}
        if diverged:
            result["diverged"] = diverged
        files.save_tree(self.place / SERVER, federation.server)
        files.write_json(self.place / "result.json", result)
        forget_best(self.place)

    def _go_back(self, best: BestRound) -> int | None:
        """Go back to the round with the best models, score them once more and save them; None where it is lost."""
        federation = self.federation
        traffic, round = federation.traffic, self.best[0] if self.best else 0
        try:
            there = round == federation.round or best.restore(federation, round)
        except Problem as problem:
            forget_best(self.place)
            raise Problem(f"{problem}; `perfed resume` trains on, and saves the last round's models") from None
        federation.traffic = traffic  # of all rounds
        save = _saver(self.method.model, self.place) if self.every_model else None
        self.scores = federation.evaluate(save, self.config.scores != "none")
        which = f"of round {round}, the best on validation samples" if there else f"of the last round: {round} is lost"
        self._say(f"{self.entry.name}: the models are those {which}")
        return round if there else None


def _train(group: list[MethodRun], console: Console) -> dict[Path, str]:
    """Train one method in one or more runs; returns the folders in which it diverged, and why."""
    first = group[0]
    for run in group:
        run.notices()
    engine = make_engine(first.experiment.engine, [run.job() for run in group], first.config)
    try:
        for place, run in enumerate(group):
            run.begin(engine, place)
        if len({run.federation.round for run in group}) == 1:
            return _rounds(group, console)
    finally:
        engine.close()
    # They were interrupted between two checkpoints: each goes on by itself.
    return {folder: why for run in group for folder, why in _train([run], console).items()}


def _rounds(group: list[MethodRun], console: Console) -> dict[Path, str]:
    """Carry out all rounds of runs in lockstep, each as long as it needs to be."""
    first, active, diverged = group[0], group, {}
    config, title = first.config, first.entry.title + (f" x {len(group)}" if len(group) > 1 else "")
    on_gpu = first.experiment.device.startswith("cuda")
    with ProgressLine(console, title, config.rounds, first.federation.round) as progress:
        while active:
            began = time.monotonic()
            cohorts = step([run.federation for run in active])
            round = active[0].federation.round
            last = round == config.rounds
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
                        diverged[run.place] = run.federation.diverged
            active = [run for run in active if run not in over]
    return diverged


def _evaluate(active: list[MethodRun], last: bool) -> None:
    """Score every run's models; after the last round, save them."""
    wanted = active[0].config.scores
    full = wanted == "every" or (last and wanted == "last")
    scores = evaluate([run.federation for run in active], [run.saver(last) for run in active], full)
    for run, each in zip(active, scores, strict=True):
        run.judge(each)


def _saver(model: Model, place: Path) -> Callable[[int, dict[str, Tensor]], None]:
    folders = [client["folder"] for client in read_clients(place.parent)["clients"]]
    return lambda id, models: save_models(model, place / "clients" / folders[id], place.name, models)


def save_models(model: Model, home: Path, method: str, models: dict[str, Tensor]) -> None:
    """A client's models as files: model.safetensors is the personal one."""
    home.mkdir(parents=True, exist_ok=True)
    for name, theta in models.items():
        about = {"format": "pt", "method": method, "model": name}
        state = {key: t.cpu() for key, t in model.state_dict(theta).items()}
        path = home / f"{'model' if name == 'personal' else name}.safetensors"
        files.write(path, files.tensor_file(state, about))
