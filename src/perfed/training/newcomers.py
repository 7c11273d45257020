"""Models for clients that never took part: from a finished run's server, on their own data, sending nothing."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.data import Data
from perfed.core.errors import Problem, few, nearest
from perfed.core.messages import Cohort, Down
from perfed.core.method import Method
from perfed.core.rounds import Known, Phase
from perfed.core.task import Classification, task_of
from perfed.core.tree import tree_map
from perfed.data.catalog import scheme
from perfed.data.config import DataConfig
from perfed.data.table import is_one_client
from perfed.engines.base import Engine, Request
from perfed.federation.config import SystemConfig
from perfed.training.catalog import Entry
from perfed.training.engine import make_engine
from perfed.training.folder import RunFolder, preparation_of
from perfed.training.prepare import (
    BASELINE,
    Experiment,
    augmented,
    class_names,
    class_weights,
    create,
    describe,
    known_labels,
    load_clients,
    make_method,
)
from perfed.training.results import Run
from perfed.training.train import MethodRun, train

HOW_FILES_ARE_READ = ("labels", "task", "label_column", "client_column", "channels")
GENERAL = "general"  # the model that a server has for everybody, beside a newcomer's own


@dataclasses.dataclass(frozen=True)
class Visit(Experiment):
    """A run's method met by newcomers, beside Local of their own: an experiment that has a run folder like any other.

    Attributes:
        run: the finished run that they come to.
        name: the method whose server they meet.
    """

    run: Run = field(kw_only=True)
    name: str = field(kw_only=True)

    @cached_property
    def class_weights(self) -> tuple[float, ...] | None:
        """What the run multiplied a sample's loss by, for each class."""
        return class_weights(self.run.config.run, self.run.about.get("training_labels", ()))

    def method(self, entry: Entry) -> Method:
        """Return a method with its settings; the one that newcomers meet is `visited`."""
        count = len(self.run.about["clients"])
        method = make_method(
            self.config, entry, self.network, count, class_weights=self.class_weights, task=self.clients.task
        )
        if entry.name != self.name or entry.name == BASELINE:
            return method
        return visited(method, self.run.folder.method(self.name).server())


@contextmanager
def as_config(data: Any, name: str, settings: dict[str, Any]) -> Iterator[DataConfig]:
    """Say where newcomers' data are, as a configuration does; a DataFrame is a file for as long as it is read.

    Args:
        data: a file, a folder, a DataFrame, or already a configuration.
        name: what the client of a DataFrame is called, where no column names it.
        settings: settings of the data.
    """
    if isinstance(data, DataConfig):
        yield data
        return
    known = [setting.name for setting in dataclasses.fields(DataConfig)]
    for key in settings:
        if key not in known:
            raise Problem(f"there is no setting 'data.{key}'{nearest(key, known)}")
    write = getattr(data, "to_csv", None) or getattr(data, "write_csv", None)  # pandas, polars
    if write is None:
        yield DataConfig(name="folder", dir=str(data), **settings)
        return
    if not name or Path(name).name != name:
        raise Problem(f"a client cannot be called '{name}' here: that is no name of a file")
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.csv"
        write(path, **({"index": False} if hasattr(data, "to_csv") else {}))
        yield DataConfig(name="folder", dir=str(path), **settings)


def _as_the_run_reads(data: DataConfig, run: DataConfig) -> DataConfig:
    """Return the configuration; what it leaves open of how files are read is as in the run."""
    usual = DataConfig()
    open_still = [key for key in HOW_FILES_ARE_READ if getattr(data, key) == getattr(usual, key)]
    data = dataclasses.replace(data, **{key: getattr(run, key) for key in open_still})
    data = dataclasses.replace(data, partition=scheme(data), normalise=run.normalise)
    return dataclasses.replace(data, client_column="") if is_one_client(data) else data


def personalise(
    run: Run, name: str, data: DataConfig, rounds: int, fine_tune: int, out: Path | None, console: Console
) -> Path:
    """Train a model for every client of `data`, and Local beside it, into a run folder of their own.

    Args:
        run: a finished run.
        name: one of its methods.
        data: the newcomers' data.
        rounds: how often each newcomer trains as the method's clients do.
        fine_tune: further epochs of plain local training for the models that are saved.
        out: the folder to make; None: a new one in ./runs.
        console: where progress goes.

    Returns:
        The folder. Each newcomer has the scores of its own model, of the method's general one (`general`), and of
        Local's, which trained as long as the run did.
    """
    before = run.result(name)["rounds"]
    if run.networks:
        raise Problem(
            f"the clients of '{run.path}' have networks that differ ({', '.join(run.networks.makes)}), and none of "
            "them is a newcomer's: train a run with one network for newcomers"
        )
    visit = _prepare(run, name, data, fine_tune)
    visit.method(run.entries[name])  # refuses what has nothing to send to newcomers, before anything is written
    folder = create(visit, out, newcomers={"run": str(run.path.resolve()), "method": name})
    try:
        if name != BASELINE:
            _visit(MethodRun(visit, run.entries[name], RunFolder(folder), console), before, rounds)
        train([visit], [folder], console)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # there is no resuming it
        raise
    return folder


