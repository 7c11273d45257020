"""Preparation: how rows of a table become samples; it is learned from sums, and stays with the models.

Every client sums up its training rows (`sums`), the server adds the sums (`join`), once, before the first round. What
comes of it is plain numbers and texts: training uses it, and so do clients that come later, predictions and saved
models. Numbers are standardised, texts become one-hot; a missing value becomes the mean (0, where numbers stay as they
are), and where training rows had any, a further feature says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.core.errors import Problem, few, nearest
from perfed.data.records import Records

MOST_TEXTS = 1000  # of a column; it has a feature for each
FEW_TEXTS = 20  # up to which nobody asks how often each occurs
CONSTANT = 1e-14  # of the second moment: a variance below it is rounding
UNSEEN = -1.0  # stands for a text that training did not have
NUMBER, LETTER = 8, 1  # bytes on the way


@dataclass(frozen=True)
class Column:
    """A column of a table, as models know it.

    Attributes:
        name: what it is called.
        mean: what is subtracted from its numbers.
        std: what they are divided by; 0: they are all alike, and become 0.
        texts: what it may hold, where it holds texts: each has a feature.
        flag: whether a feature says that the value is missing.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    texts: tuple[str, ...] | None = None
    flag: bool = False

    def plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        kind = {"mean": self.mean, "std": self.std} if self.texts is None else {"texts": list(self.texts)}
        return {"name": self.name, **kind, "flag": self.flag}


