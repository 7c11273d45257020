"""Models for clients that never took part: from a finished run's server, on their own data, sending nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from perfed import files
from perfed.config import DataConfig
from perfed.core.errors import Problem
from perfed.core.messages import Down
from perfed.core.method import Method
from perfed.core.tree import rows, tree_map
from perfed.datasets import load
from perfed.engines.sequential import Sequential
from perfed.observe.metrics import by_client
from perfed.results import Run
from perfed.run import SERVER, make_method, save_models


def personalise(run: Run, name: str, data: DataConfig, rounds: int, fine_tune: int, out: Path | None) -> dict[str, Any]:
    """Train and save a model for every client of `data`; returns scores and places."""
    result = run.result(name)
    clients = load(data, run.config.run.seed)
    if clients.shape != tuple(run.about["shape"]):
        raise Problem(f"the new clients' samples have shape {clients.shape}, the run's {tuple(run.about['shape'])}")
    if clients.classes > run.about["classes"]:
        raise Problem(f"the new clients have {clients.classes} classes, the run's models know {run.about['classes']}")
    method = make_method(run.config, run.entries[name], run.network, len(run.about["clients"]))
    method = dataclasses.replace(method, fine_tune=fine_tune)
    server = files.load_tree(run.path / name / SERVER)
    ids = list(range(len(clients)))
    engine, states = Sequential(method, clients, seed=run.config.run.seed), [method.init_client() for _ in ids]
    down = _for_all(method, server, len(ids))
    for round in range(rounds):
        states, _ = engine.train(result["rounds"] + 1 + round, 0, ids, states, down)
    scores = engine.evaluate(result["rounds"] + rounds, ids, states, down, keep=True)
    folder = out or run.path / name / "newcomers"
    found, taken = [], set()
    for id, one in enumerate(by_client(scores.values)):
        home = folder / files.slug(clients.names[id], taken)
        save_models(method.model, home, name, rows(scores.models, id))
        found.append({"client": clients.names[id], "path": str(home / "model.safetensors"), **one})
    return {"run": str(run.path), "method": name, "models": str(folder), "clients": found}


def _for_all(method: Method, server: Any, count: int) -> Down:
    """What a newcomer receives, once for each."""
    down = method.newcomer(server)
    return Down(down.shared, tree_map(lambda t: torch.stack([t] * count), down.own))
