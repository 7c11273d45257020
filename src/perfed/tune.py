"""Settings of one method, chosen on validation samples alone: the whole grid, or a search through it.

Every trial is a run folder; what was tried is kept with its score in tune.json and tune.csv. A trial's score is the
mean validation accuracy over clients in its best round, mean over seeds. Test samples are not looked at.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from perfed import catalog, files, metrics
from perfed.catalog import Entry
from perfed.config import Config
from perfed.core.errors import Problem
from perfed.results import Run
from perfed.tables import protocol
from perfed.tables.cells import Cell, run

Settings = dict[str, Any]


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


def tune(
    entry: Entry,
    grid: dict[str, list[Any]],
    configure: Callable[[Settings, int], Config],
    out: Path,
    console: Console,
    *,
    seeds: int = 1,
    trials: int | None = None,
    how: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Try settings, keep everything that was tried, return it with the best; finished trials are not run again."""
    for settings in whole(grid):
        configure(settings, 0)  # what is wrong is found before anything is run
    tried: list[dict[str, Any]] = []

    def score(settings: Settings) -> float | None:
        name = "_".join(f"{key}-{value}" for key, value in settings.items())
        said = ", ".join(f"{key} {value}" for key, value in settings.items())
        console.print(f"[{len(tried) + 1}] {entry.name}: {said}", markup=False, highlight=False)
        found = _scores(entry, settings, configure, out / files.slug(name, set()), console, seeds, how or {})
        tried.append({"settings": settings, **found})
        _write(out, entry, grid, tried)
        return found["validation"]

    if trials is None:
        for settings in whole(grid):
            score(settings)
    else:
        _search(grid, score, trials)
    known = [one for one in tried if one["validation"] is not None]
    if not known:
        raise Problem(f"no trial of {entry.name} came to an end with a score: {tried[0]['problem']}")
    best = max(known, key=lambda one: one["validation"])  # the first, where several are equal
    return {
        "method": entry.name,
        "tried": tried,
        "best": best,
        "files": [str(out / f"tune.{k}") for k in ("json", "csv")],
    }


def _scores(
    entry: Entry, settings: Settings, configure: Any, place: Path, console: Console, seeds: int, how: dict[str, Any]
) -> dict[str, Any]:
    each, rounds = [], []
    cells = [Cell("", entry.name, seed, entry.name, place / f"seed_{seed}") for seed in range(seeds)]
    left = [one for one in cells if not one.done]
    try:
        if left:
            run(left, [configure(settings, one.seed) for one in left], how, console)
    except Problem as problem:  # diverged, most likely: that is an answer too
        return {"validation": None, "round": None, "problem": str(problem)}
    for one in cells:
        curve = metrics.curves(Run(one.folder), entry.name)
        mean = metrics.means(curve.val)
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


def _write(out: Path, entry: Entry, grid: dict[str, list[Any]], tried: list[dict[str, Any]]) -> None:
    files.write_json(out / "tune.json", {"method": entry.name, "grid": grid, "tried": tried})
    text = io.StringIO()
    write = csv.writer(text)
    write.writerow([*grid, "validation", "round", "problem"])
    for one in tried:
        values = [one["settings"][key] for key in grid]
        score = "" if one["validation"] is None else one["validation"]
        write.writerow([*values, score, " ".join(map(str, one["round"] or [])), one["problem"]])
    files.write(out / "tune.csv", text.getvalue())


def line_to_use(method: str, settings: Settings, table: str = "", row: str = "", column: str = "") -> str:
    """What to type, or to write into a table's file, to use these settings."""
    if table:
        values = ", ".join(f"{key} = {_toml(value)}" for key, value in settings.items())
        return f"{table}.toml, under [rows.{row}.at]: {column} = {{ {values} }}"
    return f"perfed run {method} " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in settings.items())


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def for_run(made: Config, entry: Entry) -> Callable[[Settings, int], Config]:
    """Configurations of trials of an ordinary run: one method, no baseline, no models."""

    def configure(settings: Settings, seed: int) -> Config:
        run = dataclasses.replace(made.run, seed=made.run.seed + seed, baseline=False, save_models="none")
        own = entry.check({**made.method.get(entry.name, {}), **settings})
        return dataclasses.replace(made, run=run, method={entry.name: own})

    return configure


def for_table(
    name: str, column: str, row: str, sets: list[str], quick: bool, grid: list[str]
) -> tuple[Entry, dict[str, list[Any]], Callable[[Settings, int], Config]]:
    """(method, grid, configurations) of one row of a paper's table in one column; `grid` goes before the table's."""
    made = protocol.chosen(protocol.reduced(protocol.find(name), sets, quick), [column], [row], None)
    one = made.rows[row]
    entry = catalog.find(one.method)

    def configure(settings: Settings, seed: int) -> Config:
        config = made.config(column, row, seed)
        own = {**config.method.get(entry.name, {}), **settings}
        return dataclasses.replace(config, method={entry.name: entry.check(own)})

    return entry, check_grid(read_grid(grid) or one.grid, entry), configure
