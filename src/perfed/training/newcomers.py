"""Models for clients that never took part: from a finished run's server, on their own data, sending nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from perfed.core.clients import SPLITS, Clients
from perfed.core.errors import Problem
from perfed.core.messages import Down
from perfed.core.method import Method
from perfed.core.tree import rows, stack, tree_map
from perfed.engines.base import Asked
from perfed.engines.local import Sequential
from perfed.training import files
from perfed.training.config import DataConfig
from perfed.training.experiment import SERVER, load_clients, make_method, save_models
from perfed.training.observers.log import by_client
from perfed.training.results import Run


def personalise(run: Run, name: str, data: DataConfig, rounds: int, fine_tune: int, out: Path | None) -> dict[str, Any]:
    """Train and save a model for every client of `data`; returns scores and places."""
    result = run.result(name)
    clients = as_in_training(load_clients(data, run.config.run.seed), run.about)
    method = make_method(run.config, run.entries[name], run.network, len(run.about["clients"]))
    method = dataclasses.replace(method, fine_tune=fine_tune)
    server = files.load_tree(run.path / name / SERVER)
    ids = list(range(len(clients)))
    engine, states = Sequential(method, clients, seed=run.config.run.seed), stack([method.init_client() for _ in ids])
    down = _for_all(method, server, len(ids))
    for round in range(rounds):
        states, _ = engine.train(result["rounds"] + 1 + round, 0, Asked(ids, states, down))
    scores = engine.evaluate(result["rounds"] + rounds, Asked(ids, states, down), keep=True)
    folder = out or run.path / name / "newcomers"
    found, taken = [], set()
    for id, one in enumerate(by_client(scores.values)):
        home = folder / files.slug(clients.names[id], taken)
        save_models(method.model, home, name, rows(scores.models, id))
        found.append({"client": clients.names[id], "path": str(home / "model.safetensors"), **one})
    return {"run": str(run.path), "method": name, "models": str(folder), "clients": found}


def as_in_training(clients: Clients, about: dict[str, Any]) -> Clients:
    """New clients' samples as the run's models know them: the same columns, labels and scale; else a Problem."""
    if clients.shape != tuple(about["shape"]):
        raise Problem(f"the new clients' samples have shape {clients.shape}, the run's {tuple(about['shape'])}")
    if (clients.train.x.dtype == torch.uint8) != about["image"]:
        raise Problem("the run was trained on images of bytes and the new samples are not, or the other way round")
    if (clients.columns is None) != (about["columns"] is None) or (clients.labels is None) != (about["labels"] is None):
        raise Problem(
            "the new clients' files are of another kind than the run's: columns or labels have no names there"
        )
    scale = {key: None if about[key] is None else torch.tensor(about[key]).view(-1, 1, 1) for key in ("mean", "std")}
    splits = {name: clients.split(name) for name in SPLITS}
    if clients.columns is not None:
        place = _places(about["columns"], clients.columns, "column")
        splits = {name: dataclasses.replace(s, x=s.x[:, place]) for name, s in splits.items()}
    if clients.labels is not None:
        number = torch.tensor(_places(clients.labels, about["labels"], "label"))
        splits = {name: dataclasses.replace(s, y=number[s.y]) for name, s in splits.items()}
    elif clients.classes > about["classes"]:
        raise Problem(f"the new clients have {clients.classes} classes, the run's models know {about['classes']}")
    return dataclasses.replace(clients, **splits, **scale, classes=about["classes"])


def _places(wanted: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    missing = [name for name in wanted if name not in known]
    if missing:
        raise Problem(f"{what} '{missing[0]}' is not among {', '.join(known)}")
    return [list(known).index(name) for name in wanted]


def _for_all(method: Method, server: Any, count: int) -> Down:
    """What a newcomer receives, once for each."""
    down = method.newcomer(server)
    return Down(down.shared, tree_map(lambda t: torch.stack([t] * count), down.own))
