"""A run folder explains itself. What its files are called, and where they are, is known here and nowhere else.

Files of a run:

- config.toml          every setting, resolved
- env.json             versions, machine, engine
- clients.json         who the clients are: names, sizes, how they came about; what a sample looks like
- files/               copies of the user's own method and model files
- <method>/            a folder for each method
  - metrics.jsonl    scores, one line per round and client
  - rounds.jsonl     cohort, bytes, who failed and who was refused, one line per round
  - times.jsonl      clock times (the only thing here that differs from run to run), and how much of them the server's
                     own training took
  - checkpoints/     the last two
  - best/            while it trains: the round whose models will be saved (see run.save_round)
  - clients/<id>/    model.safetensors and card.md (see run.save_models)
  - model.safetensors    only where no client has a folder and all share one model
  - server.safetensors   what the server ends with, for clients that come later
  - result.json      the end: every client's scores, those of the models that are saved; why, where it diverged; what
                     determined it (settings), and the SHA-256 of every file that goes with it
- report/              table, picture, CSV
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.task import Classification, Task, task_of
from perfed.data.catalog import public_folder
from perfed.data.preparation import Column, Preparation
from perfed.engines.scores import PERSONAL
from perfed.engines.trees import pack, paths, unpack
from perfed.models import is_path
from perfed.training import catalog, files
from perfed.training.config import Config, from_dict, is_leftover, new_folder, parse_toml, to_toml
from perfed.training.files import NUMBER, Folder

OWN_FILES = "files"
MANY = 1000  # clients from which on a file for each is written, and looked into unasked, only where that is asked for

# What files must look like, as `files.refuse_form` takes it; keys that only some versions or runs have are not here.
SIZES = {"train": int, "val": int, "test": int}
CLIENTS = {"shape": [int], "classes": int, "image": bool, "clients": [{"name": str, **SIZES}]}
CLIENTS |= {"task?": {"kind": str, "outputs": int}}
CLIENTS |= {key: (list, type(None)) for key in ("mean", "std", "labels", "columns")}
ENVIRONMENT = {"versions": {str: str}}
SCORES = {PERSONAL: {"test": {str: NUMBER}, str: {str: NUMBER}}, str: {str: {str: NUMBER}}}
BYTES = dict.fromkeys(("down_shared", "down_own", "up_mean", "up_own"), int) | {"extra?": {str: int}}
REFUSED = {"client": str, "round": int, "tensor": str, "reason": str}
RESULT = {"title": str, "rounds": int, "evaluates": str, "bytes": BYTES, "clients": [SCORES], "diverged?": str}
RESULT |= {"refused?": {"count": int, "first": [REFUSED]}, "saved_round?": int, "sha256?": {str: str}}
PLAIN = (str, int, float, bool, type(None))
SETTINGS = {"settings?": {str: PLAIN}, "changes?": [{"round": int, "settings": {str: [PLAIN]}}]}
RESULT |= SETTINGS | {"faults?": {str: int}, "clock?": NUMBER}
EXTENDED = dict.fromkeys(("train", "made", "left_out"), int)
RESULT |= {"extended?": {str: EXTENDED}}
MEANS = {PERSONAL: NUMBER, str: NUMBER}
ROUND = {"round": int, "cohort": [str], "bytes": BYTES, "accuracy?": MEANS, "validation?": MEANS, "refused?": [REFUSED]}
ROUND |= {"extended?": {str: EXTENDED}}
ROUND |= {"judged?": str, "clock?": NUMBER, "seconds?": {str: NUMBER}}
CLIENT_SCORES = {"round": int, "client": str}
TIME = {"round": int, "seconds": (int, float), "refine?": (int, float)}


def model_file(home: Path, name: str = PERSONAL) -> Path:
    """Return the file of a client's model in the client's folder; model.safetensors is the personal model."""
    return home / f"{'model' if name == PERSONAL else name}.safetensors"


def save_models(
    folder: Folder,
    model: Model,
    home: Path,
    method: str,
    models: dict[str, Any],
    preparation: Preparation | None = None,
) -> dict[Path, str]:
    """Write models as files that any safetensors reader opens.

    A theta is written as the network's parameters by their names, another tree as its tensors by their places in it.

    Args:
        folder: what is written lies in it.
        model: the network whose parameters they are.
        home: a client's folder, or a method's where all clients share its models.
        method: the method's name, for whoever finds the file.
        models: name -> model.
        preparation: what becomes of a table's rows before a model sees them.

    Returns:
        The SHA-256 of each file.
    """
    form = {} if preparation is None else {"preparation": json.dumps(preparation.plain())}
    form |= {} if isinstance(model.task, Classification) else {"task": json.dumps(model.task.plain())}
    folder.make(home)
    digests = {}
    for name, tree in models.items():
        state, places = _tensors_of(model, tree)
        about = {"format": "pt", "method": method, "model": name, **form, **places}
        state = {key: tensor.cpu() for key, tensor in state.items()}
        path = model_file(home, name)
        digests[path] = folder.write(path, files.tensor_file(state, about))
    return digests


def _tensors_of(model: Model, tree: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model as named tensors, and where in its tree they are; of a theta the network knows that."""
    if isinstance(tree, Tensor) and tree.shape == (model.width,):
        return model.state_dict(tree), {}
    skeleton, tensors = pack(tree)
    names, tensors = paths(tree, "model"), [tensor.detach().contiguous().clone() for tensor in tensors]
    return dict(zip(names, tensors, strict=True)), {"tree": json.dumps([skeleton, names])}


