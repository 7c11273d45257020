"""One table from beginning to end: run what is missing, then write it as CSV, JSON and Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed.report.table_text import column_title, report
from perfed.studies.papers.cells import carry_out
from perfed.studies.papers.protocol import RESULTS, Protocol, folder
from perfed.studies.papers.result import Line, agreement, from_csv, lines, to_csv
from perfed.training import files

NOT_KEPT = "not-kept.json"  # which results have no run in an archive: table, column, row, seeds


def file_name(protocol: Protocol) -> str:
    """The name of a table's files; a changed one never overwrites the other."""
    return protocol.name + ("-reduced" if protocol.changed else "")


def kept(protocol: Protocol) -> Path:
    """Where the results that come with perfed are."""
    return folder() / RESULTS / f"{file_name(protocol)}.csv"


def without_run(protocol: Protocol) -> dict[str, dict[str, list[int]]]:
    """Of the kept results, the seeds of each column and row whose run is in no archive: their line is all there is."""
    path = folder() / RESULTS / NOT_KEPT
    every = files.read_json(path).get(protocol.cells, {}) if path.is_file() and not protocol.changed else {}
    mine = {column: {row: some[row] for row in protocol.rows if row in some} for column, some in every.items()}
    return {column: mine[column] for column in protocol.columns if mine.get(column)}


def make(
    protocol: Protocol, out: Path, console: Console, *, only_report: bool, command: str, how: dict[str, Any]
) -> tuple[list[Line], list[Path]]:
    """(the table's lines, the files that were written)."""
    if only_report and not (out / protocol.cells).is_dir():
        table = from_csv(kept(protocol)) if kept(protocol).is_file() else lines(protocol, out)
        shown = [line for line in table if line["column"] in protocol.columns and line["row"] in protocol.rows]
        return shown, []
    if not only_report:
        carry_out(protocol, out, console, how)
    table = lines(protocol, out, command)
    return table, write(protocol, out, table)


def write(protocol: Protocol, out: Path, table: list[Line]) -> list[Path]:
    """The table's files in `out`."""
    from perfed.report.table_figures import draw

    out.mkdir(parents=True, exist_ok=True)
    columns = {c: replace(one, title=column_title(protocol, table, c)) for c, one in protocol.columns.items()}
    pictures = draw(replace(protocol, columns=columns), out)
    base = out / file_name(protocol)
    about: dict[str, Any] = {"table": protocol.name, "title": protocol.title, "label": protocol.label, "lines": table}
    about["agreement"] = {column: agreement(table, column) for column in protocol.columns}
    contents = {"csv": to_csv(table), "md": report(protocol, table, [one.name for one in pictures])}
    for kind, content in contents.items():
        files.write(base.with_suffix(f".{kind}"), content)
    files.write_json(base.with_suffix(".json"), about)
    return [*(base.with_suffix(f".{kind}") for kind in (*contents, "json")), *pictures]
