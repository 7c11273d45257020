"""The configuration of a run: dataclasses, read from TOML and from the command line, checked without torch."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from perfed import wire
from perfed.core.errors import Problem, nearest
from perfed.core.fields import checked, convert, hyper
from perfed.data.catalog import with_scenario
from perfed.data.config import DataConfig
from perfed.federation.config import SystemConfig
from perfed.models.config import ModelConfig
from perfed.training import catalog

# Settings that have no effect unless another has one of some values.
BELONGS = {
    "lr_step": ("lr_schedule", ("step",)),
    "lr_decay": ("lr_schedule", ("step",)),
    "lr_end": ("lr_schedule", ("cosine", "linear")),
    "server_rate": ("server_optimizer", ("momentum", "adam", "yogi", "adagrad")),
    "server_momentum": ("server_optimizer", ("momentum", "adam", "yogi", "adagrad")),
    "server_beta2": ("server_optimizer", ("adam", "yogi")),
    "server_tau": ("server_optimizer", ("adam", "yogi", "adagrad")),
}


@dataclass(frozen=True)
class RunConfig:
    """Say how the training is carried out."""

    rounds: int = hyper(25, "communication rounds", at_least=1, at_most=1_000_000)
    participation: float = hyper(1.0, "share of the clients that take part in a round", above=0, at_most=1)
    dropout: float = hyper(0.0, "share of a round's clients that never answer", at_least=0, below=1)
    stragglers: float = hyper(
        0.0, "share of the others that finish only 1 to E of their E local epochs", at_least=0, at_most=1
    )
    straggler_work: Literal["use", "discard"] = hyper("use", "what becomes of the work of stragglers")
    seed: int = hyper(0, "seed of everything random", at_least=0, at_most=2**31)
    lr_schedule: Literal["constant", "step", "cosine", "linear"] = hyper(
        "constant", "what becomes of every method's lr from round to round; its other rates stay"
    )
    lr_step: int = hyper(10, "rounds between two drops of the schedule 'step'", at_least=1, at_most=1_000_000)
    lr_decay: float = hyper(0.5, "what the schedule 'step' multiplies lr by at each drop", above=0, at_most=1)
    lr_end: float = hyper(0.0, "share of lr that 'cosine' and 'linear' fall towards", at_least=0, at_most=1)
    augment: Literal["none", "flip", "crop", "crop-flip"] = hyper(
        "none", "training images, anew in every batch: mirrored at random, cropped out of a border of 4 pixels, or both"
    )
    server_optimizer: Literal["none", "momentum", "adam", "yogi", "adagrad"] = hyper(
        "none", "the server's step along the mean of clients' changes: FedAvgM, FedAdam, FedYogi, FedAdagrad"
    )
    server_rate: float = hyper(
        0.0, "learning rate of server_optimizer (0: 1 with momentum, else 0.01)", at_least=0, at_most=1_000_000
    )
    server_momentum: float = hyper(
        0.9, "share of its last direction that server_optimizer keeps, beta_1 of those that adapt", at_least=0, below=1
    )
    server_beta2: float = hyper(
        0.99, "share of the second moment that the server's adam and yogi keep", at_least=0, below=1
    )
    server_tau: float = hyper(0.001, "what an adapting server adds to the root of the second moment", above=0)
    engine: Literal["auto", "sequential", "workers", "vectorised"] = hyper("auto", "how a round is computed")
    workers: int = hyper(0, "processes of the engine 'workers' (0: one per core)", at_least=0, at_most=256)
    block: int = hyper(0, "clients at once in the engine 'vectorised' (0: the whole cohort)", at_least=0, at_most=10**9)
    compile: bool = hyper(False, "compile the steps of the engine 'vectorised' with torch.compile")
    fast: bool = hyper(True, "on a GPU: kernels for whole cohorts and recorded steps; off: PyTorch's own operations")
    tf32: bool = hyper(True, "on a GPU: faster matrix products that keep 10 bits of the mantissa")
    device: str = hyper("auto", "cpu, cuda, or auto: cuda where there is one")
    precision: Literal["float32", "float64"] = hyper("float32", "numbers that models are made of")
    eval_every: int = hyper(
        1, "rounds between evaluations; the last round is always evaluated", at_least=1, at_most=10**9
    )
    patience: int = hyper(
        0, "stop after so many rounds without a better mean validation score (0: never)", at_least=0, at_most=10**9
    )
    scores: Literal["last", "every", "none"] = hyper(
        "last", "balanced accuracy, macro-F1, AUC, R2 and the like: at the last evaluation, at every one, or never"
    )
    train_scores: bool = hyper(False, "evaluations score the training samples, too: training loss and accuracy")
    headline: Literal[
        "auto",
        "accuracy",
        "balanced",
        "f1",
        "auc",
        "average_precision",
        "absolute_error",
        "squared_error",
        "r2",
        "perplexity",
    ] = hyper(
        "auto",
        "what methods are judged by, a score of the task; auto: its first, but balanced accuracy (of labels AUC) where "
        "over 80 % of all test samples are of one class",
    )
    class_weights: Literal["none", "balanced"] = hyper(
        "none",
        "weight of a sample in the loss; balanced: all classes count alike over the training samples of all clients",
    )
    wire: str = hyper("identity", "what happens to uploads on their way: see `perfed list wire`")
    quorum: float = hyper(
        0.5, "share of those asked who must send something usable, else a round is abandoned", at_least=0, at_most=1
    )
    baseline: bool = hyper(True, "also train Local, which every method's gain is measured against")
    state_memory: int = hyper(
        4096, "MB of clients' states kept in memory, the rest on disk (0: no limit)", at_least=0, at_most=10**9
    )
    save_models: Literal["auto", "all", "none"] = hyper(
        "auto", "a file for every client's model; auto: up to 1,000 clients, one file where all share a model"
    )
    save_round: Literal["auto", "last", "best"] = hyper(
        "auto", "whose models are saved: the last round's, or the best on validation samples (auto: best with patience)"
    )
    checkpoint_every: int = hyper(5, "rounds between checkpoints", at_least=1, at_most=10**9)

    def __post_init__(self) -> None:
        checked(self, "run")
        object.__setattr__(self, "wire", self.wire.replace("_", "-"))  # as every name of a member
        for name, (owner, values) in BELONGS.items():
            if (
                getattr(self, name) != type(self).__dataclass_fields__[name].default
                and getattr(self, owner) not in values
            ):
                raise Problem(f"run.{name} belongs to run.{owner} = {' or '.join(values)}, not {getattr(self, owner)}")


# Settings of a run that say where and how it is computed and what is kept of it, never what comes out of it. Not here:
# eval_every (which evaluations there are), precision and tf32 (numbers are rounded elsewhere).
NEUTRAL = {"engine", "workers", "block", "compile", "fast", "device"}
NEUTRAL |= {"state_memory", "save_models", "checkpoint_every", "scores", "train_scores", "headline"}
DEFAULT_METHODS = ("local", "fedavg", "pgfed")
SECTIONS: dict[str, type] = {"data": DataConfig, "model": ModelConfig, "run": RunConfig, "system": SystemConfig}
TABLES = ("methods", *SECTIONS, "train", "method")  # what a configuration may say


@dataclass(frozen=True)
class Config:
    """A whole run: its methods, with their own settings, on a data set with a network.

    Attributes:
        methods: their names, or paths of files.
        data: the section `data`.
        model: the section `model`.
        run: the section `run`.
        system: the section `system`.
        train: settings of every method.
        method: settings of a single method, by its name; they go before those of all.
    """

    methods: tuple[str, ...] = DEFAULT_METHODS
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    train: dict[str, Any] = field(default_factory=dict)
    method: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settings(self, entry: catalog.Entry) -> dict[str, Any]:
        """Return a method's hyper-parameters: its own before those of all."""
        return {**self.train, **self.method.get(entry.name, {})}

    def entries(self) -> list[catalog.Entry]:
        """Look the methods of this run up; refuse what is none."""
        return [catalog.find(name) for name in self.methods]


