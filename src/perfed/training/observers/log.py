"""Metrics as lines of JSON: one per round and client, one per round, and clock times in a file of their own."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from perfed.federation.federation import Federation
from perfed.training.folder import MethodFolder
from perfed.training.observers import Round


class MetricsLog:
    """Appends what was measured; a resumed run continues exactly where its checkpoint stood."""

    def __init__(
        self,
        folder: MethodFolder,
        sizes: dict[str, int] | None = None,
        shown: str = "accuracy",
        judged: str = "accuracy",
    ):
        """Begin logs, or cut them back to what a checkpoint vouches for.

        Args:
            folder: where they are.
            sizes: bytes of each log by its file's name; None: begin anew.
            shown: the score whose mean over test samples is logged.
            judged: the score whose mean over validation samples is logged, and which one that is.
        """
        self.shown, self.judged = shown, judged
        self.folder, files = folder, folder.files
        for path in folder.logs:
            files.truncate(path, (sizes or {}).get(path.name, 0))
        # Clock times are nobody's result, and differ from run to run.
        logs = [path for path in folder.logs if path != folder.times_log]
        self._digests = {path: files.digest(path) if files.exists(path) else hashlib.sha256() for path in logs}

    def see(self, event: Round) -> None:
        federation = event.federation
        names, round = federation.clients.names, federation.round
        about: dict[str, Any] = {"round": round, "cohort": [names[id] for id in event.cohort]}
        about |= _failures(federation) | _times(federation)
        extended = federation.engine.extended[federation.run].known.items()
        if grown := {names[id]: each.counts for id, each in extended if each.round == round}:
            about["extended"] = grown
        about |= {"bytes": dataclasses.asdict(federation.traffic), **federation.method.notes(federation.server)}
        if event.scores is not None:
            by_client = enumerate(event.scores.by_client())
            lines = [{"round": round, "client": names[id], **scores} for id, scores in by_client]
            self._append(self.folder.scores_log, lines)
            about[self.shown] = event.scores.means("test", self.shown)
            about["validation"], about["judged"] = event.scores.means("val", self.judged), self.judged
        if event.refused:
            about["refused"] = event.refused
        if federation.strikes:
            about["abandoned"] = True
        if event.stopped:
            about["stopped"] = event.stopped
        self._append(self.folder.rounds_log, [about])
        at_server, refining = {}, federation.engine.refining
        if federation.method.refines:
            at_server = {"refine": refining[federation.run]}
            refining[federation.run] = 0.0
        self._append(self.folder.times_log, [{"round": round, "seconds": event.seconds, **at_server}])

    def _append(self, path: Path, lines: list[dict[str, Any]]) -> None:
        content = self.folder.append_lines(path, lines)
        if path in self._digests:
            self._digests[path].update(content)

    def digests(self) -> dict[Path, str]:
        """Return the SHA-256 of each log as it is now, but for that of clock times."""
        return {path: digest.hexdigest() for path, digest in self._digests.items()}

    def sizes(self) -> dict[str, int]:
        """Return how long each log is now; on disk, because a checkpoint will vouch for it."""
        files = self.folder.files
        for path in self.folder.logs:
            if files.exists(path):
                files.sync(path)
        return {path.name: files.size(path) or 0 for path in self.folder.logs}


def _failures(federation: Federation) -> dict[str, Any]:
    """Return who failed in the last round, in a run where clients may, and how much was done where a part was asked."""
    names, answers, about = federation.clients.names, federation.answers, {}
    if answers.asked is not None:
        about["epochs"] = {names[id]: epochs for id, epochs in zip(answers.ids, answers.done or [], strict=True)}
    if federation.fallible:
        late = {names[id]: epochs for id, epochs in answers.late(federation.method.epochs).items()}
        about |= {"lost": [names[id] for id in answers.lost], "late": late, "unchanged": not answers.ids}
    if federation.system.availability < 1:
        about["away"] = len(federation.known.able) - len(federation.known.available)
    return about


def _times(federation: Federation) -> dict[str, Any]:
    """Return the simulated clock, and how long the last round took each client that answered, in a run that has one."""
    if not federation.system.timed:
        return {}
    names = federation.clients.names
    seconds = {names[id]: round(each, 6) for id, each in federation.took.items()}
    return {"clock": round(federation.clock, 6), "seconds": seconds}
