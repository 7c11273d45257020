"""From a configuration to an experiment: data, network, methods, device and engine; and to a folder for its results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from perfed import __version__
from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.errors import Problem, SettingsProblem, few
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.networks import Networks
from perfed.core.rates import Rates
from perfed.core.task import Task
from perfed.data import load
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.data.normalise import resolve
from perfed.data.strata import stratum_counts, stratum_names
from perfed.federation.config import SystemConfig
from perfed.federation.faults import Faults, refuse_pointless
from perfed.federation.federation import cohort_size
from perfed.federation.optimizers import ServerOptimizer
from perfed.federation.system import System
from perfed.models import build, suits
from perfed.models.shares import Shares, share
from perfed.models.trial import unbatchable
from perfed.training import catalog
from perfed.training.config import Config, RunConfig, to_toml
from perfed.training.engine import pick_device, pick_engine
from perfed.training.folder import RunFolder, refuse_equal_names, task_of_run

THREADS = 1  # of each process: results depend on it, so it is the same everywhere
BASELINE = "local"
PUBLIC_SHARE = 0.1  # of the samples that could be trained on, where a method needs public ones and nobody says how many
LARGE = 1e4  # inputs above it are in units that no network begins with
AT_ONCE = 1 << 14  # samples that are looked at together
MAJORITY = 0.8  # share of the test samples in one class above which accuracy says little


@dataclass(frozen=True)
class Experiment:
    """A checked configuration with its data and its network: everything but the training.

    Attributes:
        config: every setting, spelled out.
        clients: their samples, on the device.
        network: builds the network; or the networks, where those of clients differ.
        device: where the training is.
        engine: what carries out the rounds.
        notices: sentences that are said before the training begins.
    """

    config: Config
    clients: Clients
    network: Callable[[], nn.Module] | Shares
    device: str
    engine: str
    notices: tuple[str, ...] = ()

    def method(self, entry: catalog.Entry) -> Method:
        """Return a method with its settings."""
        about = {"class_weights": self.class_weights, "task": self.clients.task}
        return make_method(self.config, entry, self.network, len(self.clients), self.device, **about)

    @cached_property
    def class_weights(self) -> tuple[float, ...] | None:
        """What a sample's loss is multiplied by, for each class; None: nothing."""
        return class_weights(self.config.run, training_labels(self.clients))


def training_labels(clients: Clients) -> list[int]:
    """Count the training samples of each class (or what stands for it), of all clients together."""
    return stratum_counts(clients, "train").sum(axis=0).tolist()


def class_weights(run: RunConfig, counts: Sequence[int]) -> tuple[float, ...] | None:
    """Return weights of classes in the loss; None: they have none.

    Balanced, every class that occurs has the same part in the loss, and a sample weighs 1 on average.

    Args:
        run: says whether classes have weights.
        counts: the training samples of each class.
    """
    if run.class_weights == "none":
        return None
    each = sum(counts) / sum(count > 0 for count in counts)
    return tuple(each / count if count else 0.0 for count in counts)


def make_method(
    config: Config,
    entry: catalog.Entry,
    network: Callable[[], nn.Module] | Shares,
    clients: int,
    device: str = "cpu",
    class_weights: Sequence[float] | None = None,
    task: Task | None = None,
) -> Method:
    """Make a method as a configuration describes it.

    Args:
        config: the configuration.
        entry: which of its methods.
        network: builds the network, or the networks.
        clients: how many there are in all.
        device: where its tensors are.
        class_weights: what a sample's loss is multiplied by, for each class; None: nothing.
        task: what is learned; None: classes.

    Returns:
        The method, with a model of its own.
    """
    run = config.run
    dtype = getattr(torch, run.precision)
    about = {"head": config.model.head, "dtype": dtype, "device": device, "class_weights": class_weights, "task": task}
    if isinstance(network, Shares):
        several = Networks.of_one_width(network.makes, network.of, **about)
        models = several.models
    else:
        several, models = None, (Model(network, **about),)
    kind, settings = entry.load(), config.settings(entry)
    try:
        cohort = cohort_size(clients, run.participation)
        method, *_ = [kind(model, **settings) for model in models]  # it may refuse any of them
        return method.at(seed=run.seed, population=clients, cohort=cohort, networks=several)
    except Problem as problem:
        raise SettingsProblem(str(problem)) from problem
    except TypeError as error:  # a function that it must have is missing, or @dataclass(frozen=True)
        raise Problem(f"'{entry.file}' is not a whole method: {error}") from error


