"""What a finished cell says: every client's accuracy under each rule, and the curves that figures are made of.

Rules, each named in every output: `max`: the round with the highest mean TEST accuracy, which is how some papers
report and is optimistic; `val`: the round with the highest mean validation accuracy; `last10`: the mean over the
evaluations of the last ten rounds; `last`: the last round. The last three never look at test data to choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from perfed.core.errors import Problem
from perfed.studies import measures
from perfed.studies.measures import Curves
from perfed.studies.papers.cells import NEWCOMERS, Cell
from perfed.studies.papers.protocol import RULES
from perfed.training import files
from perfed.training.results import Run

LATE = 10  # rounds


def picked(curve: Curves, rule: str) -> tuple[int | None, np.ndarray]:
    """(the round, one accuracy per client); NaN where the rule needs validation samples and there are none."""
    if rule == "last10":
        return None, curve.test[curve.rounds > curve.rounds[-1] - LATE].mean(0)
    if rule == "last":
        return int(curve.rounds[-1]), curve.test[-1]
    mean = curve.mean if rule == "max" else measures.means(curve.val)
    if np.isnan(mean).all():
        return None, np.full(curve.test.shape[1], np.nan)
    at = int(np.nanargmax(mean))  # the first, where several are equal
    return int(curve.rounds[at]), curve.test[at]


def _of_newcomers(found: dict[str, Any]) -> Curves:
    """Epochs of those who joined later, in place of rounds."""
    pick = lambda split, key: np.array(
        [[one.get(split, {}).get(key) for one in epoch] for epoch in found["epochs"]], dtype=float
    )
    epochs = np.arange(1, len(found["epochs"]) + 1)
    numbers = pick("test", "accuracy"), pick("val", "accuracy"), pick("test", "loss")
    return Curves(epochs, *numbers, np.array(found["samples"]))


def scores(cell: Cell, model: str, until: int) -> dict[str, Any]:
    """Everything a table needs of one cell, in plain values; kept beside the run, so that logs are read once."""
    place = cell.place(model, until)
    if place.exists():
        return files.read_json(place)
    run = Run(cell.folder)
    if model not in run.result(cell.method)["clients"][0]:
        raise Problem(f"{cell.method} has no model '{model}' to score")
    rounds, sent = measures.traffic(run, cell.method)
    if cell.first:
        curve = _of_newcomers(files.read_json(cell.folder / NEWCOMERS))
        spent = [int(sent[-1]) for _ in curve.rounds]
    else:
        curve = measures.curves(run, cell.method, model, until)
        spent = [int(sent[rounds == r][0]) for r in curve.rounds]
    environment, asked = cell.run.environment(), files.read_json(cell.record)
    machine = f"{asked.get('device') or environment['device']}, engine {environment['engine']}"
    n = np.where(np.isnan(curve.test), 0, curve.samples)
    plain = lambda values: [None if np.isnan(v) else float(v) for v in values]
    chosen = {rule: picked(curve, rule) for rule in RULES}
    whole = not cell.first and curve.rounds[-1] == rounds[-1]
    found = {
        "samples": curve.samples.tolist(),
        "rounds": curve.rounds.tolist(),
        "mean": plain(curve.mean),
        "pooled": plain((np.nan_to_num(curve.test) * n).sum(1) / n.sum(1)),
        "loss": plain(measures.means(curve.loss)),
        # Made after the last round of a run, so not known for an earlier one or for those who joined later.
        "full": measures.full_scores(run, cell.method, model) if whole else {},
        "sent": spent,
        "rules": {rule: {"round": at, "clients": plain(each)} for rule, (at, each) in chosen.items()},
        "system": measures.system(run, cell.method, curve),
        "machine": f"{machine}, torch {environment['versions']['torch']}",
        "data": cell.run.raw_clients().get("partition", {}).get("note", ""),
        **{key: asked[key] for key in ("version", "commit")},
    }
    files.write_json(place, found)
    return found
