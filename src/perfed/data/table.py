"""Rows of the user's own files; CSV files are read and checked here."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.pool import UNDECIDED
from perfed.data.records import Records, read_cells

_UNNAMED = re.compile(r"Unnamed: \d+")  # what pandas calls it when it is read and written once more


@dataclass(frozen=True)
class Table:
    """Samples of one client from one file.

    Attributes:
        client: its name.
        file: where they are from.
        x: [rows, ...], the samples; of a CSV file [rows, columns], its cells as text.
        y: [rows], the labels; [rows, labels] where a sample has several.
        part: TRAIN, VAL or TEST where the file says so.
        key: the name of the array.
        lines: [rows], in CSV files the line of each row.
        columns: what the columns are called, in CSV files and where an .npz file says so.
    """

    client: str
    file: Path
    x: np.ndarray
    y: np.ndarray
    part: int = UNDECIDED
    key: str = "x"
    lines: np.ndarray | None = None
    columns: tuple[str, ...] | None = None

    def row(self, index: int) -> str:
        """Say where a row stands, for people."""
        place = f"row {index} of {self.key}" if self.lines is None else f"line {self.lines[index]}"
        return f"client '{self.client}', {place} in {self.file.name}"


def read_csv(path: Path, config: DataConfig, several: bool) -> tuple[list[Table], list[str]]:
    """Read the clients of a CSV file.

    Args:
        path: the file.
        config: names the columns of clients and labels.
        several: each of several files is one client; a file alone has a column that names the client.

    Returns:
        Every client's rows, and the columns that are left out.
    """
    header, lines, cells = read_text(path)
    index = [place for place, name in enumerate(header) if is_index(name, [row[place] for row in cells])]
    left_out = [header[place] for place in index]
    header = [name for place, name in enumerate(header) if place not in index]
    cells = [[cell for place, cell in enumerate(row) if place not in index] for row in cells]
    answers = config.label_columns(header)
    wanted = answers if several else [config.client_column, *answers]
    for column in wanted:
        if column not in header:
            raise Problem(f"{path.name} has no column '{column}' (it has: {', '.join(header)})")
    if several and config.client_column in header:
        raise Problem(
            f"{path.name} has the column '{config.client_column}' though each of the files here is one client: "
            "put all clients into one file, or take the column out"
        )
    features = [column for column in header if column not in wanted]
    if not features:
        raise Problem(f"{path.name} has no feature column beside {', '.join(wanted)}")
    texts = lambda column: np.array([row[header.index(column)].strip() for row in cells], dtype=str)
    labels = np.stack([texts(column) for column in answers], axis=1)
    clients = np.full(len(cells), path.stem) if several else texts(config.client_column)
    for column, values in (*zip(answers, labels.T, strict=True), (config.client_column, clients)):
        if (values == "").any():
            raise Problem(f"{path.name}, line {lines[np.argmax(values == '')]}: the column '{column}' is empty")
    labels = labels[:, 0] if len(answers) == 1 else labels
    places = [header.index(column) for column in features]
    x = np.array([[row[place] for place in places] for row in cells], dtype=object)
    if not len(cells):
        return [Table(path.stem, path, x, labels, lines=lines)] if several else [], left_out
    order = np.argsort(clients, kind="stable")
    names, start = np.unique(clients[order], return_index=True)
    pieces = np.split(order, start[1:])
    rows_of = zip(names, pieces, strict=True)
    named = tuple(features)
    make = lambda name, rows: Table(str(name), path, x[rows], labels[rows], lines=lines[rows], columns=named)
    return [make(name, rows) for name, rows in rows_of], left_out


def is_one_client(config: DataConfig) -> bool:
    """Return True if the user's own data are one file, and no column of it names clients."""
    if config.name != "folder" or config.dir is None:
        return False
    path = Path(config.dir).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.csv")) if path.is_dir() else []
    if len(files) != 1 or files[0].suffix.lower() != ".csv":
        return len(files) == 1
    try:
        with files[0].open(newline="", encoding="utf-8-sig") as file:
            return config.client_column not in [cell.strip() for cell in next(csv.reader(file), [])]
    except (OSError, UnicodeDecodeError, csv.Error):
        return False  # reading it says what is wrong


def is_index(name: str, cells: Sequence[str]) -> bool:
    """Return True if a column is the index that pandas writes beside the data: without a name, it counts the rows.

    Args:
        name: the column's, as the header has it.
        cells: the column's, from top to bottom.
    """
    if name and not _UNNAMED.fullmatch(name):
        return False
    numbers = [int(cell) if cell.strip().isdecimal() else -1 for cell in cells]
    return min(numbers, default=0) >= 0 and all(later > former for former, later in pairwise(numbers))


def read_text(path: Path) -> tuple[list[str], np.ndarray, list[list[str]]]:
    """Read header, line numbers and rows of a CSV file; empty lines are skipped."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            numbered = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{path} cannot be read as CSV text: {error}") from None
    if not numbered:
        raise Problem(f"{path.name} is empty: it needs a header line with column names")
    header = [name.strip() for name in numbered[0][1]]
    if len(set(header)) < len(header):
        raise Problem(f"{path.name} has two columns named '{max(header, key=header.count)}'")
    for line, row in numbered[1:]:
        if len(row) != len(header):
            raise Problem(f"{path.name}, line {line}: {len(row)} values for {len(header)} columns")
    return header, np.array([line for line, _ in numbered[1:]], dtype=np.int64), [row for _, row in numbered[1:]]


def in_one(tables: list[Table]) -> Records:
    """Bring the rows of several clients together, by the names of their columns where they have names.

    Args:
        tables: the rows of every client. Where a file has fewer columns than another, their values are missing.

    Returns:
        The rows in the order of the tables; two files that each have a column of their own are a Problem.
    """
    columns = _columns(tables)
    aligned = [table.x if columns is None else _aligned(table, columns) for table in tables]
    if tables[0].x.dtype != object:
        values = np.concatenate([x.astype(np.float64) for x in aligned])
        return Records(values, (None,) * values.shape[1], columns)
    ends = np.cumsum([len(x) for x in aligned])

    def place(row: int) -> str:
        number = int(np.searchsorted(ends, row, side="right"))
        return tables[number].row(row - int(ends[number]) + len(aligned[number]))

    return read_cells(columns or (), [row for x in aligned for row in x.tolist()], place)


def _columns(tables: list[Table]) -> tuple[str, ...] | None:
    """Return the columns of all tables: those of the first, then what others have beside them."""
    first, widest = tables[0], max(tables, key=lambda table: len(table.columns or ()))
    if widest.columns is None:
        return None
    for table in tables:
        if table.columns is None:
            raise Problem(f"{table.file.name} does not name its columns, and {widest.file.name} does (array 'columns')")
        if set(table.columns) - set(widest.columns):
            differ = ", ".join(sorted(set(table.columns) ^ set(widest.columns)))
            other = first if widest.file == table.file else widest
            raise Problem(f"{table.file.name} does not have the same columns as {other.file.name}: {differ}")
    mine = first.columns or ()
    return (*mine, *(name for name in widest.columns if name not in mine))


def _aligned(table: Table, columns: tuple[str, ...]) -> np.ndarray:
    """Return a table's samples with all columns in this order; what it lacks is missing."""
    text = table.x.dtype == object
    x = np.full((len(table.x), len(columns)), "" if text else np.nan, dtype=object if text else np.float64)
    names = table.columns or ()
    for place, name in enumerate(columns):
        if name in names:
            x[:, place] = table.x[:, names.index(name)]
    return x
