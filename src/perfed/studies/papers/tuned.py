"""Which of a table's settings were chosen on validation data, read from what `perfed tune` wrote."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from perfed.studies.papers.protocol import RESULTS, Protocol, folder
from perfed.training import catalog, files


def file_name(protocol: Protocol, column: str) -> str:
    """The file of what was tried for a column's rows."""
    return f"tune-{protocol.cells}-{column}.json"


def chosen_on(protocol: Protocol) -> list[str]:
    """For every column, what was tried for the rows whose settings were the best of it; other rows are not named."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column, one in protocol.columns.items():
        path = folder() / RESULTS / file_name(protocol, column)
        tried: dict[str, list[dict[str, Any]]] = {}
        for grid in files.read_json(path)["rows"] if path.is_file() else []:
            tried.setdefault(grid["row"], []).append(grid)
        for row, grids in tried.items():
            used = [grid for grid in grids if row in protocol.rows and _used(protocol, column, row, grid, grids)]
            if used:  # of the last one's sources: others may have scored in another way
                alike = [grid for grid in grids if grid["commit"] == used[-1]["commit"]]
                others = sum(len(grid["tried"]) for grid in grids if grid not in alike)
                rows.setdefault((one.title, _how(alike, others), path.name), []).append(row)
    named = lambda some: ", ".join(protocol.rows[row].title for row in some)
    return [f"{title}: {how} (`{name}`): {named(some)}." for (title, how, name), some in rows.items()]


def _used(protocol: Protocol, column: str, row: str, grid: dict[str, Any], grids: list[dict[str, Any]]) -> bool:
    """Whether the row has a grid's best settings, and those that only other grids tried as they are without them."""
    one = protocol.rows[row]
    entry, plain = catalog.find(one.method), dataclasses.replace(one, at={})
    without = dataclasses.replace(protocol, rows={**protocol.rows, row: plain})
    now, before = (p.config(column, row, 0).settings(entry) for p in (protocol, without))
    keys = dict.fromkeys(key for other in grids for key in other["grid"])
    wanted = {key: before.get(key, entry.fields[key].default) for key in keys} | grid["best"]["settings"]
    return all(now.get(key, entry.fields[key].default) == value for key, value in wanted.items())


def _how(grids: list[dict[str, Any]], others: int) -> str:
    values: dict[str, list[Any]] = {}
    for grid in grids:
        for key, some in grid["grid"].items():
            values.setdefault(key, []).extend(some)
    values = {key: sorted(set(some), key=lambda v: (str(type(v)), v), reverse=True) for key, some in values.items()}
    every = "; ".join(f"{key} from {{{', '.join(map(str, some))}}}" for key, some in values.items())
    trials, all_of_them = sum(len(grid["tried"]) for grid in grids), math.prod(map(len, values.values()))
    of = f"{trials} of {all_of_them} combinations" if trials < all_of_them else f"{trials} trials"
    lengths = sorted({grid["rounds"] for grid in grids})
    rounds = f"{lengths[0]} to {lengths[-1]} rounds" if len(lengths) > 1 else f"{lengths[0]} rounds"
    seeds = ", ".join(map(str, sorted({seed for grid in grids for seed in grid["seeds"]})))
    more = f"; {others} more with other sources are in the file" if others else ""
    return f"chosen on validation data, {of}, {rounds}, seed {seeds}: {every}{more}"
