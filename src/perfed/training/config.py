"""What a run is: dataclasses, read from TOML and from the command line, checked before torch is imported."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfed import wire
from perfed.core.errors import Problem, nearest
from perfed.core.fields import checked, convert, hyper
from perfed.training import catalog


@dataclass(frozen=True)
class DataConfig:
    """Where the clients' samples come from."""

    name: str = hyper("digits", "data set: see `perfed list datasets`; 'folder' for your own files")
    dir: str | None = hyper(None, "folder with data files (default: $PERFED_DATA, then ~/.cache/perfed)")
    partition: str = hyper("", "how one data set becomes clients (default: natural if it has clients, else dirichlet)")
    clients: int = hyper(20, "number of clients (natural partition: at most this many; 0 is all)", at_least=0)
    alpha: float = hyper(0.3, "Dirichlet concentration: small is uneven", above=0)
    cap: bool = hyper(True, "Dirichlet: a client that holds its even part of all samples gets no more")
    classes_per_client: int = hyper(2, "classes each client holds: 'classes', 'uneven', 'pairs', 'ring'", at_least=1)
    share_low: float = hyper(0.3, "'uneven': a client's weight in a class is drawn from U(low, high)", above=0)
    share_high: float = hyper(0.7, "'uneven': the upper end of that range", above=0)
    power_law: float = hyper(1.2, "'powerlaw': sizes in proportion to rank^-a", at_least=0, at_most=20)
    log_sigma: float = hyper(2.0, "'lognormal': sizes in proportion to LogN(0, sigma)", at_least=0, at_most=20)
    min_samples: int = hyper(
        10, "fewest samples of a client: 'dirichlet', 'powerlaw', 'lognormal', 'domains'", at_least=3
    )
    partition_seed: int | None = hyper(None, "seed of the partition (default: run.seed)", at_least=0, at_most=2**31)
    split: Literal["client", "official"] = hyper("client", "split each client's samples, or keep the official test set")
    test: float = hyper(0.25, "share of a client's samples kept for testing", above=0, below=1)
    val: float = hyper(
        0.1, "share kept for validation: of a client's samples, or of official training", at_least=0, below=1
    )
    stratify: bool = hyper(True, "give every class the same shares in training, validation and test")
    normalise: Literal["channel", "half", "none"] = hyper(
        "channel", "images: mean and deviation per channel, or 0.5, 0.5"
    )
    rotate: str = hyper("", "feature skew: turn images by these degrees, one per group of clients: 0,90,180,270")
    noise: float = hyper(0.0, "feature skew: client i of N gets Gaussian noise of deviation noise * i / N", at_least=0)
    relabel: float = hyper(0.0, "preference skew: share of samples whose labels a group renames", at_least=0, at_most=1)
    relabel_by: Literal["permutation", "swap"] = hyper("permutation", "how: all labels, or two labels per group")
    relabel_groups: int = hyper(2, "groups of clients that rename alike", at_least=1)
    team_order: Literal["dealt", "random", "labels"] = hyper(
        "dealt", "who stand side by side, and so form pfedmt's teams"
    )
    client_column: str = hyper("client", "column that names the client, in one table for all clients")
    label_column: str = hyper("label", "column that holds the label, in CSV files")
    synthetic_a: float = hyper(0.5, "Synthetic(a, b): how much the clients' true models differ", at_least=0)
    synthetic_b: float = hyper(0.5, "Synthetic(a, b): how much the clients' inputs differ", at_least=0)
    synthetic_samples: int = hyper(0, "'synthetic': samples of every client (0: log-normal sizes from 250)", at_least=0)

    def __post_init__(self) -> None:
        checked(self, "data")


@dataclass(frozen=True)
class ModelConfig:
    """The network every client trains."""

    name: str = hyper("", "network: see `perfed list models`, or path.py:factory (default: what suits the data)")
    head: str = hyper("", "module that is the head (default: the last one with parameters)")
    hidden: int = hyper(64, "width of the hidden layer of 'mlp'", at_least=1)
    norm: Literal["batch", "group"] = hyper("group", "normalisation of 'resnet'")

    def __post_init__(self) -> None:
        checked(self, "model")


