"""Settings of one method, chosen on validation samples alone: the whole grid, or a search through it.

Every trial is a run folder; what was tried is kept with its score in tune.json and tune.csv. A trial's score is the
mean over clients of the run's headline on validation samples in its best round, mean over seeds. Test samples are not
looked at. Where cohorts are batches, trials that differ in lr alone are one batch. What was chosen for rows of a
paper's table is kept in one file for each column, `tune-TABLE-COLUMN.json`, which the table finds among the results
that come with perfed.
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
from perfed.core.errors import Problem, SettingsProblem
from perfed.studies import measures
from perfed.studies.machine import Machine
from perfed.studies.papers import protocol
from perfed.studies.papers.carry_out import run_cells
from perfed.studies.papers.cells import Cell
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.tuned import tuning_file
from perfed.training import catalog, files
from perfed.training.catalog import Entry
from perfed.training.config import Config
from perfed.training.engine import is_batched, pick_device
from perfed.training.provenance import commit, hardware
from perfed.training.results import Run
from perfed.training.statistics import means

Settings = dict[str, Any]
Score = dict[str, Any]  # validation score, its metric and direction, best round of each seed; a problem where none is


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
    """Read words such as `lr=0.1,0.01` as lists of texts."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not values.strip(", "):
            raise Problem(f"--grid takes setting=value,value,..., not '{text}'")
        grid[key] = [value.strip() for value in values.split(",") if value.strip()]
    return grid


def check_grid(grid: dict[str, Any], entry: Entry) -> dict[str, list[Any]]:
    """Return the grid with values of the right types; refuse others."""
    if not grid:
        raise Problem(f"there is nothing to tune: name values of {entry.name}'s settings, such as --grid lr=0.1,0.01")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise Problem(f"grid.{key} must be a list of values, not {values!r}")
    return {key: [entry.check({key: value})[key] for value in values] for key, values in grid.items()}


def combinations(grid: dict[str, list[Any]]) -> Iterator[Settings]:
    """Yield every combination, the last setting fastest."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def batches(task: Task, machine: Machine) -> list[list[Settings]]:
    """Group the trials that are run together: those that differ in lr alone, where cohorts are batches."""
    groups: dict[Any, list[Settings]] = {}
    every = list(combinations(task.grid))
    together = is_batched(machine.configure(task.configure(every[0], 0)).run)
    for index, settings in enumerate(every):
        rest = tuple((key, value) for key, value in settings.items() if key != "lr")
        groups.setdefault(rest if together else index, []).append(settings)
    return list(groups.values())


def tune(
    task: Task,
    console: Console,
    *,
    seeds: int = 1,
    trials: int | None = None,
    machine: Machine = Machine(),  # noqa: B008 (it is frozen)
    command: str = "",
) -> dict[str, Any]:
    """Try settings and keep everything that was tried; finished trials are not run again.

    Args:
        task: the method, its grid, and where trials go.
        console: where progress goes.
        seeds: seeds of every trial.
        trials: how many settings to try, each in the light of those before it; None: the whole grid.
        machine: where and with what to compute.
        command: what was typed.

    Returns:
        What was tried, the `best` of it, how to `use` that, and the `files` that were written.
    """
    for settings in combinations(task.grid):
        task.configure(settings, 0)  # what is wrong is refused before anything is run
    tried: list[dict[str, Any]] = []
    about = _about(task, seeds, machine) | {"command": command, "tried": tried}

    def score(batch: list[Settings]) -> list[Score]:
        words = "; ".join(", ".join(f"{key} {value}" for key, value in settings.items()) for settings in batch)
        console.print(f"[{len(tried) + len(batch)}] {task.name}: {words}")
        scores = _scores(task, batch, console, seeds, machine)
        tried.extend({"settings": settings, **each} for settings, each in zip(batch, scores, strict=True))
        _write(task.out, about)
        return scores

    if trials is None:
        for batch in batches(task, machine):
            score(batch)
    else:
        _search(task.grid, lambda settings: score([settings])[0], trials)
    known = [trial for trial in tried if trial["validation"] is not None]
    if not known:
        raise Problem(f"no trial of {task.name} came to an end with a score: {tried[0]['problem']}")
    best = max(known, key=lambda trial: trial["sign"] * trial["validation"])  # of several that are equal, the first
    result = {**about, "best": best}
    written = [task.out / f"tune.{kind}" for kind in ("json", "csv")]
    if task.table:
        written.append(_keep(task, task.table, result))
    return {**result, "use": line_to_use(task, best["settings"]), "files": [str(path) for path in written]}


def _about(task: Task, seeds: int, machine: Machine) -> dict[str, Any]:
    """Say what all trials have in common, and where they are run."""
    config = machine.configure(task.configure(next(combinations(task.grid)), 0))
    first = config.run.seed
    about = {"method": task.entry.name, "grid": task.grid, "rounds": config.run.rounds}
    about["seeds"] = [first + seed for seed in range(seeds)]
    device = hardware(pick_device(config.run.device))
    return {**about, "version": __version__, "commit": commit(), "device": device}


def _scores(task: Task, batch: list[Settings], console: Console, seeds: int, machine: Machine) -> list[Score]:
    """Run trials together and return their scores."""
    method, trials = task.entry.name, []
    for settings in batch:
        folder = task.out / files.slug("_".join(f"{key}-{value}" for key, value in settings.items()), set())
        trials.append([Cell("", method, seed, method, folder / f"seed_{seed}") for seed in range(seeds)])
    pairs = zip(batch, trials, strict=True)
    configs = {cell: task.configure(settings, cell.seed) for settings, cells in pairs for cell in cells}
    for cell, config in configs.items():
        cell.check_settings(config)  # a trial that is there already may be of other rounds
    left = [cell for cell in configs if not cell.done and not cell.diverged]
    try:
        if left:
            run_cells(left, [configs[cell] for cell in left], console, machine)
    except SettingsProblem as problem:  # that is an answer, too; any other Problem ends the search
        if len(batch) > 1:  # it may be that of one of them
            return [score for settings in batch for score in _scores(task, [settings], console, seeds, machine)]
        return [{"validation": None, "round": None, "problem": str(problem)}]
    return [_score(cells) for cells in trials]


def _score(cells: list[Cell]) -> Score:
    """Return the score of a trial: mean over its seeds, each in its best round."""
    scores, rounds, runs = [], [], []
    for cell in cells:
        if cell.diverged:
            return {"validation": None, "round": None, "problem": files.read_json(cell.record)["diverged"]}
        runs.append(Run(cell.folder))
    judged = {run.judged for run in runs}
    # Seeds with other splits may choose other headlines: then the task's first score, which every round has of all.
    metric = runs[0].judged if len(judged) == 1 else runs[0].metric
    sign = runs[0].task.sign(metric)
    for run, cell in zip(runs, cells, strict=True):
        curve = measures.curves(run, cell.method, metric=metric)
        mean = means(curve.val)
        if np.isnan(mean).all():
            raise Problem("tuning needs validation samples, and no client has one: set data.val above 0")
        best = int(np.nanargmax(sign * mean))
        scores.append(float(mean[best]))
        rounds.append(int(curve.rounds[best]))
    score = {"validation": float(np.mean(scores)), "round": rounds, "problem": ""}
    return {**score, "metric": metric, "sign": sign}


def _search(grid: dict[str, list[Any]], score: Callable[[Settings], Score], trials: int) -> None:
    """Try so many settings, each chosen in the light of those before it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise Problem("--trials needs optuna: pip install 'perfed[tune]' (the whole grid needs nothing)") from None
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    for _ in range(trials):
        trial = study.ask()
        trial_score = score({key: trial.suggest_categorical(key, values) for key, values in grid.items()})
        if trial_score["validation"] is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, trial_score["sign"] * trial_score["validation"])