@dataclass(frozen=True)
class Preparation:
    """Make samples of a client's rows.

    Attributes:
        normalise: where means and deviations are from: federated, local, none.
        columns: in the order in which they are prepared.
        named: whether people gave them these names; else they are numbers.
        absent: the columns that the client itself never had a value of.
    """

    normalise: str
    columns: tuple[Column, ...]
    named: bool = True
    absent: tuple[str, ...] = ()

    @staticmethod
    def of(plain: Mapping[str, Any], client: str = "") -> Preparation:
        """Read what `plain` or `join` wrote; of several clients, for the one with this name."""
        columns = [Column(**{**each, "texts": _tuple(each.get("texts"))}) for each in plain["columns"]]
        own = plain.get("clients", {}).get(client, {})
        if "mean" in own:
            scale = zip(columns, own["mean"], own["std"], strict=True)
            columns = [c if c.texts is not None else replace(c, mean=mean, std=std) for c, mean, std in scale]
        absent = own.get("absent", plain.get("absent", ()))
        return Preparation(plain["normalise"], tuple(columns), plain["named"], tuple(absent))

    def plain(self) -> dict[str, Any]:
        """Return plain values for a file."""
        columns = [column.plain() for column in self.columns]
        return {"normalise": self.normalise, "columns": columns, "named": self.named, "absent": list(self.absent)}

    @property
    def changes(self) -> bool:
        """Whether samples are anything but the numbers of the rows."""
        return any(column != Column(column.name) for column in self.columns)

    @property
    def features(self) -> list[str]:
        """What the numbers of a sample are."""
        names = [column.name for column in self.columns if column.texts is None]
        names += [f"{column.name}={text}" for column in self.columns for text in column.texts or ()]
        return names + [f"{column.name} is missing" for column in self.columns if column.flag]

    def apply(self, values: Tensor) -> Tensor:
        """Make samples of rows.

        Args:
            values: [n, columns]; NaN where a value is missing; of a text its place in its column's texts.

        Returns:
            [n, features], float64: all numbers, then a place for every text, then what is missing.
        """
        values = values.to(torch.float64)
        put = lambda numbers: torch.tensor(numbers, dtype=torch.float64, device=values.device)
        kept = [place for place, column in enumerate(self.columns) if column.texts is None]
        numbers = [self.columns[place] for place in kept]
        scaled = (values[:, kept] - put([column.mean for column in numbers])) / put([c.std or 1.0 for c in numbers])
        alike = put([column.std for column in numbers]) == 0
        parts = [torch.where(alike | scaled.isnan(), 0.0, scaled)]
        for place, column in enumerate(self.columns):
            if column.texts is not None:
                parts.append((values[:, place, None] == put(range(len(column.texts)))).to(torch.float64))
        flagged = [place for place, column in enumerate(self.columns) if column.flag]
        return torch.cat([*parts, values[:, flagged].isnan().to(torch.float64)], 1)

    def align(
        self, records: Records, where: str, known: Sequence[str] = (), may_lack: Sequence[str] | None = None
    ) -> tuple[np.ndarray, list[str]]:
        """Bring rows into the order of the columns, by name.

        Args:
            records: the rows.
            where: what they are, for people.
            known: columns that are no features, such as the label's.
            may_lack: columns that count as missing where the rows have none of the name; None: `absent`.

        Returns:
            [n, columns], as `apply` takes them, and sentences about what was left out or is unknown.
        """
        wanted = [column.name for column in self.columns]
        if records.columns is None or not self.named:
            return self._in_place(records, where), []
        may_lack = self.absent if may_lack is None else may_lack
        if missing := [name for name in wanted if name not in records.columns and name not in may_lack]:
            others = [name for name in records.columns if name not in wanted]
            if len(others) == len(records.columns):
                raise Problem(
                    f"{where} has none of the columns that the model needs, {few(wanted)}: has it a header line?"
                )
            raise Problem(f"{where} lacks what the model needs: {_quoted(missing)}{nearest(missing[0], others)}")
        notes, values = [], np.full((len(records.values), len(wanted)), np.nan)
        for place, column in enumerate(self.columns):
            if column.name in records.columns:
                there = records.columns.index(column.name)
                values[:, place], note = self._values(column, records.values[:, there], records.texts[there], where)
                notes += note
        if unused := [name for name in records.columns if name not in wanted and name not in known]:
            notes.append(f"{where}: not used, because the model does not know it: {_quoted(unused)}")
        if dropped := [name for name in records.columns if name not in wanted and name in known]:
            notes.append(f"{where}: not used, because it is no feature: {_quoted(dropped)}")
        return values, notes

    def _in_place(self, records: Records, where: str) -> np.ndarray:
        """Take rows without names of columns as they stand."""
        if records.values.shape[1] != len(self.columns):
            names = f": {', '.join(column.name for column in self.columns)}" if self.named else ""
            raise Problem(
                f"the input must have the shape [samples, {len(self.columns)}], not {list(records.values.shape)}{names}"
            )
        for column, texts in zip(self.columns, records.texts, strict=True):
            if (column.texts is None) != (texts is None):
                raise Problem(f"{where} needs names of columns, because '{column.name}' holds text: use a CSV file")
        return records.values

    def _values(
        self, column: Column, values: np.ndarray, texts: tuple[str, ...] | None, where: str
    ) -> tuple[np.ndarray, list[str]]:
        """Return a column's values as `apply` takes them, and a sentence about texts that training did not have."""
        if np.isnan(values).all():
            return values, []
        if column.texts is None and texts is not None:
            raise Problem(f"{where}: column '{column.name}' holds text ('{texts[0]}'), in training it held numbers")
        if column.texts is None:
            return values, []
        if texts is None:
            few = ", ".join(column.texts[:5])
            raise Problem(f"{where}: column '{column.name}' holds numbers, in training it held text ({few})")
        place = {text: float(number) for number, text in enumerate(column.texts)}
        missing = np.isnan(values)
        places = np.array([place.get(text, UNSEEN) for text in texts])[np.where(missing, 0, values).astype(int)]
        unseen = sorted({texts[int(value)] for value in values[~missing & (places == UNSEEN)]})
        notes = [
            f"{where}: training had no {_quoted(unseen)} in '{column.name}': such values count as none of its texts"
        ]
        return np.where(missing, np.nan, places), notes if unseen else []


@dataclass(frozen=True)
class Sums:
    """What a client sends of its training rows; they add up to those of all.

    Attributes:
        rows: how many there are.
        count: [columns], in how many a value is known.
        total: [columns], the sum of its numbers.
        squares: [columns], the sum of their squares.
        texts: for each column the texts that occur; None: it holds numbers.
    """

    rows: int
    count: np.ndarray
    total: np.ndarray
    squares: np.ndarray
    texts: tuple[frozenset[str] | None, ...]