def rates_of(run: RunConfig) -> Rates:
    """Return what a run multiplies learning rates by."""
    return Rates(run.lr_schedule, run.rounds, run.lr_step, run.lr_decay, run.lr_end)


def optimizer_of(run: RunConfig) -> ServerOptimizer | None:
    """Return the optimiser of a run's servers; None: they add the mean of changes as it is."""
    if run.server_optimizer == "none":
        return None
    rate = run.server_rate or (1.0 if run.server_optimizer == "momentum" else 0.01)
    return ServerOptimizer(run.server_optimizer, rate, run.server_momentum, run.server_beta2, run.server_tau)


def _refuse_without_changes(run: RunConfig, methods: Mapping[str, Method]) -> None:
    """Refuse an optimiser of the server where a server does not add the mean of changes, but for the baseline's."""
    if run.server_optimizer == "none":
        return
    others = [name for name, method in methods.items() if not method.averages]
    if len(methods) > 1:
        others = [name for name in others if name != BASELINE]
    if others:
        raise Problem(
            f"run.server_optimizer = {run.server_optimizer} steps along the mean of clients' changes, which the server "
            f"of {', '.join(others)} does not just add: run it with --server-optimizer none"
        )


def faults_of(run: RunConfig) -> Faults:
    """Return the faults that a run simulates."""
    return Faults(run.dropout, run.stragglers, run.straggler_work == "discard")


def system_of(config: SystemConfig) -> System:
    """Return the machines that a run simulates."""
    return System(**vars(config))


def prepare(config: Config) -> Experiment:
    """Load data, build the network, make every method once: what is wrong is refused before anything is written.

    Args:
        config: the configuration; what it leaves open is decided here.

    Returns:
        The experiment, whose configuration spells everything out.
    """
    torch.set_num_threads(THREADS)
    torch.backends.cudnn.deterministic = True  # or a GPU gives another result every time
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.run.tf32
    if config.run.baseline and BASELINE not in [entry.name for entry in config.entries()]:
        config = dataclasses.replace(config, methods=(BASELINE, *config.methods))
    refuse_equal_names(config)
    device = pick_device(config.run.device)
    config, told = _with_public(config)
    clients = augmented(load_clients(config.data, config.run.seed), config.run)
    _refuse_without_scores(config.run, clients)
    model = config.model.renamed(lambda name: name or suits(clients.shape, clients.task.kind))
    names, _ = share(model, clients.names)
    model = model if len(names) > 1 else model.alone(names[0])
    data = dataclasses.replace(config.data, partition=scheme(config.data))
    task = clients.task.kind
    data = dataclasses.replace(data, normalise=resolve(data, clients.shape, task), task=task)
    config = dataclasses.replace(config, data=data, model=model)
    engine = pick_engine(config.run, device, cohort_size(len(clients), config.run.participation))
    network, notices = build(model, clients, config.run.precision), (*told, *clients.notices)
    makes = network.makes.values() if isinstance(network, Shares) else [network]
    dtype = getattr(torch, config.run.precision)
    reasons = (unbatchable(make, clients, dtype) for make in makes if engine == "vectorised")
    why = next(filter(None, reasons), "")
    if why and config.run.engine == engine:
        raise Problem(f"the network cannot be run for many clients at once: {why}; use --engine sequential")
    if why:
        engine, notices = (
            "sequential",
            (*notices, f"clients train one after another, as the network cannot be batched: {why}"),
        )
    experiment = Experiment(config, clients.to(device), network, device, engine)
    methods = {entry.name: experiment.method(entry) for entry in config.entries()}
    for name, method in methods.items():
        refuse_pointless(faults_of(config.run), name, method.epochs)
    _refuse_without_changes(config.run, methods)
    alike = [name for name, method in methods.items() if _starts_alike(method)]
    return dataclasses.replace(experiment, notices=(*notices, *map(_about_starts, alike)))


