"""A run folder explains itself. What its files are called, and where they are, is known here and nowhere else.

Files of a run:

- config.toml          every setting, resolved
- env.json             versions, machine, engine
- clients.json         who the clients are: names, sizes, how they came about; what a sample looks like
- files/               copies of the user's own method and model files
- <method>/            a folder for each method
  - metrics.jsonl    scores, one line per round and client
  - rounds.jsonl     cohort, bytes, who failed and who was refused, one line per round
  - times.jsonl      clock times (the only thing here that differs from run to run)
  - checkpoints/     the last two
  - best/            while it trains: the round whose models will be saved (see run.save_round)
  - clients/<id>/    model.safetensors and card.md (see run.save_models)
  - model.safetensors    only where no client has a folder and all share one model
  - server.safetensors   what the server ends with, for clients that come later
  - newcomers/<id>/  models of clients that came later
  - result.json      the end: every client's scores, those of the models that are saved; why, where it diverged
- report/              table, picture, CSV
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.data.preparation import Column, Preparation
from perfed.engines.scores import PERSONAL
from perfed.models import is_path
from perfed.training import files
from perfed.training.config import Config, from_dict, is_leftover, new_folder, read_toml, to_toml

OWN_FILES = "files"


def model_file(home: Path, name: str = PERSONAL) -> Path:
    """Return the file of a client's model in the client's folder; model.safetensors is the personal model."""
    return home / f"{'model' if name == PERSONAL else name}.safetensors"


def save_models(
    model: Model, home: Path, method: str, models: dict[str, Tensor], preparation: Preparation | None = None
) -> None:
    """Write models as files that any safetensors reader opens.

    Args:
        model: the network whose parameters they are.
        home: a client's folder, or a method's where all clients share its models.
        method: the method's name, for whoever finds the file.
        models: name -> theta.
        preparation: what becomes of a table's rows before a model sees them.
    """
    form = {} if preparation is None else {"preparation": json.dumps(preparation.plain())}
    home.mkdir(parents=True, exist_ok=True)
    for name, theta in models.items():
        about = {"format": "pt", "method": method, "model": name, **form}
        state = {key: tensor.cpu() for key, tensor in model.state_dict(theta).items()}
        files.write(model_file(home, name), files.tensor_file(state, about))


def preparation_of(about: dict[str, Any], client: str = "") -> Preparation | None:
    """Return what becomes of the rows of a run's tables.

    Args:
        about: the run's clients, as its folder describes them.
        client: one of them, whose means may be its own.

    Returns:
        The preparation; None where samples are no rows of a table, or an array without names that stays as it is.
    """
    known = about.get("preparation") or {}
    if "columns" in known:
        return Preparation.of(known, client)
    columns = about["columns"]  # perfed 0.1 knew the names alone
    return None if columns is None else Preparation("none", tuple(map(Column, columns)))


class RunFolder:
    """The files of a run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file, self.environment_file = self.path / "config.toml", self.path / "env.json"
        self.clients_file, self.report = self.path / "clients.json", self.path / "report"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run that can be resumed: the configuration is written last."""
        return self.config_file.is_file()

    def create(self) -> None:
        """Make the folder; an existing one has to be empty."""
        new_folder(self.path)

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder; a second process is refused."""
        return files.only_one(self.path)

    def method(self, name: str) -> MethodFolder:
        """Return the part of the folder that belongs to a method."""
        return MethodFolder(self.path / name)

    def kept(self) -> list[Path]:
        """Return the files without which nothing in the folder can be read."""
        return [self.config_file, self.environment_file, self.clients_file, *sorted((self.path / OWN_FILES).glob("*"))]

    # ------------------------------------------------------------------ the configuration

    def config(self) -> Config:
        """Read the configuration; the user's own files are found inside the folder."""
        if not self.path.is_dir():
            raise Problem(f"there is no run folder '{self.path}'")
        if is_leftover(self.path):
            again = f"its command, with --out '{self.path}', begins anew"
            raise Problem(f"the run in '{self.path}' was stopped before it had begun: {again}")
        if not self.begun:
            raise Problem(f"'{self.path}' is not a run folder: it has no config.toml")
        raw = read_toml(self.config_file)
        if isinstance(raw.get("methods"), list):
            raw["methods"] = [self._inside(name) if str(name).endswith(".py") else name for name in raw["methods"]]
        config = self._upgraded(from_dict(raw))
        if is_path(config.model.name):
            model = dataclasses.replace(config.model, name=self._inside(config.model.name))
            return dataclasses.replace(config, model=model)
        return config

    def _upgraded(self, config: Config) -> Config:
        """Return a configuration as this version means it: perfed 0.1 knew no normalised tables."""
        if config.data.normalise == "channel" and len(self.raw_clients()["shape"]) == 1:
            return dataclasses.replace(config, data=dataclasses.replace(config.data, normalise="none"))
        return config

    def _inside(self, name: str) -> str:
        """Return the path of one of the folder's own copies: a configuration cannot name code elsewhere."""
        path = Path(name)
        if path.parent != Path(OWN_FILES) or path.name in ("", ".."):
            raise Problem(f"'{self.config_file}' names '{name}', which is not one of its own files")
        return str(self.path / path)

    def write_config(self, config: Config) -> None:
        """Write the configuration, which makes the folder one that can be resumed."""
        files.write(self.config_file, to_toml(config))

    def copy(self, path: Path) -> str:
        """Copy a file of the user's into the folder; returns the name by which the configuration knows the copy."""
        home = self.path / OWN_FILES
        home.mkdir(exist_ok=True)
        target = home / path.name
        if target.exists() and target.read_bytes() != path.read_bytes():  # a network's file called like a method's
            target = target.with_name(f"model_{path.name}")
        shutil.copyfile(path, target)
        return f"{OWN_FILES}/{target.name}"

    # ------------------------------------------------------------------ clients and machine

    def clients(self) -> dict[str, Any]:
        """Read who the clients are; each gets a safe name for its folder: paths are never read from a file."""
        about = self.raw_clients()
        taken: set[str] = set()
        for client in about["clients"]:
            client["folder"] = files.slug(client["name"], taken)
        return about

    def raw_clients(self) -> dict[str, Any]:
        """Read who the clients are, as it was written."""
        return files.read_json(self.clients_file)

    def write_clients(self, about: dict[str, Any]) -> None:
        """Write who the clients are."""
        files.write_json(self.clients_file, about)

    def environment(self) -> dict[str, Any]:
        """Read where the run was made: versions, machine, engine."""
        return files.read_json(self.environment_file)

    def write_environment(self, about: dict[str, Any]) -> None:
        """Write where the run is made."""
        files.write_json(self.environment_file, about)