def _write(out: Path, about: dict[str, Any]) -> None:
    files.write_json(out / "tune.json", about)
    text = io.StringIO()
    write = csv.writer(text)
    write.writerow([*about["grid"], "validation", "round", "problem"])
    for trial in about["tried"]:
        values = [trial["settings"][key] for key in about["grid"]]
        score = "" if trial["validation"] is None else trial["validation"]
        write.writerow([*values, score, " ".join(map(str, trial["round"] or [])), trial["problem"]])
    files.write(out / "tune.csv", text.getvalue())


def line_to_use(task: Task, settings: Settings) -> str:
    """Return what to type, or to write into a table's file, to use these settings."""
    if task.table:
        values = ", ".join(f"{key} = {_toml(value)}" for key, value in settings.items())
        return f"{task.table.name}.toml, under [rows.{task.name}.at]: {task.column} = {{ {values} }}"
    return f"perfed run {task.name} " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in settings.items())


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def for_run(config: Config, grid: dict[str, Any], out: Path) -> Task:
    """Make the task of choosing settings for an ordinary run: one method, no baseline, no models.

    Args:
        config: the run's configuration.
        grid: values of the settings.
        out: the folder of the trials.
    """
    (entry,) = config.entries()

    def configure(settings: Settings, seed: int) -> Config:
        run = dataclasses.replace(
            config.run, seed=config.run.seed + seed, baseline=False, save_models="none", save_round="last"
        )
        own = entry.check({**config.method.get(entry.name, {}), **settings})
        return dataclasses.replace(config, run=run, method={entry.name: own})

    return Task(entry.name, entry, check_grid(grid, entry), configure, out)


def for_table(table: Protocol, trial: Protocol, column: str, row: str, grid: list[str], out: Path) -> Task:
    """Make the task of choosing settings for a row of a paper's table in a column.

    Args:
        table: the table.
        trial: the table as it is tried, which may have fewer rounds.
        column: the column.
        row: the row.
        grid: values that go before the table's own grid.
        out: the folder of all trials.
    """
    trial = protocol.chosen(trial, [column], [row], None)
    about = trial.rows[row]
    if about.cell:
        raise Problem(f"{table.name}: row '{row}' reads the runs of '{about.cell}': tune that one")
    if trial.columns[column].first:
        raise Problem(f"{table.name}: clients join later in column '{column}', and settings cannot be chosen on them")
    entry = catalog.find(about.method)

    def configure(settings: Settings, seed: int) -> Config:
        config = trial.config(column, row, seed)
        own = {**config.method.get(entry.name, {}), **settings}
        return dataclasses.replace(config, method={entry.name: entry.check(own)})

    values = check_grid(read_grid(grid) or about.grid, entry)
    return Task(row, entry, values, configure, out / f"{table.cells}-{column}" / row, table, column)


def _keep(task: Task, table: Protocol, result: dict[str, Any]) -> Path:
    """Add what was tried for a row to the file of its table's column; rows that are there already stay."""
    path = task.out.parents[1] / tuning_file(table, task.column)
    rows = [row for row in files.read_json(path)["rows"] if row["row"] != task.name] if path.exists() else []
    rows.append({"row": task.name, **result})
    files.write_json(path, {"table": table.cells, "column": task.column, "rows": rows})
    return path