@dataclass(frozen=True)
class RunConfig:
    """How the training is carried out."""

    rounds: int = hyper(25, "communication rounds", at_least=1, at_most=10_000_000)
    participation: float = hyper(1.0, "share of the clients that take part in a round", above=0, at_most=1)
    dropout: float = hyper(0.0, "share of a round's clients that never answer", at_least=0, below=1)
    stragglers: float = hyper(
        0.0, "share of the others that finish only 1 to E of their E local epochs", at_least=0, at_most=1
    )
    straggler_work: Literal["use", "discard"] = hyper("use", "what becomes of the work of stragglers")
    seed: int = hyper(0, "seed of everything random", at_least=0, at_most=2**31)
    engine: Literal["auto", "sequential", "workers", "vectorised"] = hyper("auto", "how a round is computed")
    workers: int = hyper(0, "processes of the engine 'workers' (0: one per core)", at_least=0, at_most=4096)
    block: int = hyper(0, "clients at once in the engine 'vectorised' (0: the whole cohort)", at_least=0)
    compile: bool = hyper(False, "compile the steps of the engine 'vectorised' with torch.compile")
    fast: bool = hyper(True, "on a GPU: kernels for whole cohorts and recorded steps; off: PyTorch's own operations")
    tf32: bool = hyper(True, "on a GPU: faster matrix products that keep 10 bits of the mantissa")
    device: str = hyper("auto", "cpu, cuda, or auto: cuda where there is one")
    precision: Literal["float32", "float64"] = hyper("float32", "numbers that models are made of")
    eval_every: int = hyper(1, "rounds between evaluations; the last round is always evaluated", at_least=1)
    patience: int = hyper(
        0, "stop after so many rounds without a better mean validation accuracy (0: never)", at_least=0
    )
    scores: Literal["last", "every", "none"] = hyper(
        "last", "macro-F1 and AUC: at the last evaluation, at every one, or never"
    )
    train_scores: bool = hyper(False, "evaluations score the training samples, too: training loss and accuracy")
    wire: str = hyper("identity", "what happens to uploads on their way: see `perfed list wire`")
    quorum: float = hyper(
        0.5, "share of those asked who must send something usable, else a round is abandoned", at_least=0, at_most=1
    )
    baseline: bool = hyper(True, "also train Local, which every method's gain is measured against")
    state_memory: int = hyper(4096, "MB of clients' states kept in memory, the rest on disk (0: no limit)", at_least=0)
    save_models: Literal["auto", "all", "none"] = hyper(
        "auto", "a file for every client's model; auto: up to 1,000 clients, one file where all share a model"
    )
    save_round: Literal["auto", "last", "best"] = hyper(
        "auto", "whose models are saved: the last round's, or the best on validation samples (auto: best with patience)"
    )
    checkpoint_every: int = hyper(5, "rounds between checkpoints", at_least=1)

    def __post_init__(self) -> None:
        checked(self, "run")


DEFAULT_METHODS = ("local", "fedavg", "pgfed")
SECTIONS: dict[str, type] = {"data": DataConfig, "model": ModelConfig, "run": RunConfig}


@dataclass(frozen=True)
class Config:
    """A whole run: its methods, with their own settings, on one data set with one model."""

    methods: tuple[str, ...] = DEFAULT_METHODS  # names, or paths of files
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    run: RunConfig = field(default_factory=RunConfig)
    train: dict[str, Any] = field(default_factory=dict)  # settings of every method
    method: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of one method

    def settings(self, entry: catalog.Entry) -> dict[str, Any]:
        """A method's hyper-parameters: its own before those of all."""
        return {**self.train, **self.method.get(entry.name, {})}

    def entries(self) -> list[catalog.Entry]:
        """The methods of this run, found and checked."""
        return [catalog.find(name) for name in self.methods]


def from_dict(raw: dict[str, Any]) -> Config:
    """A Config from nested plain values, as TOML gives them; wrong keys and values raise a Problem."""
    known = ("methods", *SECTIONS, "train", "method")
    for key in raw:
        if key not in known:
            raise Problem(f"there is no setting '{key}'{nearest(key, known)}")
    parts: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = _table(raw.get(name, {}), name)
        fields = [f.name for f in dataclasses.fields(kind)]
        for key in section:
            if key not in fields:
                raise Problem(f"there is no setting '{name}.{key}'{nearest(key, fields)}")
        parts[name] = kind(**section)
    wire.check(parts["run"].wire)
    names = _names(raw)
    config = Config(tuple(dict.fromkeys(names)), train=_table(raw.get("train", {}), "train"), **parts)
    entries = {entry.name: entry for entry in config.entries()}
    if len(entries) < len(config.methods):
        raise Problem("two of the methods have the same name")
    if "local" in entries and entries["local"].file.parent != catalog.HERE / "methods":
        raise Problem("a method's file cannot be called local.py: that is what every method is measured against")
    for entry in entries.values():
        taken = [key for key in entry.fields if key in flags() and key not in catalog.RUN_SETS]
        if taken:
            raise Problem(
                f"method '{entry.name}' calls a setting '{taken[0]}', which is an option of every run: rename it"
            )
    train = {}
    for key, value in config.train.items():
        if key not in catalog.common():
            raise Problem(f"there is no setting 'train.{key}'{nearest(key, catalog.common())}")
        train[key] = convert(value, catalog.common()[key].kind, catalog.common()[key].bounds, f"train.{key}")
    own = {name: _table(table, f"method.{name}") for name, table in _table(raw.get("method", {}), "method").items()}
    for name in own:
        if name not in entries:
            raise Problem(f"settings for method '{name}', which is not in this run{nearest(name, entries)}")
    own = {name: entries[name].check(table) for name, table in own.items()}
    return dataclasses.replace(config, train=train, method=own)


