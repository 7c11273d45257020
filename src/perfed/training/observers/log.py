"""Metrics as lines of JSON: one per round and client, one per round, and clock times in a file of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.training import files
from perfed.training.observers import Round

CLIENTS, ROUNDS, TIMES = "metrics.jsonl", "rounds.jsonl", "times.jsonl"
LOGS = (CLIENTS, ROUNDS, TIMES)


class MetricsLog:
    """Appends what was measured; a resumed run continues exactly where its checkpoint stood."""

    def __init__(self, folder: Path, sizes: dict[str, int] | None = None):
        self.paths = {name: folder / name for name in LOGS}
        for name, path in self.paths.items():
            files.truncate(path, (sizes or {}).get(name, 0))

    def see(self, event: Round) -> None:
        federation = event.federation
        names, round = federation.clients.names, federation.round
        about: dict[str, Any] = {"round": round, "cohort": [names[id] for id in event.cohort]}
        about |= _failures(federation)
        about |= {"bytes": dataclasses.asdict(federation.traffic), **federation.method.notes(federation.server)}
        if event.scores is not None:
            lines = [{"round": round, "client": names[id], **one} for id, one in enumerate(event.scores.by_client())]
            self._append(CLIENTS, lines)
            about["accuracy"] = event.scores.means("test")
            about["validation"] = event.scores.means("val")
        if event.refused:
            about["refused"] = event.refused
        if federation.strikes:
            about["abandoned"] = True
        if event.stopped:
            about["stopped"] = event.stopped
        self._append(ROUNDS, [about])
        self._append(TIMES, [{"round": round, "seconds": event.seconds}])

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        with self.paths[name].open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, sort_keys=True) + "\n" for line in lines)

    def sizes(self) -> dict[str, int]:
        """How long each log is now; on disk, because a checkpoint will vouch for it."""
        for path in self.paths.values():
            if path.exists():
                files.sync(path)
        return {name: path.stat().st_size if path.exists() else 0 for name, path in self.paths.items()}


def _failures(federation: Federation) -> dict[str, Any]:
    """Who failed in the last round, in a run where clients may."""
    names, answers, epochs = federation.clients.names, federation.answers, federation.method.epochs
    if federation.faults == Faults():
        return {}
    done = zip(answers.ids, answers.done or [], strict=bool(answers.done))
    late = {names[id]: some for id, some in done if some < epochs}
    return {"lost": [names[id] for id in answers.lost], "late": late, "unchanged": not answers.ids}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
