"""The outer loop: prepare an experiment, make its folder, train each method, save each client's model.

A run folder explains itself:

    config.toml          every setting, resolved
    env.json             versions, machine, engine
    clients.json         who the clients are: names, sizes, how they came about; what a sample looks like
    files/               copies of the user's own method and model files
    <method>/            one folder per method
        metrics.jsonl    scores, one line per round and client
        rounds.jsonl     cohort, bytes and who failed, one line per round
        times.jsonl      clock times (the only thing here that differs from run to run)
        checkpoints/     the last two
        best/            while it trains: the round whose models will be saved (see run.save_round)
        clients/<id>/    model.safetensors and card.md (see run.save_models)
        model.safetensors    only where no client has a folder and all share one model
        server.safetensors   what the server ends with, for clients that come later
        result.json      the end: every client's scores, those of the models that are saved
    report/              table, picture, CSV
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from perfed import __version__
from perfed.core.clients import SPLITS, Clients
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.data import load
from perfed.data.schemes import scheme
from perfed.engines import can_record, make_engine, pick_device, pick_engine
from perfed.engines.base import Values
from perfed.engines.client_states import States
from perfed.engines.vectorised import Together
from perfed.federation.faults import Faults, faults_of, refuse_pointless, tally
from perfed.federation.federation import Diverged, Federation, cohort_size, evaluate_together, step_together
from perfed.models import build, is_path, make_network, refuse_mixing, suits
from perfed.training import catalog, files
from perfed.training.config import Config, DataConfig, from_dict, new_folder, read_toml, to_toml
from perfed.training.observers import Observer, Round
from perfed.training.observers.checkpoint import BestRound, Checkpoints, forget_best, restore
from perfed.training.observers.log import ROUNDS, MetricsLog, by_client, mean_accuracy, read
from perfed.training.observers.progress import ProgressLine

THREADS = 1  # of each process: results depend on it, so it is the same everywhere
MANY = 1000  # clients from which on a file for each is written only where that is asked for
BASELINE = "local"
SERVER = "server.safetensors"
CLIENTS = "clients.json"


@dataclass(frozen=True)
class Experiment:
    """A checked configuration with its data and its network: everything but the training."""

    config: Config
    clients: Clients
    network: Callable[[], nn.Module]
    device: str
    engine: str

    def method(self, entry: catalog.Entry) -> Method:
        """One method with its settings."""
        return make_method(self.config, entry, self.network, len(self.clients), self.device)


def make_method(
    config: Config, entry: catalog.Entry, network: Callable[[], nn.Module], clients: int, device: str = "cpu"
) -> Method:
    """A method as a configuration describes it, for so many clients."""
    run = config.run
    model = Model(network, head=config.model.head, dtype=getattr(torch, run.precision), device=device)
    kind, settings = entry.load(), config.settings(entry)
    try:
        who = {"cohort": cohort_size(clients, run.participation), "population": clients}
        return kind(model, **settings, seed=run.seed, **who)
    except TypeError as error:  # one of the six functions is missing, or @dataclass(frozen=True)
        raise Problem(f"'{entry.file}' is not a whole method: {error}") from error


def prepare(config: Config) -> Experiment:
    """Load data, build the network, make every method once: what is wrong is found before anything is written."""
    torch.set_num_threads(THREADS)
    torch.backends.cudnn.deterministic = True  # or a GPU gives another result every time
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.run.tf32
    if config.run.baseline and BASELINE not in [entry.name for entry in config.entries()]:
        config = dataclasses.replace(config, methods=(BASELINE, *config.methods))
    device = pick_device(config.run.device)
    clients = load_clients(config.data, config.run.seed)
    for key, asked in (("patience", config.run.patience > 0), ("save_round = best", config.run.save_round == "best")):
        if asked and not len(clients.val.y):
            raise Problem(f"run.{key} needs validation samples, and no client has one: set data.val above 0")
    if config.run.save_round == "best" and config.run.save_models == "none":
        raise Problem("run.save_round = best has nothing to save with run.save_models = none")
    model = dataclasses.replace(config.model, name=config.model.name or suits(clients.shape))
    data = dataclasses.replace(config.data, partition=scheme(config.data))
    config = dataclasses.replace(config, data=data, model=model)
    engine = pick_engine(config.run, device, cohort_size(len(clients), config.run.participation))
    network = build(model, clients)
    if engine == "vectorised":
        refuse_mixing(network, clients)
    experiment = Experiment(config, clients.to(device), network, device, engine)
    for entry in config.entries():
        refuse_pointless(faults_of(config.run), entry.name, experiment.method(entry).epochs)
    return experiment


def load_clients(data: DataConfig, run_seed: int) -> Clients:
    """Clients that can be measured: at least one of them has a test sample."""
    clients = load(data, run_seed if data.partition_seed is None else data.partition_seed)
    if not len(clients.test.y):
        raise Problem("no client has a test sample, so nothing can be measured: give the clients more samples")
    return clients


def create(experiment: Experiment, out: Path | None) -> Path:
    """A new run folder with everything but results."""
    config = experiment.config
    name = f"{datetime.now():%Y-%m-%d}_{config.data.name}_{config.entries()[-1].name}"
    unique = hashlib.sha256(f"{time.time_ns()}{to_toml(config)}".encode()).hexdigest()[:4]
    folder = out or Path("runs") / f"{name}_{unique}"
    new_folder(folder)
    files.write_json(folder / CLIENTS, describe(experiment.clients))
    files.write_json(folder / "env.json", environment(experiment))
    # The configuration comes last: a folder that has one can be resumed.
    picked = dataclasses.replace(config.run, engine=experiment.engine, device=experiment.device)
    files.write(folder / "config.toml", to_toml(_own_copies(dataclasses.replace(config, run=picked), folder)))
    return folder


def reopen(
    config: Config, folder: Path, console: Console, those: Callable[[Experiment], Experiment] | None = None
) -> Experiment:
    """The experiment of a run folder: a new one of this configuration, or as the folder says where it was begun.

    `those` leaves out clients that do not train.
    """
    begun = (folder / "config.toml").exists()
    experiment = prepare(read_config(folder) if begun else config)
    experiment = those(experiment) if those else experiment
    if begun:
        check_same(experiment, folder, lambda text: console.print(text, highlight=False))
    else:
        create(experiment, folder)
    return experiment


def describe(clients: Clients) -> dict[str, Any]:
    """Who the clients are and what a sample looks like; the digest tells whether the data are still the same."""
    digest = hashlib.sha256()
    for name in SPLITS:
        for tensor in (clients.split(name).x, clients.split(name).y):
            digest.update(tensor.cpu().contiguous().flatten().numpy().data)
    listed = lambda t: None if t is None else t.flatten().tolist()
    sizes = [dict(zip(SPLITS, s, strict=True)) for s in zip(*(clients.split(n).size for n in SPLITS), strict=True)]
    return {
        "shape": list(clients.shape),
        "classes": clients.classes,
        "image": clients.train.x.dtype == torch.uint8,
        "mean": listed(clients.mean),
        "std": listed(clients.std),
        "labels": clients.labels and list(clients.labels),
        "columns": clients.columns and list(clients.columns),
        "partition": clients.partition,
        "digest": digest.hexdigest(),
        "clients": [{"name": name, **size} for name, size in zip(clients.names, sizes, strict=True)],
    }


def read_clients(folder: Path) -> dict[str, Any]:
    """What `describe` wrote, with a safe folder name for every client: paths are never read from a file."""
    about = files.read_json(folder / CLIENTS)
    taken: set[str] = set()
    for client in about["clients"]:
        client["folder"] = files.slug(client["name"], taken)
    return about


def check_same(experiment: Experiment, folder: Path, notice: Callable[[str], None]) -> None:
    """Before a run goes on: its data must be what they were; other versions are worth a line."""
    was, now = files.read_json(folder / CLIENTS), json.loads(json.dumps(describe(experiment.clients)))
    if was != now:
        differ = ", ".join(key for key in now if was.get(key) != now[key])
        raise Problem(f"the data of '{folder}' are no longer what they were (different: {differ})")
    before = files.read_json(folder / "env.json").get("versions", {})
    for name, version_now in environment(experiment)["versions"].items():
        if before.get(name) != version_now:
            notice(f"{name} was {before.get(name)}, now {version_now}: results may differ in the last bits")


def _own_copies(config: Config, folder: Path) -> Config:
    """The configuration with the user's files copied into the folder and every hyper-parameter spelled out."""

    def copy(path: Path) -> str:
        (folder / "files").mkdir(exist_ok=True)
        target = folder / "files" / path.name
        if target.exists() and target.read_bytes() != path.read_bytes():  # a network's file called like a method's
            target = target.with_name(f"model_{path.name}")
        shutil.copyfile(path, target)
        return f"files/{target.name}"

    entries = config.entries()
    names = [copy(e.file) if e.file.parent != catalog.HERE / "methods" else e.name for e in entries]
    own = {
        e.name: {k: f.default for k, f in e.fields.items() if k not in catalog.RUN_SETS} | config.settings(e)
        for e in entries
    }
    model = config.model
    if is_path(model.name):
        path, _, factory = model.name.rpartition(":")
        model = dataclasses.replace(model, name=f"{copy(Path(path).expanduser())}:{factory}")
    data = config.data
    if data.dir is not None:  # a run may be resumed from another folder
        data = dataclasses.replace(data, dir=str(Path(data.dir).expanduser().resolve()))
    return dataclasses.replace(config, methods=tuple(names), method=own, train={}, model=model, data=data)