def task_of_run(about: dict[str, Any]) -> Task:
    """Return what a run's clients learn, as its folder describes them; older runs knew classification alone."""
    return task_of(about["task"]) if "task" in about else Classification(about["classes"])


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


def refuse_equal_names(config: Config) -> None:
    """Refuse files of the user's that a folder cannot hold side by side: a run knows its networks by their names.

    A single network's copy gets another name where a method's file has its own.
    """
    if len(config.model.names) < 2:
        return
    networks = [Path(name.rpartition(":")[0]) for name in config.model.names if is_path(name)]
    methods = [entry.file for entry in config.entries() if not entry.shipped]
    known: dict[str, Path] = {}
    for path in (path.expanduser().resolve() for path in (*methods, *networks)):
        if known.setdefault(path.name, path) != path:
            raise Problem(f"'{known[path.name]}' and '{path}' have the same file name: rename one of them")


class SettingsFolder:
    """A folder with a configuration and the user's own files that it names."""

    def __init__(self, path: str | Path, config_name: str = "config.toml"):
        self.path = Path(path)
        self.files = Folder(self.path)
        self.config_file, self.own_files = self.path / config_name, self.path / OWN_FILES

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def begun(self) -> bool:
        """Whether the folder holds something that can be resumed: the configuration is written last."""
        return self.path.is_dir() and self.files.exists(self.config_file)

    def create(self) -> None:
        """Make the folder; an existing one has to be empty."""
        new_folder(self.path)

    def config(self) -> Config:
        """Read the configuration; the user's own files are found inside the folder."""
        if not self.path.is_dir():
            raise Problem(f"there is no run folder '{self.path}'")
        if is_leftover(self.path):
            again = f"its command, with --out '{self.path}', begins anew"
            raise Problem(f"the run in '{self.path}' was stopped before it had begun: {again}")
        if not self.begun:
            raise Problem(f"'{self.path}' is not a run folder: it has no {self.config_file.name}")
        raw = parse_toml(self.files.text(self.config_file), self.config_file)
        if isinstance(raw.get("methods"), list):
            raw["methods"] = [self._inside(name) if catalog.is_file(name) else name for name in raw["methods"]]
        config = from_dict(raw)
        return dataclasses.replace(config, model=config.model.renamed(self._network_inside))

    def _network_inside(self, name: str) -> str:
        path, colon, factory = name.partition(":")
        return self._inside(path) + colon + factory if is_path(name) else name

    def _inside(self, name: str) -> str:
        """Return the path of one of the folder's own copies: a configuration cannot name code elsewhere."""
        path = Path(name)
        if path.parent != Path(OWN_FILES) or path.name in ("", "..") or not self.files.exists(self.path / path):
            raise Problem(f"'{self.config_file}' names '{name}', which is not one of its own files")
        return str(self.path / path)

    def write_config(self, config: Config) -> None:
        """Write the configuration, which makes the folder one that can be resumed."""
        self.files.write(self.config_file, to_toml(config))

    def with_copies(self, config: Config) -> Config:
        """Copy the user's files into the folder; return the configuration that names the copies."""
        names = [self._copy(entry.file) if not entry.shipped else entry.name for entry in config.entries()]
        model, data = config.model, config.data
        model = model.renamed(self._with_copy)
        if data.dir is not None:  # a run may be resumed from another folder
            data = dataclasses.replace(data, dir=str(Path(data.dir).expanduser().resolve()))
        if (public := public_folder(data)) is not None:
            data = dataclasses.replace(data, public_data=str(public))
        return dataclasses.replace(config, methods=tuple(names), model=model, data=data)

    def _with_copy(self, name: str) -> str:
        path, _, factory = name.rpartition(":")
        return f"{self._copy(Path(path).expanduser())}:{factory}" if is_path(name) else name

    def _copy(self, path: Path) -> str:
        """Copy a file of the user's into the folder; returns the name by which the configuration knows the copy."""
        content, target = path.read_bytes(), self.own_files / path.name
        self.files.make(self.own_files)
        if self.files.exists(target) and self.files.read(target) != content:  # a network's file, called like a method's
            target = target.with_name(f"model_{path.name}")
        self.files.write(target, content)
        return f"{OWN_FILES}/{target.name}"


