"""Checkpoints: everything a method's training is, in two files; the last two are kept.

The clients' states are written first, row by row, to a file of bytes; the other file says what they are and makes the
checkpoint whole. Neither writing nor reading holds all rows at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.tree import flatten, tree_map
from perfed.federation.federation import Federation
from perfed.federation.traffic import Traffic
from perfed.training.files import Folder, refuse_form
from perfed.training.folder import BYTES, SETTINGS, MethodFolder
from perfed.training.observers import Round
from perfed.training.observers.log import MetricsLog

KEPT = 2
ROWS = ".rows"
FORM = {"round": int, "server": object, "states": dict, "traffic": dict, "logs": {str: int}}
FORM |= SETTINGS | {
    "strikes?": int,
    "extended?": int,
    "clock?": (int, float),
    "moments?": {str: list},
    "digests?": {str: str},
    "known?": {str: Tensor},
}
EXTENSION = dict.fromkeys(("clients", "rounds", "made", "kept", "x", "y"), Tensor) | {"room": int}


class Checkpoints:
    """Writes a checkpoint every so many rounds, after the metrics of that round."""

    def __init__(self, folder: MethodFolder, every: int, log: MetricsLog, about: dict[str, Any] | None = None):
        """Make the folder.

        Args:
            folder: the method's.
            every: rounds between checkpoints.
            log: knows the logs that belong to a checkpoint.
            about: more that every checkpoint says: the `settings` that the method is trained with, and their `changes`.
        """
        self.files, self.folder, self.every = folder.files, folder.checkpoints, every
        self.log, self.about = log, about or {}
        self.files.make(self.folder)

    def see(self, event: Round) -> None:
        if event.last:  # the end is the result itself
            self._prune()
        elif event.federation.round % self.every == 0:
            self.write(event.federation)

    def write(self, federation: Federation) -> None:
        """Save the federation as it is, with the lengths of the logs that belong to it."""
        path, digest = _path(self.folder, federation.round), hashlib.sha256().hexdigest()
        ids, pieces = federation.engine.save(federation.run)
        if ids:
            digest = self.files.write(path.with_suffix(ROWS), pieces)
        state = {
            "round": federation.round,
            "server": federation.server,
            "states": {"clients": torch.tensor(ids, dtype=torch.int64), "sha256": digest},
            "traffic": dataclasses.asdict(federation.traffic),
            "strikes": federation.strikes,
            "clock": federation.clock,
            "known": federation.known.save(),
            "moments": federation.moments,
            "extended": self._write_extension(federation),
            "logs": self.log.sizes(),
            "digests": {path.name: digest for path, digest in self.log.digests().items()},
        }
        self.files.save_tree(path, state | self.about)
        self._prune()

    def _write_extension(self, federation: Federation) -> int:
        """Write what joined clients' training sets, where it is not written yet; return the round it is of, or 0."""
        engine, run = federation.engine, federation.run
        last = engine.extended[run].last
        if last and not self.files.exists(path := _extension(self.folder, last)):
            self.files.save_tree(path, engine.save_extension(run))
        return last

    def _prune(self) -> None:
        _keep(self.files, self.folder, _rounds(self.files, self.folder)[-KEPT:])


class BestRound(Checkpoints):
    """Keeps the round with the best models so far, of a run that is in round `now`."""

    def __init__(self, folder: MethodFolder, log: MetricsLog, now: int):
        super().__init__(folder, 0, log)
        self.method, self.recent, self.folder = folder, self.folder, folder.best
        known = _rounds(self.files, self.folder)
        _keep(self.files, self.folder, [round for round in known if round <= now])  # later ones are still to come

    def write(self, federation: Federation) -> None:
        self.files.make(self.folder)
        super().write(federation)

    def _prune(self) -> None:
        """Keep the newest, and what a run would want that goes on from the newest checkpoint."""
        known, there = max(_rounds(self.files, self.recent), default=0), _rounds(self.files, self.folder)
        _keep(self.files, self.folder, [*there[-1:], *[round for round in there if round <= known][-1:]])

    def restore(self, federation: Federation, round: int) -> bool:
        """Set the federation to this round; returns whether it is there."""
        if round in _rounds(self.files, self.folder):
            path = _path(self.folder, round)
            _use(self.method, path, _read(self.method, path, len(federation.clients)), federation)
        return federation.round == round


def _path(folder: Path, round: int) -> Path:
    return folder / f"round_{round:08d}.safetensors"


def _extension(folder: Path, round: int) -> Path:
    return folder / f"extended_{round:08d}.safetensors"


def _rounds(files: Folder, folder: Path) -> list[int]:
    """Return the rounds of which there is a checkpoint; files that are called otherwise are none."""
    known = [re.fullmatch(r"round_([0-9]{8,15})\.safetensors", name) for name in files.names(folder)]
    return sorted(int(match[1]) for match in known if match)


def _keep(files: Folder, folder: Path, rounds: Iterable[int]) -> None:
    rounds = list(rounds)
    kept = {_path(folder, round).stem for round in rounds}
    known = [re.fullmatch(r"extended_([0-9]{8,15})\.safetensors", name) for name in files.names(folder)]
    written = [int(match[1]) for match in known if match]
    # That of the last round in which some client's training set grew: nobody else's.
    kept |= {_extension(folder, max(there)).stem for r in rounds if (there := [w for w in written if w <= r])}
    for name in files.names(folder):
        ours = re.fullmatch(r"\.?(round|extended)_[0-9]{8,15}\.(safetensors|rows)(\.tmp)?", name)
        if ours and Path(name).stem not in kept:
            files.remove(folder / name)