def environment(experiment: Experiment) -> dict[str, Any]:
    """Where this ran: what a number depends on."""
    packages = ("torch", "numpy", "scikit-learn", "safetensors")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if experiment.device.startswith("cuda") else platform.machine(),
        "engine": experiment.engine,
        "threads": THREADS,
        "versions": {"perfed": __version__} | {name: version(name) for name in packages},
    }


def read_config(folder: Path) -> Config:
    """The configuration of a run folder; its own files are found inside it."""
    if not folder.is_dir():
        raise Problem(f"there is no run folder '{folder}'")
    if not (folder / "config.toml").is_file():
        raise Problem(f"'{folder}' is not a run folder: it has no config.toml")
    raw = read_toml(folder / "config.toml")
    if isinstance(raw.get("methods"), list):
        raw["methods"] = [_inside(folder, n) if str(n).endswith(".py") else n for n in raw["methods"]]
    config = from_dict(raw)
    if is_path(config.model.name):
        model = dataclasses.replace(config.model, name=_inside(folder, config.model.name))
        return dataclasses.replace(config, model=model)
    return config


def _inside(folder: Path, name: str) -> str:
    """The path of one of the folder's own copies: a configuration cannot name code elsewhere."""
    path = Path(name)
    if path.parent != Path("files") or path.name in ("", ".."):
        raise Problem(f"'{folder}/config.toml' names '{name}', which is not one of its own files")
    return str(folder / path)


