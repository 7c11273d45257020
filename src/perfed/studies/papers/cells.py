"""Runs the cells of a table: a column, a row and a seed are one run of one method, in a folder of its own."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed import __version__
from perfed.core.errors import Problem
from perfed.studies.papers.protocol import NEUTRAL, Protocol, without_folder
from perfed.training import files
from perfed.training.config import Config, to_toml
from perfed.training.folder import MethodFolder, RunFolder
from perfed.training.provenance import commit, hardware, together

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
        """Whether the run is finished, and its numbers can be used."""
        return (self.folder / NEWCOMERS if self.first else self.result).exists() and not self.diverged

    @property
    def diverged(self) -> bool:
        """Whether the run came to numbers that are not finite; it would again."""
        return any(path.exists() and "diverged" in files.read_json(path) for path in (self.record, self.result))

    @property
    def run(self) -> RunFolder:
        """The files of its run."""
        return RunFolder(self.folder)

    @property
    def training(self) -> MethodFolder:
        """The files of its method."""
        return self.run.method(self.method)

    @property
    def result(self) -> Path:
        """What the training ended with."""
        return self.training.result_file

    def place(self, model: str, until: int) -> Path:
        """Where its scores are kept: of one model, up to a round (0: all)."""
        return self.folder / f"scores_{model}_{until or 'all'}.json"

    def readable(self, model: str, until: int) -> bool:
        """Whether these scores are kept, or the log that they are made from."""
        return self.place(model, until).exists() or self.training.scores_log.exists()

    @property
    def record(self) -> Path:
        """What was asked for, beside the folder."""
        return self.folder.with_suffix(".json")


def cell(protocol: Protocol, out: Path, column: str, row: str, seed: int) -> Cell:
    """The run that this cell is read from: a longer one of the same settings where there is one."""
    runs, one = protocol.rows[protocol.rows[row].runs], protocol.columns[column]

    def make(name: str) -> Cell:
        folder = out / protocol.cells / name / runs.name / f"seed_{seed}"
        return Cell(name, runs.name, seed, runs.method, folder, one.first, one.tuned)

    if one.same:
        longer = make(one.same)
        if longer.done and longer.readable(protocol.rows[row].model, one.until * runs.times):
            return longer
    return make(column)


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
    check_cells(protocol, out)
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
        configs = [protocol.config(one.column, one.row, one.seed) for one in some]
        attempt(some, configs, how, console, protocol.rows[some[0].row].watch)


def _batches(left: list[Cell], protocol: Protocol, how: dict[str, Any]) -> list[list[Cell]]:
    """Cells that are run together: the seeds of a column and row, where cohorts are batches."""
    if not left:
        return []
    if not batched(protocol.config(left[0].column, left[0].row, 0), how):
        return [[one] for one in left]
    groups: dict[Any, list[Cell]] = {}
    for one in left:
        groups.setdefault((one.column, one.row, one.seed if one.first else None), []).append(one)
    return list(groups.values())


def batched(config: Config, how: dict[str, Any]) -> bool:
    """Whether cohorts are batches, so that several runs can share one."""
    from perfed.training.engine import pick_device, pick_engine

    asked = _asked(config, how).run
    return pick_engine(asked, pick_device(asked.device), 2) == "vectorised"


def _asked(config: Config, how: dict[str, Any]) -> Config:
    """A cell's configuration with where and with what to compute it."""
    run = dataclasses.replace(config.run, **{key: value for key, value in how.items() if key != "data_dir"})
    return dataclasses.replace(
        config, run=run, data=dataclasses.replace(config.data, dir=how.get("data_dir") or config.data.dir)
    )


def attempt(
    some: list[Cell], configs: list[Config], how: dict[str, Any], console: Console, watch: bool = False
) -> None:
    """Run cells; that one diverged is a result, too, which its record keeps."""
    diverged = run(some, configs, how, console, watch)
    for one in some:
        if one.folder in diverged:
            console.print(diverged[one.folder], highlight=False, markup=False)
            files.write_json(one.record, files.read_json(one.record) | {"diverged": diverged[one.folder]})


def run(
    some: list[Cell], configs: list[Config], how: dict[str, Any], console: Console, watch: bool = False
) -> dict[Path, str]:
    """Run cells to their end, from their checkpoints where they have one.

    Args:
        some: the cells; where there are several, their cohorts are one batch.
        configs: a configuration for each.
        how: where and with what to compute.
        console: where progress goes.
        watch: keep the clients' mixtures, too.

    Returns:
        The folders of cells that diverged, and why.
    """
    from perfed.studies.papers.joining import old_hands, welcome
    from perfed.studies.papers.watch import Mixtures
    from perfed.training.prepare import prepare, reopen
    from perfed.training.train import train

    experiments = []
    for one, config in zip(some, configs, strict=True):
        check_settings(one, config)
        those = functools.partial(old_hands, share=one.first) if one.first else None
        _keep_settings(one, config)
        experiments.append(reopen(_asked(config, how), one.folder, console, those))
        _sign(one, experiments[-1].device)
    diverged = train(experiments, [one.folder for one in some], console, Mixtures if watch else None)
    for one, experiment in zip(some, experiments, strict=True):
        if one.first and one.folder not in diverged:
            welcome(prepare(experiment.config), one)
    return diverged


def check_cells(protocol: Protocol, out: Path, *, ended: bool = False) -> None:
    """Refuse a table of which a cell was begun with other settings than it has now; `ended`: only those with a result.

    A longer run that a cell is read from is checked where its own column is asked for.
    """
    for column in protocol.columns:
        for row in protocol.rows:
            for one in (cell(protocol, out, column, row, seed) for seed in range(protocol.seeds)):
                if one.column in protocol.columns and (one.done or one.diverged or not ended):
                    check_settings(one, protocol.config(one.column, row, one.seed))


def check_settings(one: Cell, config: Config) -> None:
    """Refuse a cell that was begun with other settings.

    Settings that perfed did not have then do not matter, nor do those that no result depends on.
    """
    if not one.record.exists():
        return
    was, now = (tomllib.loads(text) for text in (files.read_json(one.record)["config"], _asked_for(config)))
    for name, table in now.items():
        if not isinstance(table, dict):
            same = was.get(name) == table
        else:
            before = {key: v for key, v in was.get(name, {}).items() if name != "run" or key not in NEUTRAL}
            same = all(before[key] == value for key, value in table.items() if key in before)
        if not same:
            where = f"'{one.folder}' was run with other settings ({name})"
            raise Problem(f"{where}: choose another --out, or remove it and {one.record.name} beside it")


def _keep_settings(one: Cell, config: Config) -> None:
    """Write what was asked for, before anything is run."""
    if not one.record.exists():
        one.folder.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(one.record, {"config": _asked_for(config)})


def _asked_for(config: Config) -> str:
    """The settings as text; a network of the tables' own by its file's name, which is the same on every machine."""
    model = dataclasses.replace(config.model, name=without_folder(config.model.name))
    return to_toml(dataclasses.replace(config, model=model))


def _sign(one: Cell, device: str) -> None:
    """Write with which sources and on what a cell is run; one that goes on elsewhere names both places."""
    was = files.read_json(one.record)
    for key, value in {"version": __version__, "commit": commit(), "device": hardware(device)}.items():
        was[key] = together([was.get(key, ""), value])
    files.write_json(one.record, was)