def _restore_states(files: Folder, path: Path, about: dict[str, Any], federation: Federation) -> None:
    """Give the engine the states of a file of rows; a Problem where the file is not what was written."""
    ids, digest = about["clients"].tolist(), hashlib.sha256()
    if not ids:
        federation.engine.restore(federation.run, ids, lambda _: b"")
        return
    try:
        with files.open(path) as file:

            def read(count: int) -> bytes:
                piece = file.read(count)
                digest.update(piece)
                return piece

            federation.engine.restore(federation.run, ids, read)
    except FileNotFoundError:
        raise Problem(f"there is no file '{path}'") from None
    if digest.hexdigest() != about["sha256"]:
        raise Problem(f"'{path}' is damaged: its checksum does not fit")


def _read(folder: MethodFolder, path: Path, clients: int) -> dict[str, Any]:
    """Read a checkpoint without its rows; refuse what is none."""
    where, state = f"'{path}'", folder.files.load_tree(path)
    refuse_form(state, FORM, where)
    if "sha256" not in state["states"]:
        raise Problem(f"'{path.parent}' holds checkpoints of an older perfed: resume with that one, or start anew")
    refuse_form(state, {"states": {"clients": Tensor, "sha256": str}, "traffic": BYTES}, where)
    if _path(path.parent, state["round"]) != path:
        raise Problem(f"{where} is damaged: it is of round {state['round']}")
    ids = state["states"]["clients"]
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.tolist() != sorted({*ids.tolist()} & {*range(clients)}):
        raise Problem(f"{where} is damaged: it has states of clients that there are not")
    if unknown := state["traffic"].keys() - {field.name for field in dataclasses.fields(Traffic)}:
        raise Problem(f"{where} is damaged: there is no traffic '{min(unknown)}'")
    if min(state["logs"].values(), default=0) < 0:
        raise Problem(f"{where} is damaged: no log has a length below 0")
    for log in folder.logs:
        folder.files.refuse_short(log, state["logs"].get(log.name, 0))
    for log in folder.logs:
        digest, size = state.get("digests", {}).get(log.name), state["logs"].get(log.name, 0)  # perfed 0.1 had none
        if digest and size and folder.files.digest(log, size).hexdigest() != digest:
            raise Problem(f"'{log}' is damaged: up to round {state['round']} it is not what was written")
    return state


def _fits(federation: Federation, server: Any) -> bool:
    """Tell if a server's state is one of the federation's method and network: in its form, or in that of what it sends.

    A state may grow, or be kept in another way than at the start.
    """
    if _form(server) == _form(federation.server):
        return True
    ids = torch.zeros(1, dtype=torch.int64, device=federation.method.model.device)
    try:
        sent = [federation.method.broadcast(state, ids) for state in (server, federation.server)]
    except Exception:  # whatever a method says to a state that is not its own
        return False
    now, start = (_form((down.shared, down.own)) for down in sent)
    return now == start


def _form(tree: Any) -> Any:
    """Return how a tree is nested, and each tensor's type and shape."""
    leaves, nesting = flatten(tree)
    return nesting, [(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def _use(folder: MethodFolder, path: Path, state: dict[str, Any], federation: Federation) -> None:
    """Set the federation to what a checkpoint says."""
    device = federation.method.model.device
    there = lambda tree: tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
    server = there(state["server"])
    if not _fits(federation, server):
        raise Problem(f"'{path}' does not fit: its server's state is not one of this method and network")
    _restore_states(folder.files, path.with_suffix(ROWS), state["states"], federation)
    federation.round = state["round"]
    federation.server = server
    federation.moments = there(state.get("moments", {}))  # perfed 0.1 had none
    federation.traffic = Traffic(**state["traffic"])
    federation.strikes, federation.clock = state.get("strikes", 0), state.get("clock", 0.0)  # perfed 0.1 had neither
    try:
        federation.known.restore(state.get("known", {}))
    except Problem as problem:
        raise Problem(f"'{path}' does not fit: {problem}") from None
    last = state.get("extended", 0)
    about = folder.files.load_tree(_extension(path.parent, last)) if last else None
    if about is not None:
        refuse_form(about, EXTENSION, f"'{_extension(path.parent, last)}'")
    federation.engine.restore_extension(federation.run, about)


def restore(
    folder: MethodFolder,
    federation: Federation,
    notice: Callable[[str], None],
    why_not: Callable[[dict[str, Any]], str] = lambda _: "",
) -> dict[str, int] | None:
    """Set the federation to its newest whole checkpoint.

    Args:
        folder: where the checkpoints are.
        federation: a new one of the same method, seed and clients.
        notice: is told which checkpoint is damaged.
        why_not: is given a checkpoint that is whole; says why the run must not go on from it, or nothing.

    Returns:
        The logs' lengths at that checkpoint; None where there is no checkpoint.
    """
    rounds = _rounds(folder.files, folder.checkpoints)
    for round in reversed(rounds):
        path = _path(folder.checkpoints, round)
        try:
            state = _read(folder, path, len(federation.clients))
            refusal = why_not(state)
            if not refusal:
                _use(folder, path, state, federation)
        except Problem as problem:
            if round == rounds[0]:
                raise
            notice(f"{problem}; going back to the checkpoint before it")
            continue
        if refusal:
            raise Problem(refusal)
        return state["logs"]
    return None
