"""Clients that join after training: the first ones train, the others tune what the server has (PGFed, Figure 4)."""

from __future__ import annotations

import dataclasses

import torch

from perfed.core.messages import Down
from perfed.engines.base import EvaluationRequest, Job
from perfed.engines.scores import PERSONAL
from perfed.engines.vectorised import part
from perfed.methods.local import Local
from perfed.studies.papers.cells import Cell
from perfed.training.engine import make_engine
from perfed.training.newcomers import visit
from perfed.training.prepare import Experiment

# Settings that newcomers take from the method.
ALIKE = ("lr", "momentum", "nesterov", "weight_decay", "optimizer", "batch_size")


def first_clients(experiment: Experiment, share: float) -> Experiment:
    """Return the experiment with its first clients alone."""
    return dataclasses.replace(experiment, clients=part(experiment.clients, 0, _first(experiment, share)))


def _first(experiment: Experiment, share: float) -> int:
    return int(share * len(experiment.clients) + 1e-9)


def score_newcomers(experiment: Experiment, cell: Cell) -> None:
    """Tune the server's model for every newcomer, epoch by epoch, and write the scores of each epoch.

    SGD with the method's own rate and momentum. Local's server has nothing: its newcomers start from scratch.
    """
    (entry,) = experiment.config.entries()
    method = experiment.method(entry)
    newcomers = part(experiment.clients, _first(experiment, cell.first), len(experiment.clients))
    start = method.global_model(cell.training.server()).to(method.model.device)
    alone = Local(method.model, **{name: getattr(method, name) for name in ALIKE}, epochs=1)
    run = experiment.config.run
    engine = make_engine(experiment.engine, [Job(alone, newcomers, run.seed)], run)
    try:
        ids, epochs = range(len(newcomers)), []
        engine.states[0].put(ids, torch.stack([start for _ in ids]))
        for epoch in range(1, cell.tuned + 1):
            visit(engine, Down(), epoch)
            (reply,) = engine.evaluate([EvaluationRequest(0, epoch, ids, Down())])
            epochs.append([scores[PERSONAL] for scores in reply.scores.on_host().by_client()])
    finally:
        engine.close()
    cell.run.files.write_json(cell.newcomers_file, {"samples": list(newcomers.test.size), "epochs": epochs})
