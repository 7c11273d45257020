"""What a client keeps to itself, round by round: pFedMB's mixtures, for its Figure 3.

Logs hold what a server knows, and a client's mixture is no part of that. So the cell is trained once more without
files, which gives the same numbers, and looked at after every round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from perfed import files

if TYPE_CHECKING:
    from perfed.tables.cells import Cell

ALPHAS = "alphas.json"


def alphas(cell: Cell) -> None:
    """Write every client's weights of the branches, mean over layers, [rounds, clients, branches]."""
    from perfed.core.mixture import convex
    from perfed.engines import make_engine
    from perfed.experiment import prepare, read_config
    from perfed.faults import faults_of
    from perfed.federation import Federation

    experiment = prepare(read_config(cell.folder))
    (entry,) = experiment.config.entries()
    method: Any = experiment.method(entry)
    engine = make_engine(experiment.engine, method, experiment.clients, experiment.config.run)
    try:
        federation = Federation(engine, faults=faults_of(experiment.config.run))
        everybody, seen = list(range(len(experiment.clients))), []
        for _ in range(files.read_json(cell.folder / cell.method / "result.json")["rounds"]):
            federation.step()
            states = torch.stack([convex(federation.state(i), method.simplex).mean(1) for i in everybody])
            seen.append([[round(a, 4) for a in row] for row in states.tolist()])
        files.write_json(cell.folder / ALPHAS, {"alpha": seen})
    finally:
        engine.close()
