"""Records: rows of a table as people have them, a number or a text in each cell, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfed.core.errors import Problem

MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "<na>", "nat", "null", "none", "?"})  # in any case
_WRITTEN = re.compile(r"([+-]?\d+([.,]\d+)?)\s*(\D*)")  # a number, perhaps with a comma or a unit


@dataclass(frozen=True)
class Records:
    """Rows of a table; a column holds numbers or texts.

    Attributes:
        values: [rows, columns]; NaN where a cell is missing; of a text its place in `texts`.
        texts: for each column the texts that occur in it; None: it holds numbers.
        columns: their names, where they have some.
    """

    values: np.ndarray
    texts: tuple[tuple[str, ...] | None, ...]
    columns: tuple[str, ...] | None = None


def numbers_alone(values: np.ndarray) -> Records:
    """Return records of an array of numbers, whose columns have no names."""
    return Records(values, (None,) * values.shape[1])


def read_cells(columns: Sequence[str], rows: Sequence[Sequence[str]], place: Callable[[int], str]) -> Records:
    """Read the cells of a table: a column in which every cell is a number holds numbers, one in which none is texts.

    Args:
        columns: their names.
        rows: the cells of every row.
        place: says where a row stands, for people.

    Returns:
        The records; a column that is neither is a Problem.
    """
    values, texts = np.empty((len(rows), len(columns))), []
    for number, name in enumerate(columns):
        values[:, number], known = _column([row[number] for row in rows], name, place)
        texts.append(known)
    return Records(values, tuple(texts), tuple(columns))


def is_frame(x: Any) -> bool:
    """Tell a table with named columns, as pandas has, from an array."""
    return hasattr(x, "columns") and hasattr(x, "__getitem__") and not isinstance(x, np.ndarray)


def from_frame(frame: Any) -> Records:
    """Return the records of a DataFrame of pandas, or of what looks like it."""
    names = [str(name) for name in frame.columns]
    if len(set(names)) < len(names):
        raise Problem(f"the input has two columns named '{max(names, key=names.count)}'")
    cells = [[str(cell) for cell in frame[name].tolist()] for name in frame.columns]
    return read_cells(names, list(zip(*cells, strict=True)), lambda row: f"row {row}")


def _column(cells: list[str], name: str, place: Callable[[int], str]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Return a column's values, and its texts where it holds texts."""
    try:
        return _finite([float(cell) for cell in cells], place), None
    except ValueError:  # gaps, or text
        cells = [cell.strip() for cell in cells]
    known = [cell.lower() not in MISSING for cell in cells]
    numbers = [_number(cell) if there else np.nan for cell, there in zip(cells, known, strict=True)]
    wrong = [row for row, number in enumerate(numbers) if number is None]
    if not wrong:
        return _finite(numbers, place), None
    right = [row for row, number in enumerate(numbers) if known[row] and number is not None]
    if right:
        raise Problem(
            f"{place(wrong[0])}: '{cells[wrong[0]]}' in column '{name}' is not a number, though '{cells[right[0]]}' "
            f"({place(right[0])}) is: write numbers without units and with a decimal point, and leave a cell empty "
            "where the value is missing"
        )
    _refuse_units([cells[row] for row in wrong], name, place(wrong[0]))
    texts = tuple(sorted({cells[row] for row in wrong}))
    number_of = {text: float(number) for number, text in enumerate(texts)}
    return np.array([number_of[cell] if there else np.nan for cell, there in zip(cells, known, strict=True)]), texts


def _finite(numbers: Sequence[float | None], place: Callable[[int], str]) -> np.ndarray:
    """Return numbers as an array; refuse what float32 cannot hold."""
    values = np.array(numbers, dtype=np.float64)
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        raise Problem(f"{place(int(infinite.argmax()))}: a feature is not a finite number")
    return values


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _refuse_units(cells: list[str], name: str, where: str) -> None:
    """Refuse texts that are all numbers with one and the same unit, or with a decimal comma."""
    written = [_WRITTEN.fullmatch(cell) for cell in cells]
    if len(units := {match and match[3] for match in written}) == 1 and written[0] is not None:
        unit = f"with '{units.pop()}' behind it" if written[0][3] else "with a decimal comma"
        number = written[0][1].replace(",", ".")
        raise Problem(f"{where}: '{cells[0]}' in column '{name}' is a number {unit}: write {number}")
