"""A published table as a TOML file: columns (data, network, rounds), rows (methods with settings), the paper's numbers.

A cell is a column, a row and a seed: one run of one method. Reading and checking a file needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfed import data, models
from perfed.core.errors import Problem, nearest
from perfed.training import catalog
from perfed.training.config import NEUTRAL, SECTIONS, Config, RunConfig, assign, from_dict, read_toml

HERE = Path(__file__).resolve()
PLACES = (HERE.parents[2] / "bench", HERE.parents[4] / "bench")  # an installed package's, a checkout's
KINDS = ("accuracy", "rounds", "gain")  # what a cell of the table says
RULES = ("max", "val", "last10", "last")  # which round counts: see `cell_scores`
METRICS = ("mean", "pooled")  # over clients, or over their samples
_PARTS = (*SECTIONS, "train")
_COLUMN = {"title", "same", "until", "first", "tuned", *_PARTS}
_ROW = {"method", "title", "settings", "run", "times", "grid", "model", "cell", "paper", "std", "plain", "at", "note"}
_ROW |= {"watch"}
_FILE = {"title", "paper", "kind", "rule", "metric", "seeds", "own", "target", "runs", "show", "figures", "notes"}
_QUICK = {"columns", "rows", "seeds", "settings", *_PARTS}


@dataclass(frozen=True)
class Column:
    """Data, network and rounds of one column."""

    name: str
    title: str
    parts: dict[str, dict[str, Any]]  # sections of a configuration
    same: str = ""  # the column whose longer runs have this column's rounds in them
    until: int = 0  # last round that counts; 0: all
    first: float = 0.0  # share of the clients that train; the others join later, and are what is scored; 0: all train
    tuned: int = 0  # epochs in which those who join tune what the server has


@dataclass(frozen=True)
class Row:
    """One method with its settings."""

    name: str
    title: str
    method: str
    settings: dict[str, Any]
    run: dict[str, Any]
    by_column: dict[str, dict[str, Any]]  # the file's table `at`: settings that differ by column
    grid: dict[str, list[Any]]
    times: int = 1  # rounds of this row for each of the column's, where rounds are not the same work
    model: str = "personal"  # which of the method's models is scored
    cell: str = ""  # the row whose runs are read, where it is not this one
    plain: bool = False  # not in the paper: shows what is the method's own doing
    watch: bool = False  # also keep every client's mixture of every round (pFedMB)
    note: str = ""
    paper: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # column -> number, deviation

    @property
    def runs(self) -> str:
        """The row whose cells this row reads."""
        return self.cell or self.name


@dataclass(frozen=True)
class Protocol:
    """A whole table."""

    name: str
    title: str
    paper: str
    columns: dict[str, Column]
    rows: dict[str, Row]
    kind: str = "accuracy"
    rule: str = "max"  # the paper's way to pick a round
    metric: str = "mean"
    seeds: int = 3
    own: str = ""  # the row that is the paper's own method
    target: float = 0.0
    source: str = ""  # the table whose runs are read
    figures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # how this differs from the paper's protocol: then all outputs say REDUCED
    quick: dict[str, Any] = field(default_factory=dict)  # the file's own reduced version
    overrides: dict[str, Any] = field(default_factory=dict)  # settings of runs and rows that go before all others

    @property
    def cells(self) -> str:
        """The folder of the runs; changed ones never stand among the others."""
        return (self.source or self.name) + ("-reduced" if self.changed else "")

    @property
    def label(self) -> str:
        """What every output of a changed protocol begins with."""
        return f"REDUCED ({'; '.join(self.changed)})" if self.changed else ""

    def number(self, row: str, column: str) -> tuple[float | None, float | None]:
        """Return the paper's number and deviation, where it has them."""
        return self.rows[row].paper.get(column, (None, None))

    def config(self, column: str, row: str, seed: int) -> Config:
        """Return the configuration of a cell; wrong settings are refused."""
        runs = self.rows[self.rows[row].runs]
        raw: dict[str, Any] = {part: dict(self.columns[column].parts.get(part, {})) for part in _PARTS}
        over = self.overrides.get("settings", {}).get(runs.name, {})
        raw["methods"] = [runs.method]
        fixed = {"save_models": "none", "save_round": "last"}  # a table reads logs, not models
        raw["run"] |= {**fixed, **runs.run, **self.overrides.get("run", {}), "seed": seed, "baseline": False}
        if runs.times > 1:  # more rounds, but as many evaluations
            default = RunConfig()
            for key in ("rounds", "eval_every", "patience"):
                raw["run"][key] = runs.times * raw["run"].get(key, getattr(default, key))
        raw["method"] = {runs.method: {**runs.settings, **runs.by_column.get(column, {}), **over}}
        config = from_dict(raw)
        data.check(dataclasses.replace(config.data, dir=None))
        models.check_name(config.model.name)
        return config


