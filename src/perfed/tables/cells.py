"""Runs the cells of a table: a column, a row and a seed are one run of one method, in a folder of its own."""

from __future__ import annotations

import dataclasses
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed import __version__, files
from perfed.config import Config, to_toml
from perfed.core.errors import Problem
from perfed.tables.protocol import Protocol

NEWCOMERS = "newcomers.json"  # scores of clients that joined later, epoch by epoch


@dataclass(frozen=True)
class Cell:
    """One run."""

    column: str
    row: str
    seed: int
    method: str
    folder: Path  # a run folder, once it has begun
    first: float = 0.0  # share of the clients that train; the others join later
    tuned: int = 0

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return (self.folder / (NEWCOMERS if self.first else f"{self.method}/result.json")).exists()

    @property
    def diverged(self) -> bool:
        """Whether the run came to numbers that are not finite; it would again."""
        return self.record.exists() and "diverged" in files.read_json(self.record)

    @property
    def record(self) -> Path:
        """What was asked for, beside the folder."""
        return self.folder.with_suffix(".json")


def cell(protocol: Protocol, out: Path, column: str, row: str, seed: int) -> Cell:
    """The run that this cell is read from: a longer one of the same settings where there is one."""
    runs, longer = protocol.rows[row].runs, protocol.columns[column].same
    one, place = protocol.columns[column], lambda name: out / protocol.cells / name / runs / f"seed_{seed}"
    make = lambda name: Cell(name, runs, seed, protocol.rows[runs].method, place(name), one.first, one.tuned)
    return make(longer) if longer and make(longer).done else make(column)


def missing(protocol: Protocol, out: Path) -> Iterator[Cell]:
    """Cells without a result, each once."""
    seen = set()
    for column in protocol.columns:
        for seed in range(protocol.seeds):  # all methods of a seed before the next: what is there can be compared
            for row in protocol.rows:
                one = cell(protocol, out, column, row, seed)
                if not one.done and not one.diverged and one.folder not in seen:
                    seen.add(one.folder)
                    yield one


def carry_out(protocol: Protocol, out: Path, console: Console, how: dict[str, Any]) -> None:
    """Run every missing cell; what was interrupted goes on from its checkpoint.

    `how` is where and with what to compute (engine, device, data folder), which results do not depend on. Where
    cohorts are batches, the seeds of a row are one batch; elsewhere one cell follows another. This is the one place
    where cells are run.
    """
    left = list(missing(protocol, out))
    at = 0
    for some in _batches(left, protocol, how):
        at += len(some)
        some = [one for one in some if not one.done]  # a longer run of this table may have made it superfluous
        if not some:
            continue
        seeds = ", ".join(str(one.seed) for one in some)
        title = f"{protocol.columns[some[0].column].title}, {protocol.rows[some[0].row].title}, seed {seeds}"
        console.print(f"[{at}/{len(left)}] {title}", highlight=False, markup=False)
        try:
            run(some, [protocol.config(one.column, one.row, one.seed) for one in some], how, console)
        except Problem as problem:
            if not str(problem).startswith("training diverged"):
                raise
            console.print(f"{problem}", highlight=False, markup=False)  # a result, too: the table goes on
            for one in some:
                if not one.done:
                    files.write_json(one.record, files.read_json(one.record) | {"diverged": str(problem)})
            continue
        for one in some:
            if protocol.rows[one.row].watch and one.seed == 0:
                from perfed.tables.watch import alphas

                alphas(one)


def _batches(left: list[Cell], protocol: Protocol, how: dict[str, Any]) -> list[list[Cell]]:
    """Cells that are run together: the seeds of a column and row, where cohorts are batches."""
    if not left:
        return []
    from perfed.engines import pick_device, pick_engine

    first = protocol.config(left[0].column, left[0].row, 0).run
    asked = dataclasses.replace(first, **{key: value for key, value in how.items() if key != "data_dir"})
    if pick_engine(asked, pick_device(asked.device), 2) != "vectorised":
        return [[one] for one in left]
    groups: dict[Any, list[Cell]] = {}
    for one in left:
        groups.setdefault((one.column, one.row, one.seed if one.first else None), []).append(one)
    return list(groups.values())


def run(some: list[Cell], configs: list[Config], how: dict[str, Any], console: Console) -> None:
    """Run cells to their end, from their checkpoints where they have one."""
    from perfed.experiment import check_same, create, prepare, read_config, train_together
    from perfed.tables.joining import old_hands, welcome

    experiments = []
    for one, config in zip(some, configs, strict=True):
        check_settings(one, config)
        _write_record(one, config)
        begun = (one.folder / "config.toml").exists()
        if begun:
            config = read_config(one.folder)
        else:
            asked = {key: value for key, value in how.items() if key != "data_dir"}
            data = dataclasses.replace(config.data, dir=how.get("data_dir") or config.data.dir)
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, **asked), data=data)
        experiment = prepare(config)
        if one.first:
            experiment = old_hands(experiment, one.first)
        if begun:
            check_same(experiment, one.folder, lambda text: console.print(text, highlight=False))
        else:
            create(experiment, one.folder)
        experiments.append(experiment)
    train_together(experiments, [one.folder for one in some], console)
    for one, experiment in zip(some, experiments, strict=True):
        if one.first:
            welcome(prepare(experiment.config), one)


def check_settings(one: Cell, config: Config) -> None:
    """Refuse a cell that was begun with other settings; settings that perfed did not have then do not matter."""
    if not one.record.exists():
        return
    was, now = (tomllib.loads(text) for text in (files.read_json(one.record)["config"], to_toml(config)))
    for name, table in now.items():
        if not isinstance(table, dict):
            same = was.get(name) == table
        else:
            before = was.get(name, {})
            same = all(before[key] == value for key, value in table.items() if key in before)
        if not same:
            raise Problem(f"'{one.folder}' was run with other settings ({name}): choose another --out, or remove it")


def _write_record(one: Cell, config: Config) -> None:
    from perfed.engines.workers import cores

    if not one.record.exists():
        one.folder.parent.mkdir(parents=True, exist_ok=True)
        about = {"version": __version__, "commit": commit(), "cores": cores()}
        files.write_json(one.record, {"config": to_toml(config), **about})


def commit() -> str:
    """The commit of this checkout, with a + where files differ from it; empty for an installed package."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("rev-parse", "--short", "HEAD")
    return found + ("+" if found and git("status", "--porcelain", "--untracked-files=no", "--", "../..") else "")
