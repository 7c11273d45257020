"""Settings of one method, chosen on validation samples alone: the whole grid, or a search through it.

Every trial is a run folder; what was tried is kept with its score in tune.json and tune.csv. A trial's score is the
mean validation accuracy over clients in its best round, mean over seeds. Test samples are not looked at. Where cohorts
are batches, trials that differ in lr alone are one batch. What was chosen for rows of a paper's table is kept in one
file for each column, `tune-TABLE-COLUMN.json`, which the table finds among the results that come with perfed.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from perfed import __version__
from perfed.core.errors import Problem
from perfed.studies import measures
from perfed.studies.papers import protocol
from perfed.studies.papers.cells import Cell, attempt, batched, check_settings
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.tuned import file_name
from perfed.training import catalog, files
from perfed.training.catalog import Entry
from perfed.training.config import Config
from perfed.training.provenance import commit, hardware
from perfed.training.results import Run

Settings = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A method whose settings are to be chosen."""

    name: str  # the method's, or that of a table's row
    entry: Entry
    grid: dict[str, list[Any]]
    configure: Callable[[Settings, int], Config]  # a trial's configuration, under a seed
    out: Path  # folder of the trials
    table: Protocol | None = None  # whose row it is, in this column
    column: str = ""


def read_grid(texts: list[str]) -> dict[str, list[Any]]:
    """`lr=0.1,0.01` as lists of texts."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not values.strip(", "):
            raise Problem(f"--grid takes setting=value,value,..., not '{text}'")
        grid[key] = [value.strip() for value in values.split(",") if value.strip()]
    return grid


def check_grid(grid: dict[str, Any], entry: Entry) -> dict[str, list[Any]]:
    """The grid with values of the right types; wrong ones raise a Problem."""
    if not grid:
        raise Problem(f"there is nothing to tune: name values of {entry.name}'s settings, such as --grid lr=0.1,0.01")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise Problem(f"grid.{key} must be a list of values, not {values!r}")
    return {key: [entry.check({key: value})[key] for value in values] for key, values in grid.items()}


def whole(grid: dict[str, list[Any]]) -> Iterator[Settings]:
    """Every combination, the last setting fastest."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def batches(task: Task, how: dict[str, Any]) -> list[list[Settings]]:
    """Trials that are run together: those that differ in lr alone, where cohorts are batches."""
    groups: dict[Any, list[Settings]] = {}
    each = list(whole(task.grid))
    together = batched(task.configure(each[0], 0), how)
    for at, settings in enumerate(each):
        rest = tuple((key, value) for key, value in settings.items() if key != "lr")
        groups.setdefault(rest if together else at, []).append(settings)
    return list(groups.values())


def tune(
    task: Task,
    console: Console,
    *,
    seeds: int = 1,
    trials: int | None = None,
    how: dict[str, Any] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Try settings, keep everything that was tried, return it with the best; finished trials are not run again."""
    for settings in whole(task.grid):
        task.configure(settings, 0)  # what is wrong is found before anything is run
    tried: list[dict[str, Any]] = []
    about = _about(task, seeds, how or {}) | {"command": command, "tried": tried}

    def score(some: list[Settings]) -> list[dict[str, Any]]:
        said = "; ".join(_words(settings) for settings in some)
        console.print(f"[{len(tried) + len(some)}] {task.name}: {said}", markup=False, highlight=False)
        found = _scores(task, some, console, seeds, how or {})
        tried.extend({"settings": settings, **one} for settings, one in zip(some, found, strict=True))
        _write(task.out, about)
        return found

    if trials is None:
        for some in batches(task, how or {}):
            score(some)
    else:
        _search(task.grid, lambda settings: score([settings])[0]["validation"], trials)
    known = [one for one in tried if one["validation"] is not None]
    if not known:
        raise Problem(f"no trial of {task.name} came to an end with a score: {tried[0]['problem']}")
    best = max(known, key=lambda one: one["validation"])  # the first, where several are equal
    found = {**about, "best": best}
    written = [task.out / f"tune.{kind}" for kind in ("json", "csv")]
    if task.table:
        written.append(_keep(task, task.table, found))
    return {**found, "use": line_to_use(task, best["settings"]), "files": [str(path) for path in written]}


def _words(settings: Settings) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _about(task: Task, seeds: int, how: dict[str, Any]) -> dict[str, Any]:
    """What all trials have in common, and where they were run."""
    from perfed.training.engine import pick_device

    config = task.configure(next(whole(task.grid)), 0)
    first = config.run.seed
    about = {"method": task.entry.name, "grid": task.grid, "rounds": config.run.rounds}
    about["seeds"] = [first + at for at in range(seeds)]
    device = hardware(pick_device(how.get("device", config.run.device)))
    return {**about, "version": __version__, "commit": commit(), "device": device}


def _scores(
    task: Task, some: list[Settings], console: Console, seeds: int, how: dict[str, Any]
) -> list[dict[str, Any]]:
    """The scores of trials that are run together."""
    entry, trials = task.entry.name, []
    for settings in some:
        place = task.out / files.slug("_".join(f"{key}-{value}" for key, value in settings.items()), set())
        trials.append([Cell("", entry, seed, entry, place / f"seed_{seed}") for seed in range(seeds)])
    every = [
        (one, task.configure(settings, one.seed)) for settings, cells in zip(some, trials, strict=True) for one in cells
    ]
    for one, config in every:
        check_settings(one, config)  # a trial that is there already may be of other rounds
    left = [pair for pair in every if not pair[0].done and not pair[0].diverged]
    try:
        if left:
            attempt([one for one, _ in left], [config for _, config in left], how, console)
    except Problem as problem:  # settings that do not go together: that is an answer, too
        return [{"validation": None, "round": None, "problem": str(problem)} for _ in some]
    return [_score(cells) for cells in trials]


def _score(cells: list[Cell]) -> dict[str, Any]:
    """The score of one trial: mean over its seeds, each in its best round."""
    each, rounds = [], []
    for one in cells:
        if one.diverged:
            return {"validation": None, "round": None, "problem": files.read_json(one.record)["diverged"]}
        curve = measures.curves(Run(one.folder), one.method)
        mean = measures.means(curve.val)
        if np.isnan(mean).all():
            raise Problem("tuning needs validation samples, and no client has one: set data.val above 0")
        at = int(np.nanargmax(mean))
        each.append(float(mean[at]))
        rounds.append(int(curve.rounds[at]))
    return {"validation": float(np.mean(each)), "round": rounds, "problem": ""}


def _search(grid: dict[str, list[Any]], score: Callable[[Settings], float | None], trials: int) -> None:
    """So many trials, each chosen in the light of those before it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise Problem("--trials needs optuna: pip install 'perfed[tune]' (the whole grid needs nothing)") from None
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    for _ in range(trials):
        trial = study.ask()
        found = score({key: trial.suggest_categorical(key, values) for key, values in grid.items()})
        if found is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, found)