def names() -> list[str]:
    """Return the names of the tables."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def folder() -> Path:
    """Return the folder of the TOML files."""
    return next((path for path in PLACES if path.is_dir()), PLACES[0])


def find(name: str) -> Protocol:
    """Return a table by its name, or by the path of a TOML file."""
    path = Path(name) if name.endswith(".toml") else folder() / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise Problem(f"there is no table '{name}'{nearest(name, names())}")
    raw = read_toml(path)
    if "runs" in raw:
        return _derived(path, raw)
    return _read(path, raw)


def without_folder(model: str) -> str:
    """Return a network's name; without its folder where that is the tables' own."""
    return Path(model).name if models.is_path(model) and Path(model).parent == folder() else model


def _refuse_unknown(table: dict[str, Any], allowed: set[str], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise Problem(f"{where} has no setting '{key}'{nearest(key, allowed)}")


def _read(path: Path, raw: dict[str, Any]) -> Protocol:
    _refuse_unknown(raw, {*_FILE, "all", "columns", "rows", "quick"}, path.name)
    _refuse_unknown(raw.get("all", {}), {*_PARTS, "row"}, f"{path.name}: all")
    columns: dict[str, Column] = {}
    for name, table in raw["columns"].items():
        _refuse_unknown(table, _COLUMN, f"{path.name}: column '{name}'")
        over = columns[table["same"]].parts if "same" in table else raw.get("all", {})
        parts = {part: over.get(part, {}) | table.get(part, {}) for part in _PARTS}
        if models.is_path(parts["model"].get("name", "")):  # it lies beside the file that names it
            parts["model"]["name"] = str(path.parent / parts["model"]["name"])
        kept = {key: table[key] for key in ("title", "same", "until", "first", "tuned") if key in table}
        columns[name] = Column(name, parts=parts, **kept)
    shared = raw.get("all", {}).get("row", {})
    rows = {name: _row(path, name, {**shared, **table}, list(columns)) for name, table in raw["rows"].items()}
    for row in rows.values():
        if row.cell and row.cell not in rows:
            raise Problem(f"{path.name}: row '{row.name}' reads the runs of '{row.cell}', which is not there")
        _refuse_unknown(row.by_column, set(columns), f"{path.name}: row '{row.name}'")
    quick = raw.get("quick", {})
    _refuse_unknown(quick, _QUICK, f"{path.name}: quick")
    return _protocol(path, raw, columns=columns, rows=rows, quick=quick)


def _row(path: Path, name: str, table: dict[str, Any], columns: list[str]) -> Row:
    _refuse_unknown(table, _ROW, f"{path.name}: row '{name}'")
    numbers: list[float] = table.get("paper", [])
    deviations: list[float | None] = table.get("std", [])
    if any(len(values) not in (0, len(columns)) for values in (numbers, deviations)):
        raise Problem(f"{path.name}: row '{name}' needs one number for each of {len(columns)} columns (nan: none)")
    both = zip(columns, numbers, deviations or [None for _ in numbers], strict=False)  # a row may have no numbers
    paper: dict[str, tuple[float, float | None]]
    paper = {column: (float(number), std) for column, number, std in both if not math.isnan(number)}
    times = table.get("times", 1)
    if type(times) is not int or times < 1:
        raise Problem(f"{path.name}: row '{name}': times must be a whole number of at least 1, not {times!r}")
    method = table.get("method", name)
    if table.get("watch") and not catalog.find(method).mixture:
        raise Problem(f"{path.name}: row '{name}': watch is for pfedmb, whose clients mix branches, not for {method}")
    kept = {key: table[key] for key in ("times", "model", "cell", "plain", "note", "watch") if key in table}
    tables = (table.get(key, {}) for key in ("settings", "run", "at", "grid"))
    return Row(name, table.get("title", name), method, *tables, **kept, paper=paper)


def _derived(path: Path, raw: dict[str, Any]) -> Protocol:
    """Read a table that is read off another table's runs."""
    _refuse_unknown(raw, {*_FILE, "rows"}, path.name)
    base = find(str(path.parent / f"{raw['runs']}.toml"))
    show = raw.get("show", list(base.columns))
    _refuse_unknown(dict.fromkeys(show), set(base.columns), f"{path.name}: show")
    columns, rows = {name: base.columns[name] for name in show}, {}
    for name, table in raw["rows"].items():
        if name not in base.rows:
            raise Problem(f"{path.name}: {base.name} has no row '{name}'{nearest(name, base.rows)}")
        rows[name] = dataclasses.replace(base.rows[name], paper=_row(path, name, table, show).paper)
    own = raw.get("own", base.own)
    same = {"seeds": base.seeds, "metric": base.metric, "source": base.name, "quick": base.quick}
    return _protocol(path, raw, columns=columns, rows=rows, own=own, **same)


