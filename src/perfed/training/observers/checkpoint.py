"""Checkpoints: everything a method's training is, in two files; the last two are kept.

The clients' states are written first, row by row, to a file of bytes; the other file says what they are and makes the
checkpoint whole. Neither writing nor reading holds all rows at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.tree import tree_map
from perfed.federation.federation import Federation
from perfed.federation.traffic import Traffic
from perfed.training import files
from perfed.training.folder import MethodFolder
from perfed.training.observers import Round
from perfed.training.observers.log import MetricsLog

KEPT = 2
ROWS = ".rows"


class Checkpoints:
    """Writes a checkpoint every so many rounds, after the metrics of that round."""

    def __init__(self, folder: MethodFolder, every: int, log: MetricsLog):
        self.folder, self.every, self.log = folder.checkpoints, every, log
        self.folder.mkdir(exist_ok=True)

    def see(self, event: Round) -> None:
        if event.last:  # the end is the result itself
            self._prune()
        elif event.federation.round % self.every == 0:
            self.write(event.federation)

    def write(self, federation: Federation) -> None:
        """Save the federation as it is, with the lengths of the logs that belong to it."""
        path, digest = _path(self.folder, federation.round), hashlib.sha256()
        ids, pieces = federation.engine.save(federation.run)
        if ids:
            files.write(path.with_suffix(ROWS), _watched(pieces, digest))
        state = {
            "round": federation.round,
            "server": federation.server,
            "states": {"clients": torch.tensor(ids, dtype=torch.int64), "sha256": digest.hexdigest()},
            "traffic": dataclasses.asdict(federation.traffic),
            "strikes": federation.strikes,
            "logs": self.log.sizes(),
        }
        files.save_tree(path, state)
        self._prune()

    def _prune(self) -> None:
        _keep(self.folder, _rounds(self.folder)[-KEPT:])


class BestRound(Checkpoints):
    """Keeps the round with the best models so far, of a run that is in round `now`."""

    def __init__(self, folder: MethodFolder, log: MetricsLog, now: int):
        super().__init__(folder, 0, log)
        self.recent, self.folder = self.folder, folder.best
        _keep(self.folder, [round for round in _rounds(self.folder) if round <= now])  # later ones are still to come

    def write(self, federation: Federation) -> None:
        self.folder.mkdir(exist_ok=True)
        super().write(federation)

    def _prune(self) -> None:
        """Keep the newest, and what a run would want that goes on from the newest checkpoint."""
        known, there = max(_rounds(self.recent), default=0), _rounds(self.folder)
        _keep(self.folder, [*there[-1:], *[round for round in there if round <= known][-1:]])

    def restore(self, federation: Federation, round: int) -> bool:
        """Set the federation to this round; returns whether it is there."""
        if round in _rounds(self.folder):
            _read(self.folder.parent, _path(self.folder, round), federation)
        return federation.round == round


def _path(folder: Path, round: int) -> Path:
    return folder / f"round_{round:08d}.safetensors"


def _rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round_")) for path in folder.glob("round_*.safetensors"))


def _keep(folder: Path, rounds: Iterable[int]) -> None:
    kept = {_path(folder, round).stem for round in rounds}
    for old in folder.glob("round_*"):
        if old.stem not in kept:
            old.unlink()


def _watched(pieces: Iterable[bytes], digest: Any) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece


def _restore_states(path: Path, about: dict[str, Any], federation: Federation) -> None:
    """Give the engine the states of a file of rows; a Problem where the file is not what was written."""
    if "sha256" not in about:
        raise Problem(f"'{path.parent}' holds checkpoints of an older perfed: resume with that one, or start anew")
    ids, digest = about["clients"].tolist(), hashlib.sha256()
    if not ids:
        federation.engine.restore(federation.run, ids, lambda _: b"")
        return
    try:
        with path.open("rb") as file:

            def read(count: int) -> bytes:
                piece = file.read(count)
                digest.update(piece)
                return piece

            federation.engine.restore(federation.run, ids, read)
    except FileNotFoundError:
        raise Problem(f"there is no file '{path}'") from None
    if digest.hexdigest() != about["sha256"]:
        raise Problem(f"'{path}' is damaged: its checksum does not fit")


def _read(folder: Path, path: Path, federation: Federation) -> dict[str, int]:
    """Set the federation to one checkpoint; returns the logs' lengths."""
    device, state = federation.method.model.device, files.load_tree(path)
    for name, size in state["logs"].items():
        files.long_enough(folder / name, size)
    _restore_states(path.with_suffix(ROWS), state["states"], federation)
    federation.round = state["round"]
    federation.server = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, state["server"])
    federation.traffic = Traffic(**state["traffic"])
    federation.strikes = state.get("strikes", 0)  # perfed 0.1 had none
    return state["logs"]


def restore(folder: MethodFolder, federation: Federation, notice: Callable[[str], None]) -> dict[str, int] | None:
    """Set the federation to its newest whole checkpoint.

    Args:
        folder: where the checkpoints are.
        federation: a new one of the same method, seed and clients.
        notice: is told which checkpoint is damaged.

    Returns:
        The logs' lengths at that checkpoint; None where there is no checkpoint.
    """
    rounds = _rounds(folder.checkpoints)
    for round in reversed(rounds):
        try:
            return _read(folder.path, _path(folder.checkpoints, round), federation)
        except Problem as problem:
            if round == rounds[0]:
                raise
            notice(f"{problem}; going back to the checkpoint before it")
    return None