def sums(records: Records) -> Sums:
    """Sum up a client's training rows; each sum is rounded once, so the order of rows does not matter."""
    known = ~np.isnan(records.values)
    columns = range(len(records.texts))
    numbers = [records.values[known[:, place], place] for place in columns]
    added = lambda power: [
        0.0 if texts else math.fsum(n**power) for n, texts in zip(numbers, records.texts, strict=True)
    ]
    occur = lambda place, texts: frozenset(texts[int(value)] for value in np.unique(numbers[place]))
    texts = tuple(None if texts is None else occur(place, texts) for place, texts in enumerate(records.texts))
    return Sums(len(records.values), known.sum(0), np.array(added(1)), np.array(added(2)), texts)


def join(clients: Mapping[str, Sums], columns: Sequence[str] | None, normalise: str) -> dict[str, Any] | None:
    """Make the preparation of all clients out of their sums.

    Args:
        clients: the sums of each, by its name.
        columns: the names of the columns; None: they have none.
        normalise: federated, local or none.

    Returns:
        The preparation as plain values, with what it took to agree on it; None where there is nothing to prepare.
    """
    each = list(clients.values())
    rows = sum(client.rows for client in each)
    count, total, squares = (np.sum([getattr(client, k) for client in each], axis=0) for k in _SUMS)
    flags = count < rows
    mean, std = _moments(count, total, squares) if normalise == "federated" else (0.0 * total, 0.0 * total + 1)
    made = []
    for place in range(len(count)):
        name = str(place) if columns is None else columns[place]
        texts = [client.texts[place] for client in each]
        occur = None if texts[0] is None else tuple(sorted(frozenset().union(*(t for t in texts if t is not None))))
        if occur is not None:
            _refuse_names(name, len(occur), int(count[place]))
            made.append(Column(name, texts=occur, flag=bool(flags[place])))
        else:
            made.append(Column(name, float(mean[place]), float(std[place]), flag=bool(flags[place])))
    preparation = Preparation(normalise, tuple(made), columns is not None)
    if not preparation.named and not preparation.changes and normalise != "local":
        return None
    about = {key: value for key, value in preparation.plain().items() if key != "absent"}
    about["clients"] = {name: mine for name, client in clients.items() if (mine := own(preparation, client))}
    return {**about, "traffic": _traffic(preparation, each)}


_SUMS = ("count", "total", "squares")


def own(preparation: Preparation, client: Sums) -> dict[str, Any]:
    """Return what is a client's own in the preparation of all: columns it has no value of, its means if they count."""
    about: dict[str, Any] = {}
    if client.rows and (client.count == 0).any():
        about["absent"] = [c.name for c, known in zip(preparation.columns, client.count, strict=True) if not known]
    if preparation.normalise == "local":
        mean, std = _moments(client.count, client.total, client.squares)
        about |= {"mean": mean.tolist(), "std": std.tolist()}
    return about