def _protocol(path: Path, raw: dict[str, Any], **fixed: Any) -> Protocol:
    keys = ("title", "paper", "kind", "rule", "metric", "seeds", "own", "target")
    given: dict[str, Any] = {key: raw[key] for key in keys if key in raw}
    given |= {key: tuple(raw.get(key, ())) for key in ("figures", "notes")}
    table = Protocol(path.stem, **given | fixed)
    for word, allowed in ((table.kind, KINDS), (table.rule, RULES), (table.metric, METRICS)):
        if word not in allowed:
            raise Problem(f"{path.name}: '{word}' must be one of {', '.join(allowed)}")
    if table.own and table.own not in table.rows:
        raise Problem(f"{path.name}: own '{table.own}' is not one of its rows{nearest(table.own, table.rows)}")
    return table


def chosen(protocol: Protocol, columns: list[str], rows: list[str], seeds: int | None) -> Protocol:
    """Return some columns, rows or seeds of a table; empty and None: all."""
    for wanted, known, kind in ((columns, protocol.columns, "column"), (rows, protocol.rows, "row")):
        for name in wanted:
            if name not in known:
                raise Problem(f"{protocol.name} has no {kind} '{name}'{nearest(name, known)}")
    read = {protocol.rows[name].cell for name in rows}  # the rows that others read the runs of
    kept_columns = {name: column for name, column in protocol.columns.items() if not columns or name in columns}
    kept_rows = {name: row for name, row in protocol.rows.items() if not rows or name in rows or name in read}
    own = protocol.own if protocol.own in kept_rows else ""
    return dataclasses.replace(protocol, columns=kept_columns, rows=kept_rows, seeds=seeds or protocol.seeds, own=own)


def reduced(protocol: Protocol, sets: list[str], quick: bool) -> Protocol:
    """Change a table's settings in every column; it is called reduced where one differs that results depend on.

    What was chosen for a row does not count where `sets` say otherwise, nor, under `quick`, what was chosen from its
    grid for larger data; what is the row's own, such as the epochs that make two rows equal work, stays.

    Args:
        protocol: the table.
        sets: other settings, `section.key=value`.
        quick: take the columns, rows and settings that its file names under `quick`.
    """
    version = protocol.quick if quick else {}
    if quick:
        protocol = _quick_rows(protocol)
    change = {part: dict(version[part]) for part in _PARTS if part in version}
    typed: dict[str, Any] = {}
    for text in sets:
        assign(change, text)
        assign(typed, text)
    gone, tables = typed.get("train", {}), version.get("settings", {})
    settings = {row: _without(tables[row], gone) for row in tables if row in protocol.rows}
    _refuse_unknown(change, set(_PARTS), "--set of a table")
    is_neutral = lambda part, key: part == "run" and key in NEUTRAL
    flat = lambda tables: [(name, key, value) for name, table in tables.items() for key, value in table.items()]
    changed = [f"{part}.{key} = {value}" for part, key, value in flat(change) if not is_neutral(part, key)]
    changed += [f"{row}.{key} = {value}" for row, key, value in flat(settings)]
    columns = {}
    for name, column in protocol.columns.items():
        parts = {part: column.parts.get(part, {}) | change.get(part, {}) for part in _PARTS}
        about = f"{parts['data'].get('name', 'digits')}, {parts['data'].get('clients', 20)} clients"
        title = f"REDUCED to {about}: {column.title}" if changed else column.title
        columns[name] = dataclasses.replace(column, parts=parts, title=title)
    rows = {}
    for name, row in protocol.rows.items():
        gone = {*(key for key in change.get("train", {}) if key not in row.settings), *(row.grid if quick else ())}
        by_column = {column: _without(best, gone) for column, best in row.by_column.items()}
        rows[name] = dataclasses.replace(row, by_column=by_column)
    overrides = {"run": change.get("run", {}), "settings": settings}
    return dataclasses.replace(protocol, columns=columns, rows=rows, changed=tuple(changed), overrides=overrides)


def _quick_rows(protocol: Protocol) -> Protocol:
    """Return the columns, rows and seeds of a table's own reduced version."""
    version = protocol.quick
    if not version:
        raise Problem(f"{protocol.name} has no reduced version")
    columns = [name for name in version.get("columns", protocol.columns) if name in protocol.columns]
    rows = [name for name in version.get("rows", protocol.rows) if name in protocol.rows]
    if not columns:
        raise Problem(f"the reduced version of {protocol.source} has none of the columns of {protocol.name}")
    return chosen(protocol, columns, rows, version.get("seeds"))


def _without(settings: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}