def _write(out: Path, about: dict[str, Any]) -> None:
    files.write_json(out / "tune.json", about)
    text = io.StringIO()
    write = csv.writer(text)
    write.writerow([*about["grid"], "validation", "round", "problem"])
    for one in about["tried"]:
        values = [one["settings"][key] for key in about["grid"]]
        score = "" if one["validation"] is None else one["validation"]
        write.writerow([*values, score, " ".join(map(str, one["round"] or [])), one["problem"]])
    files.write(out / "tune.csv", text.getvalue())


def line_to_use(task: Task, settings: Settings) -> str:
    """What to type, or to write into a table's file, to use these settings."""
    if task.table:
        values = ", ".join(f"{key} = {_toml(value)}" for key, value in settings.items())
        return f"{task.table.name}.toml, under [rows.{task.name}.at]: {task.column} = {{ {values} }}"
    return f"perfed run {task.name} " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in settings.items())


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def for_run(made: Config, grid: dict[str, Any], out: Path) -> Task:
    """Trials of an ordinary run: one method, no baseline, no models."""
    (entry,) = made.entries()

    def configure(settings: Settings, seed: int) -> Config:
        run = dataclasses.replace(
            made.run, seed=made.run.seed + seed, baseline=False, save_models="none", save_round="last"
        )
        own = entry.check({**made.method.get(entry.name, {}), **settings})
        return dataclasses.replace(made, run=run, method={entry.name: own})

    return Task(entry.name, entry, check_grid(grid, entry), configure, out)


def for_table(table: Protocol, trial: Protocol, column: str, row: str, grid: list[str], out: Path) -> Task:
    """Trials of one row of a paper's table in one column; `grid` goes before the table's.

    `trial` is the table as it is tried, which may have fewer rounds.
    """
    trial = protocol.chosen(trial, [column], [row], None)
    one = trial.rows[row]
    if one.cell:
        raise Problem(f"{table.name}: row '{row}' reads the runs of '{one.cell}': tune that one")
    if trial.columns[column].first:
        raise Problem(f"{table.name}: clients join later in column '{column}', and settings cannot be chosen on them")
    entry = catalog.find(one.method)

    def configure(settings: Settings, seed: int) -> Config:
        config = trial.config(column, row, seed)
        own = {**config.method.get(entry.name, {}), **settings}
        return dataclasses.replace(config, method={entry.name: entry.check(own)})

    values = check_grid(read_grid(grid) or one.grid, entry)
    return Task(row, entry, values, configure, out / f"{table.cells}-{column}" / row, table, column)


def _keep(task: Task, table: Protocol, found: dict[str, Any]) -> Path:
    """Add what was found for a row to the file of its table's column; rows that are there already stay."""
    path = task.out.parents[1] / file_name(table, task.column)
    rows = [one for one in files.read_json(path)["rows"] if one["row"] != task.name] if path.exists() else []
    rows.append({"row": task.name, **found})
    files.write_json(path, {"table": table.cells, "column": task.column, "rows": rows})
    return path