def _names(raw: dict[str, Any]) -> list[str]:
    names = raw.get("methods", list(DEFAULT_METHODS))
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise Problem(f"methods must be a list of method names, not {names!r}")
    return names


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Problem(f"'{where}' must be a table of settings, not {value!r}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested plain values."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise Problem(f"there is no configuration file '{path}'") from None
    except (ValueError, RecursionError) as error:  # not TOML, not text, a number of 5,000 digits, brackets without end
        raise Problem(f"'{path}' is not valid TOML: {error}") from None


def assign(raw: dict[str, Any], text: str) -> None:
    """Apply `a.b=c` to nested values; `lr=0.1` is train.lr, `pgfed.mu=0.1` is method.pgfed.mu."""
    path, equals, value = text.partition("=")
    keys = [key.strip().replace("-", "_") for key in path.split(".")]
    if not equals or not all(keys):
        raise Problem(f"--set takes section.key=value, not '{text}'")
    if keys[0] not in ("methods", *SECTIONS, "train", "method"):
        if len(keys) == 1 and keys[0] in catalog.common():
            keys = ["train", *keys]
        elif len(keys) == 2 and keys[0] in catalog.methods():
            keys = ["method", *keys]
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise Problem(f"--set {text}: '{key}' is not a table of settings")
    table[keys[-1]] = [v.strip() for v in value.split(",")] if keys == ["methods"] else _plain(value.strip())


def _plain(text: str) -> Any:
    """Text from the command line as TOML would read it; what TOML cannot read stays text."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return text


def to_toml(config: Config) -> str:
    """The whole configuration, every value spelled out."""
    lines = [f"methods = [{', '.join(map(_toml, config.methods))}]"]
    tables = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    tables |= {"train": config.train} | {f"method.{_toml(name)}": table for name, table in config.method.items()}
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A plain value as TOML writes it: as JSON does, but for what JSON would escape in pairs, or leave as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def refuse_taken(folder: Path | None) -> None:
    """A run's folder is new or empty."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Problem(f"'{folder}' exists already; choose another --out, or continue it with `perfed resume {folder}`")


def new_folder(folder: Path) -> None:
    """Make the folder of a run or a comparison."""
    refuse_taken(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"cannot make the folder '{folder}': {error.strerror}") from None


def flags() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Options of the command line, made from the dataclass fields: name -> (section, field)."""
    out: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section, kind in SECTIONS.items():
        for one in dataclasses.fields(kind):
            name = {"name": section, "dir": f"{section}_dir"}.get(one.name, one.name)
            out[name] = (section, one)
    return out


def place_flags(settings: dict[str, Any], methods: list[str], raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """Put settings with short names (rounds, data, lr, mu) where they belong; unknown ones raise a Problem."""
    raw = {} if raw is None else raw
    if methods:
        raw["methods"] = methods
    entries = [catalog.find(name) for name in _names(raw)]
    special: dict[str, list[str]] = {}
    for entry in entries:
        for key in entry.fields:
            special.setdefault(key, []).append(entry.name)
    for name, value in settings.items():
        if name in flags():
            section, one = flags()[name]
            _table(raw.setdefault(section, {}), section)[one.name] = value
        elif name in catalog.common():
            _table(raw.setdefault("train", {}), "train")[name] = value
        elif name in special and name not in catalog.RUN_SETS:
            for method in special[name]:
                own = _table(raw.setdefault("method", {}), "method").setdefault(method, {})
                _table(own, f"method.{method}")[name] = value
        else:
            known = {*flags(), *catalog.common(), *special} - set(catalog.RUN_SETS)
            raise Problem(f"there is no option '{name}'{nearest(name, known | {'seed'})}")
    return raw