def from_dict(raw: dict[str, Any]) -> Config:
    """Make a Config of nested plain values, as TOML gives them; refuse wrong keys and values."""
    _refuse_unknown(raw, TABLES)
    parts: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = _table(raw.get(name, {}), name)
        _refuse_unknown(section, [setting.name for setting in dataclasses.fields(kind)], f"{name}.")
        parts[name] = kind(**(with_scenario(section) if name == "data" else section))
    wire.check(parts["run"].wire)
    names = _names(raw)
    config = Config(tuple(dict.fromkeys(names)), train=_table(raw.get("train", {}), "train"), **parts)
    entries = {entry.name: entry for entry in config.entries()}
    if len(entries) < len(config.methods):
        raise Problem("two of the methods have the same name")
    if "local" in entries and not entries["local"].shipped:
        raise Problem("a method's file cannot be called local.py: that is what every method is measured against")
    for entry in entries.values():
        taken = [key for key in entry.fields if key in flags()]
        if taken:
            raise Problem(
                f"method '{entry.name}' calls a setting '{taken[0]}', which is an option of every run: rename it"
            )
    common = catalog.common()
    _refuse_unknown(config.train, common, "train.")
    train = {
        key: convert(value, common[key].kind, common[key].bounds, f"train.{key}") for key, value in config.train.items()
    }
    own = {name: _table(table, f"method.{name}") for name, table in _table(raw.get("method", {}), "method").items()}
    for name in own:
        if name not in entries:
            raise Problem(f"settings for method '{name}', which is not in this run{nearest(name, entries)}")
    own = {name: entries[name].check(table) for name, table in own.items()}
    return dataclasses.replace(config, train=train, method=own)


