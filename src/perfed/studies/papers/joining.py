"""Clients that join after training: the first ones train, the others tune what the server has (PGFed, Figure 4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.method import Method
from perfed.engines import make_engine
from perfed.federation.federation import Federation
from perfed.studies.papers.cells import NEWCOMERS, Cell
from perfed.training import catalog, files
from perfed.training.experiment import SERVER, Experiment
from perfed.training.observers.log import by_client


def old_hands(experiment: Experiment, share: float) -> Experiment:
    """The same with the first clients alone."""
    count = int(share * len(experiment.clients) + 1e-9)
    return dataclasses.replace(experiment, clients=some(experiment.clients, 0, count))


def some(clients: Clients, first: int, last: int) -> Clients:
    """The clients from `first` to before `last`."""

    def cut(split: Split) -> Split:
        begin, size = sum(split.size[:first]), split.size[first:last]
        rows = slice(begin, begin + sum(size))
        return Split(split.x[rows], split.y[rows], size)

    splits = {name: cut(clients.split(name)) for name in SPLITS}
    return dataclasses.replace(clients, names=clients.names[first:last], **splits)


def welcome(experiment: Experiment, cell: Cell) -> None:
    """Tune the server's model for every newcomer, epoch by epoch, and write the scores of each epoch.

    SGD with the method's own rate and momentum. Local's server has nothing: its newcomers start from scratch.
    """
    (entry,) = experiment.config.entries()
    method = experiment.method(entry)
    begin = int(cell.first * len(experiment.clients) + 1e-9)
    newcomers = some(experiment.clients, begin, len(experiment.clients))
    start = global_model(method, files.load_tree(cell.folder / cell.method / SERVER))
    same = {
        key: getattr(method, key) for key in ("lr", "momentum", "nesterov", "weight_decay", "optimizer", "batch_size")
    }
    alone = catalog.find("local").load()(method.model, **same, epochs=1, seed=method.seed)
    engine = make_engine(experiment.engine, alone, newcomers, experiment.config.run)
    try:
        federation, ids = Federation(engine), list(range(len(newcomers)))
        federation.states.put(ids, torch.stack([start for _ in ids]))
        epochs = []
        for _ in range(cell.tuned):
            federation.step()
            epochs.append([one["personal"] for one in by_client(federation.evaluate())])
    finally:
        engine.close()
    files.write_json(cell.folder / NEWCOMERS, {"samples": list(newcomers.test.size), "epochs": epochs})


def global_model(method: Method, server: Any) -> Tensor:
    """The model that a server has for everybody; the initial one where it has none."""
    found = server["w"] if isinstance(server, dict) else server
    return found.to(method.model.device) if isinstance(found, Tensor) else method.model.init(method.seed)
