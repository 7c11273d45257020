"""Which of a table's settings were chosen on validation data, read from what `perfed tune` wrote."""

from __future__ import annotations

from typing import Any

from perfed import catalog, files
from perfed.tables.protocol import RESULTS, Protocol, folder


def file_name(protocol: Protocol, column: str) -> str:
    """The file of what was tried for a column's rows."""
    return f"tune-{protocol.cells}-{column}.json"


def chosen_on(protocol: Protocol) -> list[str]:
    """For every column, all that was tried for the rows whose best this table uses; other rows are not named."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column, one in protocol.columns.items():
        path = folder() / RESULTS / file_name(protocol, column)
        tried: dict[str, list[dict[str, Any]]] = {}
        for grid in files.read_json(path)["rows"] if path.is_file() else []:
            tried.setdefault(grid["row"], []).append(grid)
        for row, grids in tried.items():
            if row in protocol.rows and any(_used(protocol, column, row, grid["best"]["settings"]) for grid in grids):
                rows.setdefault((one.title, _how(grids), path.name), []).append(protocol.rows[row].title)
    return [f"{title}: {how} (`{name}`): {', '.join(titles)}." for (title, how, name), titles in rows.items()]


def _used(protocol: Protocol, column: str, row: str, settings: dict[str, Any]) -> bool:
    config, entry = protocol.config(column, row, 0), catalog.find(protocol.rows[row].method)
    now = config.settings(entry)
    return all(now.get(key, entry.fields[key].default) == value for key, value in settings.items())


def _how(grids: list[dict[str, Any]]) -> str:
    values: dict[str, list[Any]] = {}
    for grid in grids:
        for key, some in grid["grid"].items():
            values[key] = list(dict.fromkeys([*values.get(key, []), *some]))
    every = "; ".join(f"{key} from {{{', '.join(map(str, some))}}}" for key, some in values.items())
    lengths = sorted({grid["rounds"] for grid in grids})
    rounds = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
    seeds = ", ".join(map(str, sorted({seed for grid in grids for seed in grid["seeds"]})))
    trials = sum(len(grid["tried"]) for grid in grids)
    return f"chosen on validation data, {trials} trials, {rounds} rounds, seed {seeds}: {every}"
