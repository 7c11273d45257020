"""Clients that join after training: the first ones train, the others tune what the server has (PGFed, Figure 4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from perfed.core.messages import Down
from perfed.core.method import Method
from perfed.engines.base import EvaluationRequest, Job
from perfed.engines.vectorised import part
from perfed.studies.papers.cells import NEWCOMERS, Cell
from perfed.training import catalog, files
from perfed.training.engine import make_engine
from perfed.training.newcomers import visit
from perfed.training.prepare import Experiment


def old_hands(experiment: Experiment, share: float) -> Experiment:
    """Return the experiment with its first clients alone."""
    count = int(share * len(experiment.clients) + 1e-9)
    return dataclasses.replace(experiment, clients=part(experiment.clients, 0, count))


def welcome(experiment: Experiment, cell: Cell) -> None:
    """Tune the server's model for every newcomer, epoch by epoch, and write the scores of each epoch.

    SGD with the method's own rate and momentum. Local's server has nothing: its newcomers start from scratch.
    """
    (entry,) = experiment.config.entries()
    method = experiment.method(entry)
    begin = int(cell.first * len(experiment.clients) + 1e-9)
    newcomers = part(experiment.clients, begin, len(experiment.clients))
    start = global_model(method, cell.training.server())
    same = {
        key: getattr(method, key) for key in ("lr", "momentum", "nesterov", "weight_decay", "optimizer", "batch_size")
    }
    alone = catalog.find("local").load()(method.model, **same, epochs=1, seed=method.seed)
    engine = make_engine(experiment.engine, [Job(alone, newcomers)], experiment.config.run)
    try:
        ids, epochs = range(len(newcomers)), []
        engine.states[0].put(ids, torch.stack([start for _ in ids]))
        for epoch in range(1, cell.tuned + 1):
            visit(engine, Down(), epoch)
            (reply,) = engine.evaluate([EvaluationRequest(0, epoch, ids, Down())])
            epochs.append([scores["personal"] for scores in reply.scores.on_host().by_client()])
    finally:
        engine.close()
    files.write_json(cell.folder / NEWCOMERS, {"samples": list(newcomers.test.size), "epochs": epochs})


def global_model(method: Method, server: Any) -> Tensor:
    """The model that a server has for everybody; the initial one where it has none."""
    found = server["w"] if isinstance(server, dict) else server
    return found.to(method.model.device) if isinstance(found, Tensor) else method.model.init(method.seed)