def _refuse_unknown(table: dict[str, Any], known: Collection[str], section: str = "") -> None:
    """Refuse keys that are no settings."""
    for key in table:
        if key not in known:
            raise Problem(f"there is no setting '{section}{key}'{nearest(key, known)}")


def _names(raw: dict[str, Any]) -> list[str]:
    """Return the names of the methods; refuse anything but a list of text."""
    names = raw.get("methods", list(DEFAULT_METHODS))
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise Problem(f"methods must be a list of method names, not {names!r}")
    return names


def _table(value: Any, where: str) -> dict[str, Any]:
    """Return a table of settings; refuse anything else."""
    if not isinstance(value, dict):
        raise Problem(f"'{where}' must be a table of settings, not {value!r}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested plain values."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"), path)
    except (FileNotFoundError, IsADirectoryError):
        raise Problem(f"there is no configuration file '{path}'") from None
    except UnicodeDecodeError as error:
        raise Problem(f"'{path}' is not valid TOML: {error}") from None


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Read the text of a TOML file as nested plain values."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, brackets without end
        raise Problem(f"'{path}' is not valid TOML: {error}") from None


def assign(raw: dict[str, Any], text: str) -> None:
    """Apply `a.b=c` to nested values; `lr=0.1` is train.lr, `pgfed.mu=0.1` is method.pgfed.mu."""
    path, equals, value = text.partition("=")
    keys = [key.strip().replace("-", "_") for key in path.split(".")]
    if not equals or not all(keys):
        raise Problem(f"--set takes section.key=value, not '{text}'")
    if keys[0] not in TABLES:
        if len(keys) == 1 and keys[0] in catalog.common():
            keys = ["train", *keys]
        elif len(keys) == 2 and keys[0] in catalog.names():
            keys = ["method", *keys]
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise Problem(f"--set {text}: '{key}' is not a table of settings")
    table[keys[-1]] = [name.strip() for name in value.split(",")] if keys == ["methods"] else _plain(value.strip())


def _plain(text: str) -> Any:
    """Read text from the command line as TOML would; what TOML cannot read stays text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def to_toml(config: Config) -> str:
    """Write a whole configuration as TOML, every value spelled out."""
    lines = [f"methods = [{', '.join(map(_toml, config.methods))}]"]
    tables = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    tables |= {"train": config.train} | {f"method.{_toml(name)}": table for name, table in config.method.items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Write a plain value as TOML: as JSON does, but for what JSON would escape in pairs, or leave as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# What a new folder holds until its last file is written, which is its configuration, or a comparison's plan.
FIRST = ".lock"
BETWEEN = {FIRST, "files", "clients.json", "env.json", "compare.toml"}


def is_leftover(folder: Path) -> bool:
    """Tell a folder of a run that was killed while the folder was made: nothing in it is worth anything."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    names = {path.name for path in folder.iterdir()}
    ours = {name for name in names if name in BETWEEN or (name.startswith(".") and name.endswith(".tmp"))}
    return FIRST in names and names == ours and not (folder / FIRST).is_symlink()


def refuse_taken(folder: Path | None) -> None:
    """Refuse a folder that is not empty: a run's is new. What a killed run left behind does not count."""
    if folder is None or not folder.exists() or is_leftover(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise Problem(f"'{folder}' exists already; choose another --out, or continue it with `perfed resume {folder}`")


def new_folder(folder: Path) -> None:
    """Make the folder of a run or a comparison; refuse a place where that cannot be."""
    refuse_taken(folder)
    try:
        if is_leftover(folder):
            _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FIRST).touch()
    except OSError as error:
        raise Problem(f"cannot make the folder '{folder}': {error.strerror}") from None


def _clear(folder: Path) -> None:
    """Remove what a killed run left in its folder, except the first file; links are removed, not followed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            for copy in path.iterdir():
                copy.unlink()
            path.rmdir()
        elif path.name != FIRST:
            path.unlink()


def _refuse_of_others(name: str, entries: list[catalog.Entry]) -> None:
    """Refuse a setting that methods have which are not in the run; say what those of the run have instead."""
    others = [entry.name for entry in catalog.methods().values() if name in entry.fields]
    if others:
        own = {entry.name: [key for key in entry.fields if key not in catalog.common()] for entry in entries}
        has = [f"{method} has {', '.join(keys) or 'no settings of its own'}" for method, keys in own.items()]
        close = nearest(name, [key for keys in own.values() for key in keys])
        hint = close if "did you mean" in close else ""
        raise Problem(f"'{name}' is a setting of {', '.join(others)}, and {'; '.join(has)}{hint}")


@cache
def flags() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Return the options of the command line that the sections' fields make: name -> (section, field)."""
    options: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section, kind in SECTIONS.items():
        for setting in dataclasses.fields(kind):
            name = {"name": section, "dir": f"{section}_dir"}.get(setting.name, setting.name)
            name = "model_clients" if (section, name) == ("model", "clients") else name  # data has clients, too
            options[name] = (section, setting)
    return options


def place_flags(settings: dict[str, Any], methods: list[str], raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """Put settings with short names where they belong.

    Args:
        settings: values by short names: rounds, data, lr, mu.
        methods: the methods of the run; none: those of `raw`, or the usual ones.
        raw: nested plain values, which the settings go before; it is changed.

    Returns:
        Nested plain values; an unknown name is a Problem.
    """
    raw = {} if raw is None else raw
    if methods:
        raw["methods"] = methods
    owners: dict[str, list[str]] = {}  # the methods that have a setting of this name
    for entry in [catalog.find(name) for name in _names(raw)]:
        for key in entry.fields:
            owners.setdefault(key, []).append(entry.name)
    for name, value in settings.items():
        if name in flags():
            section, setting = flags()[name]
            _table(raw.setdefault(section, {}), section)[setting.name] = value
        elif name in catalog.common():
            _table(raw.setdefault("train", {}), "train")[name] = value
        elif name in owners:
            for method in owners[name]:
                own = _table(raw.setdefault("method", {}), "method").setdefault(method, {})
                _table(own, f"method.{method}")[name] = value
        else:
            _refuse_of_others(name, [catalog.find(method) for method in _names(raw)])
            known = {*flags(), *catalog.common(), *owners}
            raise Problem(f"there is no option '{name}'{nearest(name, known)}")
    return raw
