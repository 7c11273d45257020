"""What a client keeps to itself, round by round: pFedMB's mixtures, for its Figure 3.

Logs hold what a server knows, and a client's mixture is no part of that. So an observer of its own looks on while a
cell is trained.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from perfed.methods.pfedmb import PFedMB
from perfed.training.files import Folder
from perfed.training.folder import MethodFolder
from perfed.training.observers import Round


def mixtures_file(folder: Path) -> Path:
    """Return the file of the mixtures in a run folder."""
    return folder / "alphas.jsonl"


class MixtureLog:
    """Appends every client's weights of the branches, mean over layers, to a file of a run that is in round `now`."""

    def __init__(self, folder: MethodFolder, now: int):
        self.folder, self.path = folder, mixtures_file(folder.path.parent)
        folder.files.write(self.path, b"".join(_lines_until(folder.files, self.path, now)))  # later rounds will come

    def see(self, event: Round) -> None:
        federation, method = event.federation, event.federation.method
        assert isinstance(method, PFedMB)  # a table's file cannot ask for it elsewhere
        states = federation.engine.states[federation.run].take(range(len(federation.clients)))
        weights = torch.stack([method.weights(state).mean(1) for state in states]).tolist()
        line = {"alpha": [[round(weight, 4) for weight in client] for client in weights], "round": federation.round}
        self.folder.append_lines(self.path, [line])
        self.folder.files.sync(self.path)  # a checkpoint of this round may follow


def _lines_until(files: Folder, path: Path, now: int) -> Iterator[bytes]:
    """Yield the lines of rounds up to `now`; a crash may have left half of the last."""
    for line in files.read(path).splitlines(keepends=True) if files.exists(path) else []:
        with contextlib.suppress(ValueError):
            if line.endswith(b"\n") and json.loads(line)["round"] <= now:
                yield line


def mixtures(folder: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the rounds and the weights [rounds, clients, branches] of a run folder; None where nobody looked on."""
    lines = Folder(folder).read_lines(mixtures_file(folder))
    if not lines:
        return None
    return np.array([line["round"] for line in lines]), np.array([line["alpha"] for line in lines])