def train(experiment: Experiment, folder: Path, console: Console) -> None:
    """Train every method that has no result yet; what was interrupted goes on from its checkpoint."""
    train_together([experiment], [folder], console)


def train_together(
    experiments: Sequence[Experiment],
    folders: Sequence[Path],
    console: Console,
    watch: Callable[[Path, int], Observer] | None = None,
) -> None:
    """The same for several runs that are alike but for their seeds or learning rates.

    Where cohorts are batches (the engine 'vectorised'), the runs' cohorts are one batch; elsewhere one run follows
    another. What each run ends with does not depend on it, and one that diverges does not keep the others from it.
    `watch`, given a method's folder and the round that it goes on from, makes one more observer for each.
    """
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(files.only_one(folder))
        for entry in experiments[0].config.entries():
            left = [(e, f / entry.name) for e, f in zip(experiments, folders, strict=True)]
            for _, place in left:
                if (place / "result.json").exists():
                    forget_best(place)
            left = [(e, place) for e, place in left if not (place / "result.json").exists()]
            batched = all(e.engine == "vectorised" and e.method(entry).vectorised for e, _ in left)
            diverged: dict[Path, str] = {}
            for some in [left] if batched and len(left) > 1 else [[one] for one in left]:
                diverged |= _train([Job(e, entry, place, console, watch) for e, place in some], console)
            if diverged:
                raise Diverged(next(iter(diverged.values())), diverged)


