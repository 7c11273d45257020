"""Metrics as lines of JSON: one per round and client, one per round, and clock times in a file of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from perfed.core.tree import tree_map
from perfed.engines.base import Values
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.training import files
from perfed.training.observers import Round

CLIENTS, ROUNDS, TIMES = "metrics.jsonl", "rounds.jsonl", "times.jsonl"
LOGS = (CLIENTS, ROUNDS, TIMES)


def number(value: float) -> float | None:
    """A float for JSON, which has no NaN: a client without samples has no score."""
    return None if value != value else value


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
        if event.values is not None:
            lines = [{"round": round, "client": names[id], **one} for id, one in enumerate(by_client(event.values))]
            self._append(CLIENTS, lines)
            about["accuracy"] = mean_accuracy(event.values)
            about["validation"] = mean_accuracy(event.values, "val")
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


def by_client(values: Values) -> list[dict[str, Any]]:
    """Scores as plain numbers, one dict per client: model -> split -> metric."""
    plain = tree_map(torch.Tensor.tolist, values)  # all at once: there may be very many clients
    count = len(next(iter(plain["test"].values()))["accuracy"])
    models = list(plain["test"])
    score = lambda split, model, id: {k: number(v[id]) for k, v in plain[split][model].items()}
    return [{model: {split: score(split, model, id) for split in plain} for model in models} for id in range(count)]


def mean_accuracy(values: Values, split: str = "test") -> dict[str, float | None]:
    """Unweighted mean accuracy of each kind of model over the clients that have samples in the split."""
    known = values.get(split, {})
    return {model: number(known[model]["accuracy"].nanmean().item()) if known else None for model in values["test"]}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
