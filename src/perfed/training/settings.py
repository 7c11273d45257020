"""What determines a method's result, as flat plain values; checkpoints and results carry them.

So a run cannot go on with other settings than it was begun with unless somebody says so, and then the run says it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from perfed.models import is_path
from perfed.models.config import without_folder
from perfed.training import catalog
from perfed.training.config import NEUTRAL, SECTIONS, Config
from perfed.training.files import shown

# another method's business; folders that may move: their data have digests
_ELSEWHERE = {"run.baseline", "data.dir", "data.public_data"}
FIXED = (
    "model.",
    "data.",
    "run.precision",
    "run.server_optimizer",
)  # what the tensors of a checkpoint have their form and meaning from

Settings = dict[str, Any]
Change = dict[str, list[Any]]  # setting -> what it was, what it is


def decisive(config: Config, entry: catalog.Entry, clients: dict[str, Any]) -> Settings:
    """Return everything that determines a method's result.

    Args:
        config: the run's configuration.
        entry: which of its methods.
        clients: who they are, as the run's folder describes them.

    Returns:
        Setting -> value; a user's own file counts with its contents, wherever it lies.
    """
    flat = {
        f"{section}.{key}": value
        for section in SECTIONS
        for key, value in dataclasses.asdict(getattr(config, section)).items()
        if not (section == "run" and key in NEUTRAL)
    }
    defaults = {key: field.default for key, field in entry.fields.items()}
    flat |= {f"{entry.name}.{key}": value for key, value in (defaults | config.settings(entry)).items()}
    if not entry.shipped:
        flat[f"{entry.name}.py"] = _digest(entry.file)
    if is_path(config.model.name):
        path, _, flat["model.name"] = config.model.name.rpartition(":")
        flat["model.py"] = _digest(Path(path).expanduser())
    for name in filter(is_path, config.model.names if config.model.networks or config.model.clients else []):
        flat[f"model.{without_folder(name)}"] = _digest(Path(name.rpartition(":")[0]).expanduser())
    bare = config.model.renamed(without_folder)
    flat |= {"model.networks": bare.networks, "model.clients": bare.clients}
    flat["data.digest"] = clients.get("digest")
    flat["data.public_digest"] = (clients.get("public") or {}).get("digest")
    return json.loads(json.dumps({key: value for key, value in flat.items() if key not in _ELSEWHERE}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def difference(before: Settings, now: Settings) -> Change:
    """Return the settings that are not what they were; those that one of the two versions of perfed lacks are not."""
    if before.get("data.task") == "next_token":  # tokens were never normalised, whatever was written
        before = before | {"data.normalise": "none"}
    return {key: [before[key], now[key]] for key in before if key in now and before[key] != now[key]}


def outdated(result: dict[str, Any], config: Config, entry: catalog.Entry, clients: dict[str, Any]) -> Change:
    """Return the settings with which a method has ended that are no longer those of its run.

    Args:
        result: what it ended with; of an older perfed, only the rounds are known.
        config: the run's configuration as it is now.
        entry: the method.
        clients: who they are, as the run's folder describes them.

    Returns:
        Setting -> what it was, what it is.
    """
    if "settings" in result:
        return difference(result["settings"], decisive(config, entry, clients))
    early = config.run.patience or "diverged" in result
    return {} if early else difference({"run.rounds": result["rounds"]}, {"run.rounds": config.run.rounds})


def in_words(change: Change) -> str:
    """Say what is not as it was, with the names of settings."""
    return ", ".join(f"{key} {' -> '.join(map(shown, values))}" for key, values in change.items())
