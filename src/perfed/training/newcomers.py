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
from perfed.core.tree import rows, tree_map
from perfed.data.config import DataConfig
from perfed.data.preparation import Preparation
from perfed.engines.base import Engine, EvaluationRequest, Job, Request
from perfed.engines.local import Sequential
from perfed.training import files
from perfed.training.folder import model_file, preparation_of, save_models
from perfed.training.prepare import class_names, class_weights, known_labels, load_clients, make_method
from perfed.training.results import Run


def personalise(run: Run, name: str, data: DataConfig, rounds: int, fine_tune: int, out: Path | None) -> dict[str, Any]:
    """Train and save a model for every client of `data`.

    Args:
        run: a finished run.
        name: one of its methods.
        data: the newcomers' data.
        rounds: how often each newcomer trains as the method's clients do.
        fine_tune: further epochs of plain local training for the models that are saved.
        out: where models go; None: into the run folder.

    Returns:
        Every newcomer's scores and the place of its model.
    """
    result = run.result(name)
    clients = load_newcomers(run, data)
    weights = class_weights(run.config.run, run.about.get("training_labels", ()))
    method = make_method(run.config, run.entries[name], run.network, len(run.about["clients"]), class_weights=weights)
    method = dataclasses.replace(method, fine_tune=fine_tune)
    server = run.folder.method(name).server()
    engine = Sequential(Job(method, clients, seed=run.config.run.seed))
    down = _for_all(method, server, len(clients))
    last = result["rounds"] + rounds
    for round in range(result["rounds"] + 1, last + 1):
        visit(engine, down, round)
    (reply,) = engine.evaluate([EvaluationRequest(0, last, range(len(clients)), down, keep=True)])
    preparation = clients.preparation
    folder = out or run.folder.method(name).newcomers
    place = run.folder.files
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        place = files.Folder(out)
    listed, taken = [], set()
    for id, scores in enumerate(reply.scores.by_client()):
        home = folder / files.slug(clients.names[id], taken)
        form = None if preparation is None else Preparation.of(preparation, clients.names[id])
        save_models(place, method.model, home, name, rows(reply.models, id), form)
        listed.append({"client": clients.names[id], "path": str(model_file(home)), **scores})
    return {"run": str(run.path), "method": name, "models": str(folder), "clients": listed}


def load_newcomers(run: Run, data: DataConfig) -> Clients:
    """Load new clients' data in the form that a run's models know.

    Args:
        run: a finished run, whose statistics and texts they get.
        data: where the newcomers' data are.
    """
    table = len(run.about["shape"]) == 1
    data = dataclasses.replace(data, normalise=run.config.data.normalise if table else "channel")
    preparation = preparation_of(run.about)
    known = None if preparation is None else {**(run.about.get("preparation") or preparation.plain())}
    return as_in_training(load_clients(data, run.config.run.seed, known), run.about)


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
    if clients.labels is not None or about["labels"] is not None:
        number = torch.tensor(_places(class_names(clients), known_labels(about), "label"))
        splits = {name: dataclasses.replace(s, y=number[s.y]) for name, s in splits.items()}
    elif clients.classes > about["classes"]:
        raise Problem(f"the new clients have {clients.classes} classes, the run's models know {about['classes']}")
    labels = about["labels"] and tuple(about["labels"])
    return dataclasses.replace(clients, **splits, **scale, classes=about["classes"], labels=labels)


def _places(wanted: Sequence[str], known: Sequence[str], what: str) -> list[int]:
    missing = [name for name in wanted if name not in known]
    if missing:
        raise Problem(f"{what} '{missing[0]}' is not among {', '.join(known)}")
    return [list(known).index(name) for name in wanted]


def _for_all(method: Method, server: Any, count: int) -> Down:
    """Return what newcomers receive: a row for each, all alike."""
    down = method.newcomer(server)
    return Down(down.shared, tree_map(lambda t: torch.stack([t] * count), down.own))