class RunFolder(SettingsFolder):
    """The files of a run."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.environment_file, self.clients_file = self.path / "env.json", self.path / "clients.json"
        self.report = self.path / "report"
        self.method = cache(self._method)

    def config(self) -> Config:
        """Read the configuration as this version means it: perfed 0.1 knew no normalised tables, and one task."""
        config = super().config()
        if config.data.task == "auto":  # which is never written
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, task="classification"))
        table = config.data.normalise == "channel" and len(self.raw_clients()["shape"]) == 1
        tokens = config.data.normalise == "federated" and config.data.task == "next_token"  # written once, never done
        if table or tokens:
            return dataclasses.replace(config, data=dataclasses.replace(config.data, normalise="none"))
        return config

    def lock(self) -> AbstractContextManager[None]:
        """Hold the folder; a second process is refused."""
        return self.files.only_one()

    def _method(self, name: str) -> MethodFolder:
        """Return the part of the folder that belongs to a method."""
        return MethodFolder(self.path / name, self.files)

    def kept(self) -> list[Path]:
        """Return the files without which nothing in the folder can be read."""
        own = [self.own_files / name for name in self.files.names(self.own_files)]
        return [self.config_file, self.environment_file, self.clients_file, *own]

    def clients(self) -> dict[str, Any]:
        """Read who the clients are; each gets a safe name for its folder: paths are never read from a file."""
        about = self.raw_clients()
        taken: set[str] = set()
        for client in about["clients"]:
            client["folder"] = files.slug(client["name"], taken)
        return about

    def raw_clients(self) -> dict[str, Any]:
        """Read who the clients are, as it was written."""
        return self.files.read_json(self.clients_file, CLIENTS)

    def write_clients(self, about: dict[str, Any]) -> None:
        """Write who the clients are."""
        self.files.write_json(self.clients_file, about)

    def environment(self) -> dict[str, Any]:
        """Read where the run was made: versions, machine, engine."""
        return self.files.read_json(self.environment_file, ENVIRONMENT)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of what every method's result rests on: who the clients are, and the user's own files."""
        own = [self.own_files / name for name in self.files.names(self.own_files) if name.endswith(".py")]
        paths = [self.clients_file, *own]
        return {path.relative_to(self.path).as_posix(): self.files.digest(path).hexdigest() for path in paths}

    def write_environment(self, about: dict[str, Any]) -> None:
        """Write where the run is made."""
        self.files.write_json(self.environment_file, about)