class MethodFolder:
    """The part of a run folder that belongs to a method."""

    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.scores_log, self.rounds_log = path / "metrics.jsonl", path / "rounds.jsonl"
        self.times_log = path / "times.jsonl"
        self.checkpoints, self.best = path / "checkpoints", path / "best"
        self.clients, self.newcomers = path / "clients", path / "newcomers"
        self.server_file, self.result_file = path / "server.safetensors", path / "result.json"

    @property
    def logs(self) -> tuple[Path, Path, Path]:
        """Every log: a checkpoint vouches for their lengths."""
        return self.scores_log, self.rounds_log, self.times_log

    @property
    def finished(self) -> bool:
        """Whether the training has ended."""
        return self.result_file.exists()

    def kept(self) -> list[Path]:
        """Return the small files that say how the training went and ended."""
        return [self.result_file, self.rounds_log, self.times_log]

    def result(self) -> dict[str, Any]:
        """Read what the training ended with."""
        return files.read_json(self.result_file)

    def write_result(self, result: dict[str, Any]) -> None:
        """Write what the training ended with, which makes it finished."""
        files.write_json(self.result_file, result)

    def rounds(self) -> list[dict[str, Any]]:
        """Read the log of rounds: cohort, bytes, failures, mean scores."""
        return read_lines(self.rounds_log)

    def scores(self) -> list[dict[str, Any]]:
        """Read every client's scores in every round that was evaluated."""
        return read_lines(self.scores_log)

    def seconds(self) -> list[float]:
        """Read how long each round took."""
        return [line["seconds"] for line in read_lines(self.times_log)]

    def server(self) -> Any:
        """Read what the server ended with."""
        return files.load_tree(self.server_file)

    def write_server(self, server: Any) -> None:
        """Write what the server ends with."""
        files.save_tree(self.server_file, server)

    def client(self, folder: str) -> Path:
        """Return the folder of a client."""
        return self.clients / folder

    def model(self, folder: str) -> Path:
        """Return the file of a client's personal model: its own, or the model that all clients share."""
        own, shared = model_file(self.client(folder)), model_file(self.path)
        return shared if shared.exists() and not own.exists() else own

    def forget_best(self) -> None:
        """Remove what a run that is over does not need any more."""
        shutil.rmtree(self.best, ignore_errors=True)


def card_file(home: Path) -> Path:
    """Return the file that says what a client's model is, for whoever finds its folder."""
    return home / "card.md"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a log: a JSON object in each line; a log that is not there has no lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append JSON objects to a log."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)
