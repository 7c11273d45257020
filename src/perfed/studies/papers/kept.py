"""The results that come with perfed, in files beside the tables' TOML files."""

from __future__ import annotations

from pathlib import Path

from perfed.studies.papers.protocol import Protocol, folder
from perfed.training import files

NOT_KEPT = "not-kept.json"  # which results have no run in an archive: table, column, row, seeds


def results_folder() -> Path:
    """Return the folder of what was run and kept."""
    return folder() / "results"


def file_name(protocol: Protocol) -> str:
    """Return the name of a table's files; a changed table never overwrites the other."""
    return protocol.name + ("-reduced" if protocol.changed else "")


def kept_table(protocol: Protocol) -> Path:
    """Return the file with the kept results of a table."""
    return results_folder() / f"{file_name(protocol)}.csv"


def without_run(protocol: Protocol) -> dict[str, dict[str, list[int]]]:
    """Return the kept results whose run is in no archive, so that their line is all there is.

    Returns:
        Column -> row -> seeds.
    """
    path = results_folder() / NOT_KEPT
    every = files.read_json(path).get(protocol.cells, {}) if path.is_file() and not protocol.changed else {}
    mine = {column: {row: rows[row] for row in protocol.rows if row in rows} for column, rows in every.items()}
    return {column: mine[column] for column in protocol.columns if mine.get(column)}