class Job:
    """One method's training in one run folder, from its checkpoint where it has one."""

    def __init__(
        self,
        experiment: Experiment,
        entry: catalog.Entry,
        place: Path,
        console: Console,
        watch: Callable[[Path, int], Observer] | None = None,
    ):
        place.mkdir(exist_ok=True)
        self.experiment, self.entry, self.place, self.console = experiment, entry, place, console
        self.run, self.method = experiment.config.run, experiment.method(entry)
        self._notices()
        self.every_model = self.run.save_models == "all" or (
            self.run.save_models == "auto" and len(experiment.clients) <= MANY
        )
        self.engine = make_engine(experiment.engine, self.method, experiment.clients, self.run)
        initial, device = self.engine.method.init_client(), self.method.model.device
        states = States(initial, device, budget(self.run.state_memory, device), place)
        self.federation = Federation(self.engine, states=states, faults=faults_of(self.run))
        sizes = restore(place, self.federation, lambda text: console.print(text, highlight=False))
        log = MetricsLog(place, sizes)
        self.watching: list[Observer] = [log]
        if watch is not None:
            self.watching.append(watch(place, self.federation.round))
        # The last one: a run goes on only from what all others have seen.
        self.watching.append(Checkpoints(place, self.run.checkpoint_every, log))
        wanted = self.run.save_round == "best" or (self.run.save_round == "auto" and self.run.patience > 0)
        wanted = wanted and self.run.save_models != "none"
        self.best_round = BestRound(place, log, self.federation.round) if wanted else None
        self.values: Values = {}
        known = [line for line in read(place / ROUNDS) if line.get("validation", {}).get("personal") is not None]
        self.best: tuple[int, float] | None = None  # a round, and its mean validation accuracy
        for line in known:
            self._compare(line["round"], line["validation"]["personal"])

    def _notices(self) -> None:
        say = lambda text: self.console.print(text, highlight=False)
        run, on_gpu = self.run, self.experiment.device.startswith("cuda")
        if self.experiment.engine == "vectorised" and not self.method.vectorised:
            say(f"{self.entry.name} cannot be vectorised: its clients run one by one")
        if on_gpu and run.fast and not run.compile and not can_record(run, "cuda"):
            say("Triton is not installed: steps run as they are, several times slower")
        if run.compile and on_gpu and self.method.model.keyed:
            say("steps with dropout are not compiled on a GPU: they run as they are")

    def saver(self, last: bool) -> Callable[[int, dict[str, Tensor]], None] | None:
        """Where models go after the last round; those of the best one are saved at the very end."""
        here = last and self.every_model and self.best_round is None
        return _saver(self.method.model, self.place) if here else None

    def judge(self, values: Values) -> None:
        """Look at an evaluation; `stopped` says whether it was the last one."""
        self.values = values
        accuracy = mean_accuracy(values, "val")["personal"]
        if accuracy is not None:
            self._compare(self.federation.round, accuracy)
        if self.best_round is not None and self.best is not None and self.best[0] == self.federation.round:
            self.best_round.write(self.federation)

    def _compare(self, round: int, accuracy: float) -> None:
        if self.best is None or accuracy > self.best[1] + 1e-9:  # engines may differ in the last bits
            self.best = round, accuracy

    @property
    def stopped(self) -> str:
        """Why the training ends here, before its last round; empty where it does not."""
        round, patience = self.federation.round, self.run.patience
        if not patience or self.best is None or round - self.best[0] < patience or round == self.run.rounds:
            return ""
        return f"no better mean validation accuracy since round {self.best[0]} ({self.best[1]:.4f})"

    def finish(self) -> None:
        """Write what the training ends with."""
        if self.stopped:
            said = f"{self.entry.name}: stopped after round {self.federation.round}, {self.stopped}"
            self.console.print(said, highlight=False)
        rounds = self.federation.round
        saved = None if self.best_round is None else self._go_back(self.best_round)
        shared = None if self.every_model else self.federation.shared()
        if shared is not None:
            save_models(self.method.model, self.place, self.entry.name, shared)
        if not self.every_model and self.run.save_models == "auto":
            written = "the model that all clients share" if shared is not None else "no model"
            text = (
                f"{self.entry.name}: over {MANY:,} clients, so {written} is written; --save-models all writes every one"
            )
            self.console.print(text, highlight=False)
        result = {"method": self.entry.name, "title": self.entry.title, "rounds": rounds}
        if saved is not None:
            result["saved_round"] = saved
        if self.best is not None:
            result["best"] = {"round": self.best[0], "validation": self.best[1]}
        result |= {"evaluates": self.method.evaluates, "bytes": dataclasses.asdict(self.federation.traffic)}
        result |= {"clients": by_client(self.values), "parameters": self.method.model.P}
        if self.federation.faults != Faults():
            result["faults"] = tally(read(self.place / ROUNDS))
        files.save_tree(self.place / SERVER, self.federation.server)
        files.write_json(self.place / "result.json", result)
        forget_best(self.place)

    def _go_back(self, best: BestRound) -> int | None:
        """To the round with the best models, which are scored once more and saved; None where it is lost."""
        traffic, round = self.federation.traffic, self.best[0] if self.best else 0
        try:
            there = round == self.federation.round or best.restore(self.federation, round)
        except Problem as problem:
            forget_best(self.place)
            raise Problem(f"{problem}; `perfed resume` trains on, and saves the last round's models") from None
        self.federation.traffic = traffic  # of all rounds
        save = _saver(self.method.model, self.place) if self.every_model else None
        self.values = self.federation.evaluate(save, self.run.scores != "none")
        about = f"of round {round}, the best on validation samples" if there else f"of the last round: {round} is lost"
        self.console.print(f"{self.entry.name}: the models are those {about}", highlight=False)
        return round if there else None


