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
from perfed.studies.papers.cells import Cell
from perfed.studies.papers.protocol import RULES
from perfed.training import files
from perfed.training.results import Run
from perfed.training.statistics import means

LATE = 10  # rounds


def pick_round(curve: Curves, rule: str) -> tuple[int | None, np.ndarray]:
    """Return the round that a rule picks, and every client's accuracy in it.

    The round is None where the rule averages over rounds, or needs validation samples and there are none; then
    accuracies are NaN.
    """
    if rule == "last10":
        return None, curve.test[curve.rounds > curve.rounds[-1] - LATE].mean(0)
    if rule == "last":
        return int(curve.rounds[-1]), curve.test[-1]
    mean = curve.mean if rule == "max" else means(curve.val)
    if np.isnan(mean).all():
        return None, np.full(curve.test.shape[1], np.nan)
    index = int(np.nanargmax(mean))  # of several that are equal, the first
    return int(curve.rounds[index]), curve.test[index]


def _curves_of_newcomers(cell: Cell) -> Curves:
    """Return the scores of the clients that joined later; their epochs stand in place of rounds."""
    about = cell.run.files.read_json(cell.newcomers_file)
    pick = lambda split, metric: np.array(
        [[client.get(split, {}).get(metric) for client in epoch] for epoch in about["epochs"]], dtype=float
    )
    epochs = np.arange(1, len(about["epochs"]) + 1)
    numbers = pick("test", "accuracy"), pick("val", "accuracy"), pick("test", "loss")
    return Curves(epochs, *numbers, np.array(about["samples"]))


def cell_scores(cell: Cell, model: str, until: int) -> dict[str, Any]:
    """Return all that a table needs of a cell, in plain values; kept beside the run, so that logs are read once.

    Args:
        cell: a finished cell.
        model: which of the method's models is scored.
        until: the last round that counts; 0: all.
    """
    path = cell.scores_file(model, until)
    if path.exists():
        return cell.run.files.read_json(path)
    run = Run(cell.folder)
    if model not in run.result(cell.method)["clients"][0]:
        raise Problem(f"{cell.method} has no model '{model}' to score")
    rounds, sent = measures.traffic(run, cell.method)
    if cell.first:
        curve = _curves_of_newcomers(cell)
        spent = [int(sent[-1]) for _ in curve.rounds]
    else:
        curve = measures.curves(run, cell.method, model, until)
        spent = [int(sent[rounds == r][0]) for r in curve.rounds]
    environment, record = run.folder.environment(), files.read_json(cell.record)
    machine = f"{record.get('device') or environment['device']}, engine {environment['engine']}"
    n = np.where(np.isnan(curve.test), 0, curve.samples)
    plain = lambda values: [None if np.isnan(v) else float(v) for v in values]
    picked = {rule: pick_round(curve, rule) for rule in RULES}
    whole = not cell.first and curve.rounds[-1] == rounds[-1]
    scores = {
        "samples": curve.samples.tolist(),
        "rounds": curve.rounds.tolist(),
        "mean": plain(curve.mean),
        "pooled": plain((np.nan_to_num(curve.test) * n).sum(1) / n.sum(1)),
        "loss": plain(means(curve.loss)),
        # Made after the last round of a run, so not known for an earlier one or for those who joined later.
        "full": measures.full_scores(run, cell.method, model) if whole else {},
        "sent": spent,
        "rules": {rule: {"round": round, "clients": plain(each)} for rule, (round, each) in picked.items()},
        "system": measures.system(run, cell.method, curve),
        "machine": f"{machine}, torch {environment['versions']['torch']}",
        "data": run.about.get("partition", {}).get("note", ""),
        **{key: record[key] for key in ("version", "commit")},
    }
    cell.run.files.write_json(path, scores)
    return scores
