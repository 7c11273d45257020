"""Strata: what samples are counted by, where a partition deals them, a split is stratified or a report shows them.

- classification: their classes
- binary: whether the label is 0 or 1
- multilabel: the rarest of their labels (over all samples of the data set), or none
- regression: bins of the target (the first one, where there are several), each with about as many samples
- next_token: nothing; all samples are alike
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from perfed.core.clients import Clients
from perfed.core.task import Regression

ALIKE = "all"  # the one stratum of samples that nothing tells apart


@dataclass(frozen=True)
class Strata:
    """How samples are told apart by their labels.

    Attributes:
        names: what each stratum is called.
        what: the word for one.
        rule: what it is, for people.
        ends: regression: the numbers between the bins.
        rarest: multilabel: the labels, the rarest first.
    """

    names: tuple[str, ...]
    what: str
    rule: str
    ends: tuple[float, ...] = ()
    rarest: tuple[int, ...] = ()

    def of(self, y: np.ndarray) -> np.ndarray:
        """Return the stratum of each row of labels, in units of the label."""
        if self.ends:
            return np.searchsorted(self.ends, _first(y), side="right")
        if self.rarest:
            has = y[:, self.rarest] > 0
            return np.where(has.any(axis=1), np.array(self.rarest)[has.argmax(axis=1)], y.shape[1])
        return np.zeros(len(y), dtype=np.int64) if len(self.names) == 1 else _first(y).astype(np.int64)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        lists = {"names": list(self.names), "ends": list(self.ends), "rarest": list(self.rarest)}
        return {"what": self.what, "rule": self.rule, **lists}

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Strata:
        """Read what `plain` wrote."""
        return Strata(tuple(plain["names"]), plain["what"], plain["rule"], tuple(plain["ends"]), tuple(plain["rarest"]))


def strata(task: str, y: np.ndarray, labels: tuple[str, ...] | None, bins: int) -> Strata | None:
    """Find out what samples of a task are told apart by.

    Args:
        task: its name.
        y: all labels, in units of the label.
        labels: what the outputs are called.
        bins: how many bins there are of numbers; fewer where numbers are alike.

    Returns:
        The strata; None: the classes.
    """
    if task == "classification":
        return None
    if task == "binary":
        return Strata(("0", "1"), "label", "label")
    names = labels or tuple(map(str, range(y.shape[-1] if y.ndim > 1 else 1)))
    if task == "multilabel":
        rarest = tuple(np.argsort((y > 0).sum(axis=0), kind="stable").tolist())
        return Strata((*names, "none"), "label", "rarest label", rarest=rarest)
    if task == "regression":
        ends = _ends(_first(y), bins)
        edges = ["", *_distinct(ends), ""]
        named = tuple(f"{low}..{high}" for low, high in pairwise(edges)) if ends else (ALIKE,)
        return Strata(named, "bin", f"{len(named)} bins of '{names[0]}'", ends)
    return Strata((ALIKE,), "sample", "samples")


def _first(y: np.ndarray) -> np.ndarray:
    return y if y.ndim == 1 else y[:, 0]


def _ends(numbers: np.ndarray, bins: int) -> tuple[float, ...]:
    """Return what lies between bins: halfway between two numbers that occur, so that rounding moves nobody."""
    known = np.unique(numbers)
    places = np.searchsorted(known, np.quantile(numbers, np.arange(1, bins) / bins, method="higher"))
    places = np.unique(places[places > 0])
    return tuple(((known[places - 1] + known[places]) / 2).tolist())


def _distinct(ends: tuple[float, ...]) -> list[str]:
    """Write the ends of bins with as many digits as tell them apart, and four at least: bins are known by them."""
    written = ([f"{end:.{digits}g}" for end in ends] for digits in range(4, 18))
    return next(names for names in written if len({*names}) == len(ends))


def strata_of(clients: Clients) -> Strata | None:
    """Return what clients' samples are told apart by; None: their classes."""
    known = (clients.partition or {}).get("strata")
    if known is not None:
        return Strata.read(known)
    return None if clients.task.kind == "classification" else Strata((ALIKE,), "sample", "samples")


def stratum_names(clients: Clients) -> list[str]:
    """Return what the strata are called; of classes without names, their numbers."""
    known = strata_of(clients)
    return list(known.names if known else clients.labels or map(str, range(clients.classes)))


def stratum_counts(clients: Clients, *splits: str) -> np.ndarray:
    """Count the samples of each stratum that each client has in some splits together: [clients, strata]."""
    known, kinds = strata_of(clients), len(stratum_names(clients))
    total = np.zeros(len(clients) * kinds, dtype=np.int64)
    for split in map(clients.split, splits):
        y = split.y.cpu().numpy()
        if isinstance(clients.task, Regression):
            y = clients.task.predicted(split.y.cpu().double()).numpy()  # in units of the label
        owner = np.repeat(np.arange(len(clients)), split.size)
        total += np.bincount(owner * kinds + (known.of(y) if known else y), minlength=len(total))
    return total.reshape(len(clients), kinds)