def _prepare(run: Run, name: str, data: DataConfig, fine_tune: int) -> Visit:
    """Make the experiment: the run's settings on the newcomers' data, everybody in every round."""
    data = _as_the_run_reads(data, run.config.data)
    clients = augmented(load_newcomers(run, data), run.config.run)
    entry = run.entries[name]
    if entry.public:
        clients = dataclasses.replace(clients, public=_public(run))
    settings = run.config.settings(entry) | {"fine_tune": fine_tune}
    own = {key: value for key, value in run.config.method.items() if key == BASELINE} | {name: settings}
    names = [BASELINE, *([] if name == BASELINE else [name if entry.shipped else str(entry.file)])]
    usual = {"participation": 1.0, "dropout": 0.0, "stragglers": 0.0, "patience": 0, "save_round": "last"}
    usual |= {"engine": "sequential", "device": "cpu", "baseline": True, "save_models": "auto"}
    config = dataclasses.replace(
        run.config,
        methods=tuple(names),
        method=own,
        data=data,
        run=dataclasses.replace(run.config.run, **usual),
        system=SystemConfig(),
    )
    return Visit(config, clients, run.network, "cpu", "sequential", clients.notices, run=run, name=name)


def _public(run: Run) -> Split | None:
    """Return the run's public samples, which its method knows by their places."""
    clients, about = load_clients(run.config.data, run.config.run.seed), run.about.get("public")
    if clients.public is None or describe(clients)["public"] != about:
        raise Problem(f"the public samples of '{run.path}' are no longer what they were")
    return clients.public


def _visit(run: MethodRun, before: int, rounds: int) -> None:
    """Let all newcomers train and be scored; what they would send goes nowhere."""
    engine = make_engine("sequential", [run.job()], run.config)
    try:
        run.begin(engine, 0)
        federation = run.federation
        federation.round = before  # which their randomness follows from
        names, began, cohort = federation.clients.names, time.monotonic(), []
        for _ in range(rounds):
            cohort = federation.step(range(len(names)))
            for refusal in federation.look():
                why = f"{refusal.tensor}: {refusal.reason}" if refusal.tensor else refusal.reason
                raise Problem(f"the newcomer '{names[refusal.client]}' could not train: {why}")
        run.judge(federation.evaluate(run.saver(True), run.config.scores != "none"))
        run.tell(cohort, True, time.monotonic() - began, True)
        run.finish()
    finally:
        engine.close()


def _general(method: Method, server: Any) -> dict[str, Tensor]:
    """Return the model that a server has for everybody, if that is a whole one."""
    try:
        theta = method.global_model(server)
    except Problem:
        return {}
    return {GENERAL: theta} if theta.shape == (method.model.width,) else {}


def visited(method: Method, server: Any) -> Method:
    """Return a method whose server stays as it is, and sends to everybody what it sends to newcomers.

    Args:
        method: the method.
        server: its state after a run.

    Returns:
        The method; its clients' models are scored beside the `general` one, where the server has that.
    """
    down = method.newcomer(server)
    kind: Any = type(method)
    general = _general(method, server)

    @dataclasses.dataclass(frozen=True)
    class Visited(kind):
        @property
        def one_for_all(self) -> bool:
            return False  # each has its own beside the general one

        def init_server(self, _clients: int, /) -> Any:
            return server

        def broadcast(self, _server: Any, ids: Tensor, /) -> Down:
            return Down(down.shared, tree_map(lambda t: torch.stack([t] * len(ids)), down.own))

        def show(self, server: Any, ids: Tensor, /) -> Down:
            return self.broadcast(server, ids)

        def aggregate(self, server: Any, _cohort: Cohort, /) -> Any:
            return server

        def refine(self, server: Any, _cohort: Cohort | None, _public: Data, /) -> Any:
            return server

        def before_round(self, server: Any, _info: Known, /) -> Any:
            return server

        def phase(self, server: Any, /) -> Phase:
            return Phase(first=super().phase(server).first)

        def cohort_of(self, _server: Any, info: Known, /) -> list[int]:
            return info.draw()

        def extra_traffic(self, _server: Any, /) -> dict[str, int]:
            return {}

        def notes(self, _server: Any, /) -> dict[str, Any]:
            return {}

        def models(self, client: Any, down: Down, data: Data) -> dict[str, Tensor]:
            return general | super().models(client, down, data)

    Visited.__name__ = Visited.__qualname__ = kind.__name__
    settings = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return Visited(**settings).at(seed=method.context.seed)