class Batch:
    """Jobs that are trained as one, each as long as it needs to be."""

    def __init__(self, jobs: list[Job]):
        # All batches there were stay: an engine knows its records by the address of the clients' tables they read,
        # which therefore must not be given to other tables.
        self._made: list[Together] = []
        self.jobs: list[Job] = []
        self.keep(jobs)

    def keep(self, jobs: list[Job]) -> None:
        """Go on with these alone."""
        if jobs == self.jobs:
            return
        self.jobs, self.engine = jobs, None
        if len(jobs) > 1:
            self.engine = Together([job.engine for job in jobs])  # pyright: ignore[reportArgumentType]
            self._made.append(self.engine)

    def step(self) -> list[list[int]]:
        """One round of each; returns who took part."""
        federations = [job.federation for job in self.jobs]
        return step_together(federations, self.engine) if self.engine else [federations[0].step()]

    def evaluate(self, last: bool) -> dict[Path, str]:
        """Score every job's models; after the last round, save them. Returns runs that diverged."""
        diverged = self.check() if last else {}
        if not self.jobs:
            return diverged
        federations, savers = [job.federation for job in self.jobs], [job.saver(last) for job in self.jobs]
        full = self.jobs[0].run.scores == "every" or (last and self.jobs[0].run.scores == "last")
        found = (
            evaluate_together(federations, self.engine, savers, full)
            if self.engine
            else [federations[0].evaluate(savers[0], full)]
        )
        values = dict(zip(self.jobs, found, strict=True))
        diverged |= self.check()
        for job in self.jobs:
            job.judge(values[job])
            if job.stopped:  # known only now that the models are scored
                job.values = job.federation.evaluate(job.saver(True), job.run.scores != "none")
        return diverged

    def check(self) -> dict[Path, str]:
        """Let go of runs that diverged; returns them."""
        diverged = {}
        for job in self.jobs:
            try:
                job.federation.check()
            except Diverged as problem:
                diverged[job.place.parent] = str(problem)
        self.keep([job for job in self.jobs if job.place.parent not in diverged])
        return diverged


def _train(jobs: list[Job], console: Console) -> dict[Path, str]:
    """All rounds of one job, or of several whose cohorts are one batch; returns runs that diverged, and how."""
    if len({job.federation.round for job in jobs}) > 1:  # interrupted between two checkpoints: each goes on by itself
        return {folder: why for job in jobs for folder, why in _train([job], console).items()}
    run, title = jobs[0].run, jobs[0].entry.title + (f" x {len(jobs)}" if len(jobs) > 1 else "")
    diverged: dict[Path, str] = {}
    batch = Batch(jobs)
    try:
        with ProgressLine(console, title, run.rounds, jobs[0].federation.round) as progress:
            while batch.jobs:
                began = time.monotonic()
                cohorts = dict(zip(batch.jobs, batch.step(), strict=True))
                round = batch.jobs[0].federation.round
                last = round == run.rounds
                due = last or round % run.eval_every == 0
                if due:
                    diverged |= batch.evaluate(last)
                elif round % run.checkpoint_every == 0 or not jobs[0].experiment.device.startswith("cuda"):
                    diverged |= batch.check()
                seconds = (time.monotonic() - began) / len(cohorts)
                stopped = {job: job.stopped if due else "" for job in batch.jobs}
                left = [job for job in batch.jobs if not last and not stopped[job]]
                for job in batch.jobs[:1]:
                    progress.see(Round(job.federation, cohorts[job], job.values if due else None, seconds, not left))
                for job in batch.jobs:
                    values, over = job.values if due else None, job not in left
                    event = Round(job.federation, cohorts[job], values, seconds, over, stopped[job])
                    for observer in job.watching:
                        observer.see(event)
                    if over:
                        job.finish()
                batch.keep(left)
    except Diverged as problem:  # in the middle of a round: of a run that was alone
        diverged[batch.jobs[0].place.parent] = str(problem)
    finally:
        for job in jobs:
            job.engine.close()
    return diverged


def budget(megabytes: int, device: torch.device) -> tuple[int | None, ...]:
    """Bytes of clients' states on each device: half of what a GPU has free, then the host's."""
    host = megabytes * 10**6 or None
    return (torch.cuda.mem_get_info(device)[0] // 2, host) if device.type == "cuda" else (host,)


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


def load_network(folder: Path) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """The network of a run folder and what its samples look like."""
    config, about = read_config(folder), read_clients(folder)
    return make_network(config.model, tuple(about["shape"]), about["classes"]), about
