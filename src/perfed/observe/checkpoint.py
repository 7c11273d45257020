"""Checkpoints: everything a method's training is, in one file; the last two are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from perfed import files
from perfed.core.errors import Problem
from perfed.core.tree import tree_map
from perfed.federation import Federation, Traffic
from perfed.observe import Round
from perfed.observe.metrics import MetricsLog

KEPT = 2


class Checkpoints:
    """Writes one every so many rounds, after the metrics of that round."""

    def __init__(self, folder: Path, every: int, log: MetricsLog):
        self.folder, self.every, self.log = folder / "checkpoints", every, log
        self.folder.mkdir(exist_ok=True)

    def see(self, event: Round) -> None:
        if event.last:  # the end is the result itself
            self._prune()
        elif event.federation.round % self.every == 0:
            self.write(event.federation)

    def write(self, federation: Federation) -> None:
        """Save the federation as it is, with the lengths of the logs that belong to it."""
        state = {
            "round": federation.round,
            "server": federation.server,
            "states": {str(id): state for id, state in sorted(federation.states.items())},
            "traffic": dataclasses.asdict(federation.traffic),
            "logs": self.log.sizes(),
        }
        files.save_tree(self.folder / f"round_{federation.round:08d}.safetensors", state)
        self._prune()

    def _prune(self) -> None:
        for old in sorted(self.folder.glob("round_*.safetensors"))[:-KEPT]:
            old.unlink()


def restore(folder: Path, federation: Federation, notice: Callable[[str], None]) -> dict[str, int] | None:
    """Set the federation to its newest whole checkpoint; returns the logs' lengths, None where there is none."""
    device = federation.method.model.device
    here = lambda tree: tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
    found = sorted((folder / "checkpoints").glob("round_*.safetensors"), reverse=True)
    for at, path in enumerate(found):
        try:
            state = files.load_tree(path)
            for name, size in state["logs"].items():
                files.long_enough(folder / name, size)
        except Problem as problem:
            if at == len(found) - 1:
                raise
            notice(f"{problem}; going back to the checkpoint before it")
            continue
        federation.round = state["round"]
        federation.server = here(state["server"])
        federation.states = {int(id): here(one) for id, one in state["states"].items()}
        federation.traffic = Traffic(**state["traffic"])
        return state["logs"]
    return None
