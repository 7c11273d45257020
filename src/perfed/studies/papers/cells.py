"""The cells of a table: a column, a row and a seed are one run of one method, in a folder of its own."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfed import __version__
from perfed.core.errors import Problem
from perfed.studies.papers.protocol import Protocol, without_folder
from perfed.studies.papers.watch import mixtures_file
from perfed.training import files
from perfed.training.config import NEUTRAL, Config, to_toml
from perfed.training.folder import MethodFolder, RunFolder
from perfed.training.provenance import commit, hardware, together

SCORES = "scores_{model}_{until}.json"

FORMER = {"normalise": "channel"}  # what was recorded where now nothing special is asked for: `auto`


@dataclass(frozen=True)
class Cell:
    """One run."""

    column: str
    row: str
    seed: int
    method: str
    folder: Path  # a run folder, once it has begun
    first: float = 0.0  # share of the clients that train; the others join later
    tuned: int = 0  # epochs in which those who join tune what the server has

    @property
    def done(self) -> bool:
        """Whether the run is finished, and its numbers can be used."""
        return (self.newcomers_file.exists() if self.first else self.training.finished) and not self.diverged

    @property
    def diverged(self) -> bool:
        """Whether the run came to numbers that are not finite; it would again."""
        ends = (self.record, self.training.result_file)
        return any(path.exists() and "diverged" in files.read_json(path) for path in ends)

    @property
    def run(self) -> RunFolder:
        """The files of its run."""
        return RunFolder(self.folder)

    @property
    def training(self) -> MethodFolder:
        """The files of its method."""
        return self.run.method(self.method)

    @property
    def record(self) -> Path:
        """What was asked for, beside the folder."""
        return self.folder.with_suffix(".json")

    @property
    def newcomers_file(self) -> Path:
        """Scores of the clients that joined later, epoch by epoch."""
        return self.folder / "newcomers.json"

    def scores_file(self, model: str, until: int) -> Path:
        """Return the file with the scores of a model, up to a round (0: all)."""
        return self.folder / SCORES.format(model=model, until=until or "all")

    def readable(self, model: str, until: int) -> bool:
        """Tell if these scores are kept, or the log that they are made from."""
        return self.scores_file(model, until).exists() or self.training.scores_log.exists()

    def own_files(self) -> list[Path]:
        """Return what tables have written into the run's folder."""
        scores = sorted(self.folder.glob(SCORES.format(model="*", until="*")))
        return [path for path in (self.newcomers_file, mixtures_file(self.folder), *scores) if path.exists()]

    # ------------------------------------------------------------------ what was asked for

    def keep_settings(self, config: Config) -> None:
        """Write what is asked for, before anything is run."""
        if not self.record.exists():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(self.record, {"config": _settings(config)})

    def check_settings(self, config: Config) -> None:
        """Refuse to go on with other settings than the cell was begun with.

        Settings that perfed did not have then do not matter, nor do those that no result depends on.
        """
        if not self.record.exists():
            return
        was, now = (tomllib.loads(text) for text in (files.read_json(self.record)["config"], _settings(config)))
        for section, table in now.items():
            if not isinstance(table, dict):
                same = was.get(section) == table
            else:
                before = {key: v for key, v in was.get(section, {}).items() if section != "run" or key not in NEUTRAL}
                usual = {
                    key for key, former in FORMER.items() if before.get(key) == former and table.get(key) == "auto"
                }
                same = all(before[key] == value for key, value in table.items() if key in before and key not in usual)
            if not same:
                where = f"'{self.folder}' was run with other settings ({section})"
                raise Problem(f"{where}: choose another --out, or remove it and {self.record.name} beside it")

    def sign(self, device: str) -> None:
        """Write with which sources and on what the cell is run; a cell that goes on elsewhere names both places."""
        record = files.read_json(self.record)
        for key, value in {"version": __version__, "commit": commit(), "device": hardware(device)}.items():
            record[key] = together([record.get(key, ""), value])
        files.write_json(self.record, record)

    def note_divergence(self, why: str) -> None:
        """Write that the cell diverged, which is a result, too."""
        files.write_json(self.record, files.read_json(self.record) | {"diverged": why})


def _settings(config: Config) -> str:
    """Return the settings as text; a network of the tables' own by its file's name, the same on every machine."""
    model = dataclasses.replace(config.model, name=without_folder(config.model.name))
    return to_toml(dataclasses.replace(config, model=model))


def find_cell(protocol: Protocol, out: Path, column: str, row: str, seed: int) -> Cell:
    """Find the run that a cell is read from: a longer one of the same settings where there is one.

    No link is followed on the way from `out` to a cell: what is read and written there stays there.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        column: a column of the table.
        row: a row of the table.
        seed: a seed, counted from 0.
    """
    runs, wanted = protocol.rows[protocol.rows[row].runs], protocol.columns[column]

    def make(name: str) -> Cell:
        folder = out / protocol.cells / name / runs.name / f"seed_{seed}"
        files.Folder(out).has_folder(folder)  # or a Problem, where a link is on the way
        return Cell(name, runs.name, seed, runs.method, folder, wanted.first, wanted.tuned)

    if wanted.same:
        longer = make(wanted.same)
        if longer.done and longer.readable(protocol.rows[row].model, wanted.until * runs.times):
            return longer
    return make(column)


def cells_of(protocol: Protocol, out: Path, column: str, row: str) -> list[Cell]:
    """Return the cells of all seeds."""
    return [find_cell(protocol, out, column, row, seed) for seed in range(protocol.seeds)]


def all_cells(protocol: Protocol, out: Path) -> Iterator[Cell]:
    """Yield the cells of a table, each once."""
    every = (
        cell for column in protocol.columns for row in protocol.rows for cell in cells_of(protocol, out, column, row)
    )
    yield from {cell.folder: cell for cell in every}.values()


def missing_cells(protocol: Protocol, out: Path) -> list[Cell]:
    """Return the cells without a result, each once."""
    cells = {}
    for column in protocol.columns:
        for seed in range(protocol.seeds):  # all rows of a seed before the next seed: what is there can be compared
            for row in protocol.rows:
                cell = find_cell(protocol, out, column, row, seed)
                if not cell.done and not cell.diverged:
                    cells[cell.folder] = cell
    return list(cells.values())


def check_cells(protocol: Protocol, out: Path, *, ended: bool = False) -> None:
    """Refuse a table of which a cell was begun with other settings than it has now.

    A longer run that a cell is read from is checked where its own column is asked for.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        ended: look at cells with a result only.
    """
    for cell in all_cells(protocol, out):
        if cell.column in protocol.columns and (cell.done or cell.diverged or not ended):
            cell.check_settings(protocol.config(cell.column, cell.row, cell.seed))