def _with_public(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with public samples where one of its methods needs them, and what is to be said."""
    needy, data = [entry.name for entry in config.entries() if entry.public], config.data
    if not needy or data.public or data.public_data:
        return config, ()
    data = dataclasses.replace(data, public=PUBLIC_SHARE)
    notice = f"{few(needy)} needs public samples, so data.public is {PUBLIC_SHARE:g}, for all methods of this run"
    return dataclasses.replace(config, data=data), (notice,)


def _starts_alike(method: Method) -> bool:
    """Return True if a method needs models that differ, and two seeds give the same one."""
    several = bool(method.starts) and getattr(method, method.starts) > 1
    return several and torch.equal(method.model.init(0), method.model.init(1))


def _about_starts(method: str) -> str:
    """Say what becomes of a method that needs models with different initial weights, where there are none."""
    return (
        f"{method} begins with several models that must differ, but this network has the same initial weights for "
        "every seed: they stay equal for ever (does its function set a seed or load weights?)"
    )


def _refuse_without_scores(run: RunConfig, clients: Clients) -> None:
    """Refuse what looks at samples or scores that are not there, and a best round that nobody saves."""
    for setting, wanted in (("patience", run.patience > 0), ("save_round = best", run.save_round == "best")):
        if wanted and not len(clients.val.y):
            raise Problem(f"run.{setting} needs validation samples, and no client has one: set data.val above 0")
    task = clients.task
    if run.headline not in ("auto", *task.scores):
        raise Problem(f"run.headline = {run.headline} is no score of {task.in_words}: it has {', '.join(task.scores)}")
    if run.scores == "none" and run.headline != "auto" and task.scores[run.headline].metric in task.whole:
        raise Problem(f"run.headline = {run.headline} needs scores that run.scores = none leaves out")
    if run.class_weights != "none" and task.kind != "classification":
        raise Problem(f"run.class_weights = {run.class_weights} weighs classes, and the task is {task.kind}")
    if run.save_round == "best" and run.save_models == "none":
        raise Problem("run.save_round = best has nothing to save with run.save_models = none")


def load_clients(data: DataConfig, run_seed: int, known: Mapping[str, Any] | None = None) -> Clients:
    """Load clients that can be measured: at least one of them has a test sample.

    Args:
        data: the section `data`.
        run_seed: what draws follow from where `data` has no seed of its own.
        known: the preparation that models were trained with, for newcomers.

    Returns:
        The clients.
    """
    clients = load(data, run_seed if data.partition_seed is None else data.partition_seed, known)
    if not len(clients.train.y):
        raise Problem("no client has a training sample, so nothing can be learned: give the clients more samples")
    if not len(clients.test.y):
        raise Problem("no client has a test sample, so nothing can be measured: give the clients more samples")
    return clients


def augmented(clients: Clients, run: RunConfig) -> Clients:
    """Return clients whose training images change in every batch, where a run says so.

    Args:
        clients: the clients.
        run: says what happens to them.
    """
    if run.augment != "none" and len(clients.shape) != 3:
        raise Problem(f"run.augment = {run.augment} is for images [channels, high, wide], not for {clients.shape}")
    return dataclasses.replace(clients, augment=run.augment)


def create(experiment: Experiment, out: Path | None, newcomers: dict[str, str] | None = None) -> Path:
    """Make a new run folder with everything but results.

    Args:
        experiment: the run.
        out: the folder; None: a new one in ./runs.
        newcomers: where its clients are newcomers, the `run` and the `method` that they came to.

    Returns:
        The folder.
    """
    config = experiment.config
    name = f"{datetime.now():%Y-%m-%d}_{config.data.name}_{config.entries()[-1].name}"
    unique = hashlib.sha256(f"{time.time_ns()}{to_toml(config)}".encode()).hexdigest()[:4]
    folder = RunFolder(out or Path("runs") / f"{name}_{unique}")
    folder.create()
    came_to = {} if newcomers is None else {"newcomers": newcomers}
    folder.write_clients(describe(experiment.clients, experiment.network) | came_to)
    folder.write_environment(environment(experiment))
    picked = dataclasses.replace(config.run, engine=experiment.engine, device=experiment.device)
    config = _spelled_out(dataclasses.replace(config, run=picked))
    folder.write_config(folder.with_copies(config))  # the last of all files
    return folder.path


def reopen(
    config: Config, path: Path, console: Console, change: Callable[[Experiment], Experiment] | None = None
) -> Experiment:
    """Return the experiment of a run folder: as the folder says where it was begun, else a new one.

    Args:
        config: the configuration of a new run.
        path: the folder.
        console: where notices go.
        change: what is done to the experiment first, such as leaving out clients that do not train.
    """
    folder = RunFolder(path)
    begun = folder.begun
    if begun and (came_to := folder.raw_clients().get("newcomers")):
        raise Problem(
            f"'{path}' holds models of newcomers to the run '{came_to['run']}', which are made in one go: there is "
            "nothing to resume"
        )
    experiment = prepare(folder.config() if begun else config)
    experiment = change(experiment) if change else experiment
    if begun:
        check_same(experiment, folder, lambda text: console.print(text, highlight=False))
    else:
        create(experiment, path)
    return experiment


def describe(clients: Clients, network: Any = None) -> dict[str, Any]:
    """Say who the clients are and what a sample looks like; the digest tells whether the data are still the same.

    Args:
        clients: the clients.
        network: that of all, which is not described, or `Shares`.
    """
    listed = []
    names, counts = stratum_names(clients), stratum_counts(clients, *SPLITS)
    for id, name in enumerate(clients.names):
        sizes = {split: clients.split(split).size[id] for split in SPLITS}
        own = {"network": network.name(id)} if isinstance(network, Shares) else {}
        listed.append({"name": name, **own, **sizes, "labels": {}})
    for (id, label), count in zip(np.argwhere(counts).tolist(), counts[counts > 0].tolist(), strict=True):
        listed[id]["labels"][names[label]] = count
    return {
        "shape": list(clients.shape),
        "classes": clients.classes,
        "task": clients.task.plain(),
        "image": clients.train.x.dtype == torch.uint8,
        "tokens": clients.train.x.dtype == torch.int64,
        "mean": _numbers(clients.mean),
        "std": _numbers(clients.std),
        "labels": clients.labels and list(clients.labels),
        "columns": clients.columns and list(clients.columns),
        "partition": clients.partition,
        "preparation": clients.preparation,
        "training_labels": training_labels(clients),
        "majority": _majority(clients),
        "digest": _digest(*map(clients.split, SPLITS)),
        **({} if clients.public is None else {"public": _about_public(clients.public)}),
        "clients": listed,
    }


def _about_public(public: Split) -> dict[str, Any]:
    return {"samples": len(public.y), "labelled": public.labelled, "digest": _digest(public)}


def _digest(*splits: Split) -> str:
    """Return the SHA-256 of samples and labels."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (split.x, split.y):
            digest.update(tensor.cpu().contiguous().flatten().numpy().data)
    return digest.hexdigest()


def about_inputs(clients: Clients) -> str:
    """Say where training inputs are so large that no learning rate suits them; empty where none is."""
    if clients.train.x.dtype == torch.int64:  # tokens
        return ""
    x, largest, place = clients.train.x.flatten(1), 0.0, (0, 0)
    for first in range(0, len(x), AT_ONCE):
        piece = clients.ready(clients.train.x[first : first + AT_ONCE], torch.float64).flatten(1).abs()
        if float(piece.max()) > largest:
            largest, where = float(piece.max()), int(piece.argmax())
            place = first + where // piece.shape[1], where % piece.shape[1]
    if largest <= LARGE:
        return ""
    row, feature = place
    owner = next(id for id, first in enumerate(clients.train.start) if row < first + clients.train.size[id])
    column = f"feature {feature}" if clients.columns is None else f"column '{clients.columns[feature]}'"
    return f"inputs reach {largest:.0e} (client '{clients.names[owner]}', {column}): scale them"


def class_names(clients: Clients) -> list[str]:
    """Return what the classes are called: their numbers, where the data have no names."""
    return list(clients.labels or map(str, range(clients.task.outputs)))


def known_labels(about: dict[str, Any]) -> list[str]:
    """Return what a run's classes are called, of what `describe` said about its clients."""
    return list(about["labels"] or map(str, range(task_of_run(about).outputs)))


def headline(run: RunConfig, about: dict[str, Any]) -> str:
    """Return the name of the score that a run's methods are judged by, a key of its task's `scores`.

    Where the run does not name it, another one if more than 80 % of all test samples are alike (of classes balanced
    accuracy, of labels AUC).

    Args:
        run: the run's settings.
        about: its clients, as its folder describes them.
    """
    task = task_of_run(about)
    if run.headline != "auto":
        return run.headline
    uneven = task.uneven and run.scores != "none" and about.get("majority", {"pooled": 0.0})["pooled"] > MAJORITY
    return task.uneven if uneven else task.headline


def _majority(clients: Clients) -> dict[str, Any]:
    """Say how far one class outnumbers the others among the test samples: what decides the headline of a run.

    Of several labels it is said how many are there, and how many are not.
    """
    kind, names = clients.task.kind, ["absent", "there"]
    if kind in ("classification", "binary"):
        counts, names = stratum_counts(clients, "test"), stratum_names(clients)
    elif kind == "multilabel":
        there = np.array([int(y.sum()) for y in clients.test.y.cpu().split(list(clients.test.size))])
        counts = np.stack([np.array(clients.test.size) * clients.task.outputs - there, there], 1)
    else:
        return {"label": "", "pooled": 0.0, "clients": 0}
    most = int(counts.sum(axis=0).argmax())
    each = counts[:, most] / np.maximum(counts.sum(axis=1), 1)
    pooled = float(counts[:, most].sum() / counts.sum())
    return {"label": names[most], "pooled": pooled, "clients": int((each > MAJORITY).sum())}


def _numbers(tensor: Tensor | None) -> list[float] | None:
    return None if tensor is None else tensor.flatten().tolist()


def check_same(experiment: Experiment, folder: RunFolder, notice: Callable[[str], None]) -> None:
    """Refuse to go on with other data than a run was begun with; other versions are worth a line.

    Args:
        experiment: the run as it is now.
        folder: the run as it was.
        notice: is told what may change results in their last bits.
    """
    before, now = folder.raw_clients(), json.loads(json.dumps(describe(experiment.clients, experiment.network)))
    if before.get("labels") is None and now["labels"] == known_labels({**now, "labels": None}):
        now["labels"] = None  # before perfed 0.2, labels that are whole numbers had no names
    if differ := ", ".join(key for key in before if not _as_before(before[key], now.get(key))):
        raise Problem(f"the data of '{folder.path}' are no longer what they were (different: {differ})")
    versions = folder.environment().get("versions", {})
    for name, version_now in environment(experiment)["versions"].items():
        if versions.get(name) != version_now:
            notice(f"{name} was {versions.get(name)}, now {version_now}: results may differ in the last bits")


def _as_before(before: Any, now: Any) -> bool:
    """Return True if plain values are what they were; keys that an older perfed did not write do not count."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _as_before(value, now[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_as_before, before, now))
    return before == now


def _spelled_out(config: Config) -> Config:
    """Spell every hyper-parameter of every method out."""
    spelled = {}
    for entry in config.entries():
        defaults = {key: field.default for key, field in entry.fields.items()}
        spelled[entry.name] = defaults | config.settings(entry)
    return dataclasses.replace(config, method=spelled, train={})


def environment(experiment: Experiment) -> dict[str, Any]:
    """Say where a run is made: what its numbers depend on."""
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
