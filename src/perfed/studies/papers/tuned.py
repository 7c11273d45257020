"""Settings chosen on validation data: the files that `perfed tune` keeps, and what a table uses of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from perfed.studies.papers.kept import results_folder
from perfed.studies.papers.protocol import Protocol
from perfed.training import catalog, files

Grid = dict[str, Any]  # what was tried for a row, and with what result


def tuning_file(protocol: Protocol, column: str) -> str:
    """Return the name of the file of what was tried for a column's rows."""
    return f"tune-{protocol.cells}-{column}.json"


def chosen_on(protocol: Protocol) -> list[str]:
    """Say for every column what was tried for the rows whose settings were the best of it; other rows are not named."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, column in protocol.columns.items():
        path = results_folder() / tuning_file(protocol, name)
        tried: dict[str, list[Grid]] = {}
        for grid in files.read_json(path)["rows"] if path.is_file() else []:
            tried.setdefault(grid["row"], []).append(grid)
        for row, grids in tried.items():
            used = [grid for grid in grids if row in protocol.rows and _is_used(protocol, name, row, grid, grids)]
            if used:  # trials of other sources may have been scored in another way: they are only counted
                alike = [grid for grid in grids if grid["commit"] == used[-1]["commit"]]
                others = sum(len(grid["tried"]) for grid in grids if grid not in alike)
                rows.setdefault((column.title, _in_words(alike, others), path.name), []).append(row)
    titles = lambda names: ", ".join(protocol.rows[name].title for name in names)
    return [f"{title}: {words} (`{file}`): {titles(names)}." for (title, words, file), names in rows.items()]


def _is_used(protocol: Protocol, column: str, row: str, grid: Grid, grids: list[Grid]) -> bool:
    """Tell if the row has a grid's best settings, and leaves those alone that only other grids tried."""
    about = protocol.rows[row]
    entry, plain = catalog.find(about.method), dataclasses.replace(about, by_column={})
    without = dataclasses.replace(protocol, rows={**protocol.rows, row: plain})
    now, before = (table.config(column, row, 0).settings(entry) for table in (protocol, without))
    keys = dict.fromkeys(key for other in grids for key in other["grid"])
    wanted = {key: before.get(key, entry.fields[key].default) for key in keys} | grid["best"]["settings"]
    return all(now.get(key, entry.fields[key].default) == value for key, value in wanted.items())


def _in_words(grids: list[Grid], others: int) -> str:
    values: dict[str, list[Any]] = {}
    for grid in grids:
        for key, tried in grid["grid"].items():
            values.setdefault(key, []).extend(tried)
    values = {key: sorted(set(tried), key=lambda v: (str(type(v)), v), reverse=True) for key, tried in values.items()}
    every = "; ".join(f"{key} from {{{', '.join(map(str, tried))}}}" for key, tried in values.items())
    trials, whole = sum(len(grid["tried"]) for grid in grids), math.prod(map(len, values.values()))
    count = f"{trials} of {whole} combinations" if trials < whole else f"{trials} trials"
    lengths = sorted({grid["rounds"] for grid in grids})
    rounds = f"{lengths[0]} to {lengths[-1]} rounds" if len(lengths) > 1 else f"{lengths[0]} rounds"
    seeds = ", ".join(map(str, sorted({seed for grid in grids for seed in grid["seeds"]})))
    more = f"; {others} more with other sources are in the file" if others else ""
    return f"chosen on validation data, {count}, {rounds}, seed {seeds}: {every}{more}"
