"""The task of the user's own files: what their labels are, and which labels go with which task.

Where data.task does not say it:

- several label columns of 0 and 1 (or yes and no) are multilabel, of other numbers regression
- one label column is regression if most of the different labels are numbers that are not whole, or if there
  are more than MOST_DISTINCT different whole numbers; else it is classification
- [n, length] whole numbers beside samples [n, length] of whole numbers are next_token
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from perfed.core.errors import Problem, few
from perfed.core.task import IGNORED
from perfed.data.config import DataConfig
from perfed.data.labels import NO, YES, is_number, of_single_clients, read_labels, spelling
from perfed.data.table import Table

MOST_TOKENS = 100_000  # a larger vocabulary is a mistake
MOST_DISTINCT = 100  # whole numbers that can be classes without anybody saying so


@dataclass(frozen=True)
class Told:
    """The labels of all rows, as `Pool` has them.

    Attributes:
        task: its name.
        y: the labels.
        outputs: how many outputs a network needs.
        names: what the outputs are called.
        notices: what was decided, and what looks wrong, in sentences.
    """

    task: str
    y: np.ndarray
    outputs: int
    names: tuple[str, ...] | None
    notices: tuple[str, ...] = ()


def read_told(tables: Sequence[Table], config: DataConfig) -> Told:
    """Read the labels of all tables as the task needs them.

    Args:
        tables: the rows of all clients.
        config: data.task, data.labels, and the names of the label columns.

    Returns:
        The labels of every row, table after table.
    """
    widths = {table.y.shape[1:] for table in tables}
    if len(widths) > 1:
        raise Problem(f"the files here do not have the same number of labels: {few(sorted(map(str, widths)))}")
    task, notices = (config.task, ()) if config.task != "auto" else _guess(tables, config)
    if task in ("classification", "binary") and widths != {()}:
        raise Problem(f"data.task '{task}' has one label for each sample, not {_shown(tables[0])}")
    if task == "next_token":
        return _tokens(tables, notices)
    if task == "regression":
        return Told(task, *_columns(tables, config, _number), notices)
    if task == "multilabel":
        renames = config.renames()
        y, outputs, names = _columns(tables, config, lambda cell: _zero_or_one(renames.get(cell, cell)))
        return Told(task, y, outputs, names, (*notices, *_rare(tables, y, names)))
    labels = read_labels(tables, config)
    notices = (*notices, *labels.notices)
    if task == "classification":
        return Told(task, labels.y, len(labels.names), labels.names, notices)
    if len(labels.names) != 2:
        raise Problem(f"data.task 'binary' needs two labels, and there are {len(labels.names)}: {few(labels.names)}")
    return Told(task, labels.y.astype(np.float32)[:, None], 1, labels.names[1:], notices)


def _guess(tables: Sequence[Table], config: DataConfig) -> tuple[str, tuple[str, ...]]:
    """Return the task of labels, as this file's first lines say, and a sentence where it is not classification."""
    renames = config.renames()
    cells = {str(cell).strip() for table in tables for cell in table.y.ravel().tolist()}
    labels = {renames.get(spelling(cell), spelling(cell)) for cell in cells}
    numbers = all(map(is_number, labels))
    if tables[0].y.ndim == 2:
        whole = all(array.dtype.kind in "iu" for table in tables for array in (table.x, table.y))
        if whole and all(table.x.shape == table.y.shape for table in tables) and not labels <= {"0", "1"}:
            return "next_token", ("whole numbers beside whole numbers of the same shape: the task is next_token",)
        if all(_zero_or_one(label) is not None for label in labels):
            return "multilabel", (f"{_shown(tables[0])} of 0 and 1: the task is multilabel",)
        if numbers:
            return "regression", (f"{_shown(tables[0])} of numbers: the task is regression",)
        odd = sorted(label for label in labels if _zero_or_one(label) is None and not is_number(label))
        raise Problem(f"{_shown(tables[0])} must hold 0 and 1, or numbers, but there is '{odd[0]}'")
    broken = sorted(label for label in labels if is_number(label) and not label.lstrip("+-").isdecimal())
    if numbers and 2 * len(broken) > len(labels) > 1:
        return "regression", (f"labels such as {broken[0]} are not whole: the task is regression (else use --task)",)
    if numbers and not broken and len(labels) > MOST_DISTINCT:
        many = f"{len(labels):,} different numbers as labels"
        return "regression", (f"{many}: the task is regression (--task classification makes classes of them)",)
    return "classification", ()