def load_newcomers(run: Run, data: DataConfig) -> Clients:
    """Load new clients' data in the form that a run's models know.

    Args:
        run: a finished run, whose statistics and texts they get.
        data: where the newcomers' data are, to be normalised as the run's are.
    """
    table = len(run.about["shape"]) == 1
    data = dataclasses.replace(data, normalise=run.config.data.normalise if table else "channel")
    preparation = preparation_of(run.about)
    known = {} if preparation is None else preparation.plain()
    known |= run.about.get("preparation") or {}
    return as_in_training(load_clients(data, run.config.run.seed, known or None), run.about)


def visit(engine: Engine, down: Down, round: int) -> None:
    """Let every client of an engine's only run train once; what they would send goes nowhere.

    Args:
        engine: whoever has the clients.
        down: what they receive; `own` has a row for each.
        round: the round's number, which their randomness follows from.
    """
    names = engine.infos[0].names
    (reply,) = engine.exchange([Request(0, round, 0, range(len(names)), down)])
    spoiled = [
        (id, reply.tensors[place]) for id, place in zip(reply.ids, reply.spoiled.tolist(), strict=True) if place >= 0
    ]
    for id, reason, _ in reply.failures:
        raise Problem(f"the newcomer '{names[id]}' could not train: {reason}")
    for id, tensor in spoiled:
        raise Problem(f"training of the newcomer '{names[id]}' diverged: {tensor} holds numbers that are not finite")
    reply.settle(None)


def as_in_training(clients: Clients, about: dict[str, Any]) -> Clients:
    """Bring new clients' samples into the form that a run's models know, or refuse them.

    Args:
        clients: the newcomers.
        about: the run's clients, as its folder describes them.

    Returns:
        The newcomers with columns, labels and scale as in training.
    """
    if clients.shape != tuple(about["shape"]):
        raise Problem(f"the new clients' samples have shape {clients.shape}, the run's {tuple(about['shape'])}")
    if (clients.train.x.dtype == torch.uint8) != about["image"]:
        raise Problem("the run was trained on images of bytes and the new samples are not, or the other way round")
    scale = {key: None if about[key] is None else torch.tensor(about[key]).view(-1, 1, 1) for key in ("mean", "std")}
    splits = {name: clients.split(name) for name in SPLITS}
    if clients.task.kind != "classification":
        labels = _other_labels(clients, about)
        return dataclasses.replace(clients, **scale, task=task_of(about["task"]), labels=labels)
    if clients.labels is not None or about["labels"] is not None:
        number = torch.tensor(_places(class_names(clients), known_labels(about), "label"))
        splits = {name: dataclasses.replace(s, y=number[s.y]) for name, s in splits.items()}
    elif clients.classes > about["classes"]:
        raise Problem(f"the new clients have {clients.classes} classes, the run's models know {about['classes']}")
    labels = about["labels"] and tuple(about["labels"])
    task = Classification(about["classes"])
    return dataclasses.replace(clients, **splits, **scale, classes=about["classes"], labels=labels, task=task)


def _other_labels(clients: Clients, about: dict[str, Any]) -> tuple[str, ...] | None:
    """Return what the outputs of a run of another task than classification are called; refuse other outputs."""
    task, names = task_of(about["task"]), about["labels"]
    if clients.task.kind != task.kind:
        raise Problem(f"the new clients' task is {clients.task.kind}, the run's {task.kind}")
    if clients.labels is not None and list(clients.labels) != names:
        raise Problem(f"the new clients' labels are {few(clients.labels)}, the run's {few(names or ['numbers'])}")
    if clients.task.outputs > task.outputs:
        raise Problem(f"the new clients have {clients.task.outputs} outputs, the run's models {task.outputs}")
    return names and tuple(names)


def _places(wanted: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    missing = [name for name in wanted if name not in known]
    if missing:
        raise Problem(f"{what} '{missing[0]}' is not among {', '.join(known)}")
    return [list(known).index(name) for name in wanted]
