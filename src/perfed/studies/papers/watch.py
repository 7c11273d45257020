"""What a client keeps to itself, round by round: pFedMB's mixtures, for its Figure 3.

Logs hold what a server knows, and a client's mixture is no part of that. So an observer of its own looks on while a
cell is trained.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfed.methods.shared.mixture import convex
from perfed.training import files
from perfed.training.folder import MethodFolder, read_lines
from perfed.training.observers import Round

ALPHAS = "alphas.jsonl"


class Mixtures:
    """Appends every client's weights of the branches, mean over layers, to a file of a run that is in round `now`."""

    def __init__(self, folder: MethodFolder, now: int):
        self.path = folder.path.parent / ALPHAS
        files.write(self.path, b"".join(_until(self.path, now)))  # later rounds are still to come

    def see(self, event: Round) -> None:
        federation = event.federation
        method: Any = federation.method  # pFedMB's: no other has what is looked at here
        states = federation.engine.states[federation.run].take(range(len(federation.clients)))
        weights = torch.stack([convex(state, method.simplex).mean(1) for state in states]).tolist()
        line = {"alpha": [[round(a, 4) for a in client] for client in weights], "round": federation.round}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
        files.sync(self.path)  # a checkpoint of this round may follow


def _until(path: Path, now: int) -> Iterator[bytes]:
    """The lines of rounds up to `now`; a crash may have left half of one."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        with contextlib.suppress(ValueError):
            if line.endswith(b"\n") and json.loads(line)["round"] <= now:
                yield line


def mixtures(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """(rounds, weights [rounds, clients, branches]) of a run folder; None where nobody looked on."""
    if not (folder / ALPHAS).exists():
        return None
    lines = read_lines(folder / ALPHAS)
    return np.array([line["round"] for line in lines]), np.array([line["alpha"] for line in lines])