def _columns(
    tables: Sequence[Table], config: DataConfig, read: Callable[[str], float | None]
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Return labels [rows, labels], how many there are of a row, and their names.

    Args:
        tables: the rows of all clients.
        config: the names of the label columns.
        read: makes a number of a cell; None: it is none.
    """
    width = tables[0].y.shape[1] if tables[0].y.ndim == 2 else 1
    from_csv = tables[0].lines is not None
    names = tuple(config.label_columns()) if from_csv else tuple(map(str, range(width)))
    names = (config.label_column,) if width == 1 else names
    rows = []
    for table in tables:
        for row, cells in enumerate(table.y.reshape(len(table.y), width).tolist()):
            numbers = [read(str(cell).strip()) for cell in cells]
            if None in numbers:
                place = numbers.index(None)
                kind = "0 or 1" if read is not _number else "a finite number"
                raise Problem(
                    f"{table.row(row)}: label '{names[place]}' is '{cells[place]}', which is not {kind}; fill it in or "
                    "take the row out"
                )
            rows.append(numbers)
    return np.array(rows, dtype=np.float64 if read is _number else np.float32), width, names


def _rare(tables: Sequence[Table], y: np.ndarray, names: Sequence[str]) -> list[str]:
    """Say which labels no sample has, and which a single client has."""
    counts: dict[str, Counter[str]] = {}
    ends = np.cumsum([len(table.y) for table in tables])
    for table, mine in zip(tables, np.split(y, ends[:-1]), strict=True):
        has = dict(zip(names, mine.sum(axis=0).astype(int).tolist(), strict=True))
        counts.setdefault(table.client, Counter()).update({name: count for name, count in has.items() if count})
    nowhere = [f"'{name}'" for name in names if not any(name in mine for mine in counts.values())]
    return [*([f"no sample has the label {few(nowhere)}"] if nowhere else []), *of_single_clients(counts)]


def _number(cell: str) -> float | None:
    number = float(cell) if is_number(cell) else np.nan
    return number if np.isfinite(np.float32(number)) else None


def _zero_or_one(cell: str) -> float | None:
    word = spelling(cell).casefold()
    return 1.0 if word in YES else 0.0 if word in NO else None


def _tokens(tables: Sequence[Table], notices: tuple[str, ...]) -> Told:
    """Return next tokens; there are as many tokens as the largest says."""
    for table in tables:
        if table.x.dtype.kind not in "iu" or table.y.dtype.kind not in "iu" or table.x.shape != table.y.shape:
            raise Problem(
                f"client '{table.client}' ({table.file.name}): data.task 'next_token' needs whole numbers x and y "
                f"[n, length] in an .npz file, not {table.x.dtype} {table.x.shape} and {table.y.dtype} {table.y.shape}"
            )
    y = np.concatenate([table.y for table in tables]).astype(np.int64)
    most = max(int(y.max(initial=0)), *(int(table.x.max(initial=0)) for table in tables))
    if most >= MOST_TOKENS:
        raise Problem(f"token {most} is too large: there may be {MOST_TOKENS:,} of them; {IGNORED} in y is none")
    return Told("next_token", y, most + 1, None, notices)


def _shown(table: Table) -> str:
    return f"{table.y.shape[1]} labels for each sample" if table.y.ndim == 2 else "one label for each sample"