def _moments(count: np.ndarray, total: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations; 0 where all numbers are alike, or none is known."""
    known = np.maximum(count, 1)
    mean, second = total / known, squares / known
    variance = second - mean**2
    return mean, np.sqrt(np.where(variance > CONSTANT * second, variance, 0.0))


def _refuse_names(name: str, texts: int, rows: int) -> None:
    """Refuse a column that names its rows rather than describing them."""
    if texts > MOST_TEXTS or (texts > FEW_TEXTS and 2 * texts > rows):
        raise Problem(
            f"column '{name}' holds {texts:,} different texts in {rows:,} training rows, as names or free text do "
            f"(at most {MOST_TEXTS:,}, and each in two rows or more on average): take the column out"
        )


def _traffic(preparation: Preparation, clients: Sequence[Sums]) -> dict[str, int]:
    """Return the bytes of the exchange: a client that has nothing to say sends nothing."""
    federated = preparation.normalise == "federated"
    texts = sum(column.texts is not None for column in preparation.columns)
    numbers = (len(preparation.columns) - texts) * federated
    flags = sum(column.flag for column in preparation.columns)
    letters = lambda texts: sum(len(text.encode()) for text in texts)
    down = 2 * NUMBER * numbers + LETTER * flags + sum(letters(column.texts or ()) for column in preparation.columns)
    sent = (federated + 3 * numbers + texts) * NUMBER  # rows; counts, sums and sums of squares; counts of texts
    named = sum(letters(texts or ()) for client in clients for texts in client.texts)
    gaps = sum(int((client.count < client.rows).sum()) for client in clients) * LETTER * (not federated)
    return {"up_mean": sent * len(clients), "up_own": named + gaps, "down_shared": down * len(clients)}


def _tuple(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if texts is None else tuple(texts)


def _quoted(names: Sequence[str]) -> str:
    return few([f"'{name}'" for name in names])


_OVER_ALL = "means and deviations over all clients"


def words(plain: Mapping[str, Any]) -> list[str]:
    """Say for people what becomes of samples before a network sees them, and what left the clients for it.

    Args:
        plain: a preparation as `join` wrote it, or what is kept of images.

    Returns:
        Sentences, without a full stop.
    """
    table, clients, targets = "columns" in plain, plain.get("clients", {}), plain.get("targets", ())
    columns, normalise = Preparation.of(plain).columns if table else (), plain.get("normalise", "none")
    as_they_are = normalise == "none" and all(column.plain() == Column(column.name).plain() for column in columns)
    if as_they_are and not targets:
        return list(plain.get("notes", ()))
    texts = [column.name for column in columns if column.texts is not None]
    flagged = [column.name for column in columns if column.flag]
    lines = [] if as_they_are else ["; ".join(_treatments(normalise, columns))] if table else [_OVER_ALL]
    if targets:
        names = few([f"'{target['name']}'" for target in targets])
        told = f"numbers to predict standardised over all clients ({names}); scores and predictions are in their units"
        alike = few([f"'{target['name']}'" for target in targets if not target["std"]])
        lines.append(told + (f"; nothing to learn, as all training rows have the same {alike}" if alike else ""))
    absent = [f"'{name}' has no {few(mine['absent'])}" for name, mine in clients.items() if "absent" in mine]
    lines += [f"no values at all: {few(absent, most=3)}"] if absent else []
    if any(plain.get("traffic", {}).values()):
        numbers = "numeric columns" if table else "channels"
        counted = normalise == "federated" and len(texts) < max(1, len(columns))
        summed = [numbers] * counted + ["the numbers to predict"] * bool(targets)
        sent = [f"counts, sums and sums of squares of {' and '.join(summed)}"] * bool(summed)
        sent += ["which columns have gaps"] * bool(flagged and normalise != "federated")
        sent += ["which texts occur, and how many rows have one"] * bool(texts)
        lines.append(
            f"before round 1 each client sent of its training samples: {', '.join(sent)} "
            f"({sum(plain['traffic'].values()):,} bytes up and down in all, part of every method's traffic)"
        )
    return lines + list(plain.get("notes", ()))


def _treatments(normalise: str, columns: Sequence[Column]) -> list[str]:
    """Say what becomes of the columns."""
    numbers = [column for column in columns if column.texts is None]
    texts = [column.name for column in columns if column.texts is not None]
    flagged = [column.name for column in columns if column.flag]
    alike = [column.name for column in numbers if not column.std]
    scale = {
        "federated": "standardised over all clients",
        "local": "standardised in each client",
        "none": "as they are",
    }
    lines = [f"{len(numbers)} numeric column{'s' * (len(numbers) != 1)} {scale[normalise]}"] if numbers else []
    lines += [f"text becomes one-hot ({few(texts)})"] if texts else []
    lines += [f"missing values filled and flagged ({few(flagged)})"] if flagged else []
    return lines + ([f"of no use, because training rows hold at most one value of it: {few(alike)}"] if alike else [])
