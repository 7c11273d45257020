"""Which of a table's settings were chosen on validation data, read from what `perfed tune` wrote."""

from __future__ import annotations

from typing import Any

from perfed import catalog, files
from perfed.tables.protocol import RESULTS, Protocol, folder


def file_name(protocol: Protocol, column: str) -> str:
    """The file of what was tried for a column's rows."""
    return f"tune-{protocol.cells}-{column}.json"


def chosen_on(protocol: Protocol) -> list[str]:
    """A sentence for every column and grid whose choice this table uses; rows that use other settings are not named."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column, one in protocol.columns.items():
        path = folder() / RESULTS / file_name(protocol, column)
        for tried in files.read_json(path)["rows"] if path.is_file() else []:
            row = tried["row"]
            if row in protocol.rows and _used(protocol, column, row, tried["best"]["settings"]):
                rows.setdefault((one.title, _how(tried), path.name), []).append(protocol.rows[row].title)
    return [f"{title}: {how} (`{name}`): {', '.join(titles)}." for (title, how, name), titles in rows.items()]


def _used(protocol: Protocol, column: str, row: str, settings: dict[str, Any]) -> bool:
    config, entry = protocol.config(column, row, 0), catalog.find(protocol.rows[row].method)
    now = config.settings(entry)
    return all(now.get(key, entry.fields[key].default) == value for key, value in settings.items())


def _how(tried: dict[str, Any]) -> str:
    grid = "; ".join(f"{key} from {{{', '.join(f'{v}' for v in values)}}}" for key, values in tried["grid"].items())
    seeds = ", ".join(map(str, tried["seeds"]))
    return f"chosen on validation data, {tried['rounds']} rounds, seed {seeds}: {grid}"
