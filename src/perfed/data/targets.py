"""Targets: the numbers that a regression predicts, standardised over the training rows of all clients.

Clients send counts, sums and sums of squares, as of the columns of a table, and they are traffic like those. Scores and
predictions are in units of the target again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from perfed.core.errors import Problem, few
from perfed.data.pool import Pool
from perfed.data.preparation import join, sums
from perfed.data.records import numbers_alone


def standardised(
    pool: Pool,
    training: Mapping[str, np.ndarray],
    preparation: dict[str, Any] | None,
    known: Mapping[str, Any] | None = None,
) -> tuple[Pool, dict[str, Any] | None]:
    """Return a regression's pool with targets of mean 0 and deviation 1 over all training rows.

    Args:
        pool: all rows; another task's stays as it is.
        training: each client's training rows, by its name.
        preparation: what was agreed on of the samples.
        known: the preparation that models were trained with, which newcomers share; None: it is made here.

    Returns:
        The pool, and the preparation with `targets`: the name, mean and deviation of each.
    """
    if pool.task != "regression":
        return pool, preparation
    preparation = dict(preparation or {})
    if known is not None and "targets" in known:
        preparation["targets"] = known["targets"]
        _refuse_others(pool, [target["name"] for target in known["targets"]])
    else:
        each = {name: sums(numbers_alone(pool.y[mine])) for name, mine in training.items()}
        names = pool.labels or tuple(map(str, range(pool.classes)))
        made = join(each, names, "federated") or {}
        preparation["targets"] = [{key: column[key] for key in ("name", "mean", "std")} for column in made["columns"]]
        sent = preparation.get("traffic", {})
        preparation["traffic"] = {way: size + sent.get(way, 0) for way, size in made["traffic"].items()}
    mean, std = (np.array([target[key] for target in preparation["targets"]]) for key in ("mean", "std"))
    return replace(pool, y=(pool.y - mean) / np.where(std > 0, std, 1.0)), preparation


def _refuse_others(pool: Pool, names: list[str]) -> None:
    """Refuse targets that a run's models do not predict."""
    if (mine := list(pool.labels or map(str, range(pool.classes)))) != names:
        raise Problem(f"the new clients have the labels {few(mine)}, and the run's models predict {few(names)}")