class MethodFolder:
    """The part of a run folder that belongs to a method."""

    def __init__(self, path: Path, folder: Folder | None = None):
        """Name the files of a method.

        Args:
            path: the method's folder.
            folder: the run's; None: the method's folder stands alone.
        """
        self.path, self.name, self.files = path, path.name, folder or Folder(path)
        self.scores_log, self.rounds_log = path / "metrics.jsonl", path / "rounds.jsonl"
        self.times_log = path / "times.jsonl"
        self.checkpoints, self.best = path / "checkpoints", path / "best"
        self.clients = path / "clients"
        self.server_file, self.result_file = path / "server.safetensors", path / "result.json"
        self._result: tuple[int, dict[str, Any]] = 0, {}

    @property
    def logs(self) -> tuple[Path, Path, Path]:
        """Every log: a checkpoint vouches for their lengths."""
        return self.scores_log, self.rounds_log, self.times_log

    @property
    def finished(self) -> bool:
        """Whether the training has ended."""
        return self.files.exists(self.result_file)

    def kept(self) -> list[Path]:
        """Return the small files that say how the training went and ended."""
        return [self.result_file, self.rounds_log, self.times_log]

    # ------------------------------------------------------------------ the end

    def result(self) -> dict[str, Any]:
        """Read what the training ended with; one that is not what was written is a Problem."""
        changed = self.files.changed(self.result_file)
        if self._result[0] != changed:  # with many clients, reading it again and again takes long
            result = self.files.read_json(self.result_file, RESULT)
            known = result.pop(SEAL, None)
            if known != seal(result) and (known is not None or "sha256" in result):  # perfed 0.1 wrote neither
                raise Problem(f"'{self.result_file}' is damaged: its checksum does not fit")
            self._result = changed, result
        return self._result[1]

    def write_result(self, result: dict[str, Any]) -> None:
        """Write what the training ends with."""
        self.files.write(self.result_file, files.json_text(sealed(result)))

    def result_of(self, paths: Iterable[Path]) -> bytes:
        """Return the text of the result, with the checksums of these files alone, for whoever has no others."""
        result = self.result()
        if "sha256" not in result:  # an older perfed wrote none
            return self.files.read(self.result_file)
        names = {self.name_of(path) for path in paths}
        known = {name: digest for name, digest in result["sha256"].items() if name in names}
        return b"".join(files.json_text(sealed(result | {"sha256": known})))

    def name_of(self, path: Path) -> str:
        """Return the name by which a result knows a file of the run."""
        return path.relative_to(self.files.root).as_posix()

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of every file that goes with the result, by its name; an older perfed wrote none."""
        return self.result().get("sha256", {}) if self.finished else {}

    def refuse_damaged(self, path: Path) -> None:
        """Refuse a file that is not what the result says."""
        self._compare(path, self.digests.get(self.name_of(path)))

    def check(self, thorough: bool = True) -> None:
        """Refuse a method that has ended where a file that goes with its result is damaged or missing.

        Args:
            thorough: look into the models, too; else only whether they are there.
        """
        for name, known in self.digests.items():
            path = self.files.root / name
            if not thorough and path.suffix == ".safetensors" and self.files.exists(path):
                continue
            self._compare(path, known)

    def _compare(self, path: Path, known: str | None) -> None:
        try:
            if known is not None and self.files.digest(path).hexdigest() != known:
                raise Problem(f"'{path}' is damaged: its checksum is not that in {self.result_file.name}")
        except FileNotFoundError:
            raise Problem(f"'{path}' is missing, and {self.result_file.name} says that it was written") from None

    # ------------------------------------------------------------------ logs

    def rounds(self) -> list[dict[str, Any]]:
        """Read the log of rounds: cohort, bytes, failures, mean scores."""
        self.refuse_damaged(self.rounds_log)
        return self.files.read_lines(self.rounds_log, ROUND)

    def scores(self) -> list[dict[str, Any]]:
        """Read every client's scores in every round that was evaluated."""
        self.refuse_damaged(self.scores_log)
        return self.files.read_lines(self.scores_log, CLIENT_SCORES)

    def seconds(self) -> list[float]:
        """Read how long each round took."""
        return [line["seconds"] for line in self.files.read_lines(self.times_log, TIME)]

    def append_lines(self, path: Path, lines: Iterable[dict[str, Any]]) -> bytes:
        """Append JSON objects to a log; returns what was appended."""
        content = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode()
        self.files.append(path, content)
        return content

    # ------------------------------------------------------------------ server and models

    def server(self) -> Any:
        """Read what the server ended with."""
        self.refuse_damaged(self.server_file)
        return self.files.load_tree(self.server_file)

    def write_server(self, server: Any) -> str:
        """Write what the server ends with; returns the file's SHA-256."""
        return self.files.save_tree(self.server_file, server)

    def client(self, folder: str) -> Path:
        """Return the folder of a client."""
        return self.clients / folder

    def model(self, folder: str) -> Path:
        """Return the file of a client's personal model: its own, or the model that all clients share."""
        own, shared = model_file(self.client(folder)), model_file(self.path)
        return shared if self.files.exists(shared) and not self.files.exists(own) else own

    def load_model(self, path: Path) -> tuple[dict[str, Tensor], Any]:
        """Read a model; a damaged one is a Problem, and FileNotFoundError says that none was written.

        Returns:
            Its tensors by name, and its tree where it is no theta, else None.
        """
        if self.name_of(path) in self.digests:
            self.refuse_damaged(path)
        try:
            with self.files.open(path) as file:
                content = file.read()
            state = load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            places = header.get("__metadata__", {}).get("tree")
            if places is None:
                return state, None
            skeleton, names = json.loads(places)
            return state, unpack(skeleton, [state[name] for name in names])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            if not self.files.exists(path):
                raise FileNotFoundError(str(path)) from None
            raise Problem(f"'{path}' is damaged or not a model") from None

    def forget_best(self) -> None:
        """Remove what a run that is over does not need any more."""
        self.files.remove_folder(self.best)


SEAL = "seal"  # the key in result.json of the checksum of all the others


def seal(result: dict[str, Any]) -> str:
    """Return the SHA-256 of a result, whatever way it is written down."""
    total = hashlib.sha256()
    for piece in files.json_text(result):
        total.update(piece)
    return total.hexdigest()


def sealed(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with its checksum."""
    return result | {SEAL: seal(result)}


def card_file(home: Path) -> Path:
    """Return the file that says what a client's model is, for whoever finds its folder."""
    return home / "card.md"
