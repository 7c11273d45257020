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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from perfed import __version__
from perfed.core.clients import SPLITS, Clients
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.data import load
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.engines import pick_device, pick_engine
from perfed.federation.faults import faults_of, refuse_pointless
from perfed.federation.federation import cohort_size
from perfed.models import build, is_path, make_network, suits
from perfed.models.trial import refuse_mixing
from perfed.training import catalog, files
from perfed.training.config import Config, from_dict, new_folder, read_toml, to_toml

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
    names = [copy(e.file) if not e.shipped else e.name for e in entries]
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


def load_network(folder: Path) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """The network of a run folder and what its samples look like."""
    config, about = read_config(folder), read_clients(folder)
    return make_network(config.model, tuple(about["shape"]), about["classes"]), about
