"""The files of a paper's table: CSV, JSON, Markdown and figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from perfed.report.table_figures import draw
from perfed.report.table_text import column_title, report
from perfed.studies.papers.kept import file_name
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.result import Line, agreement, to_csv
from perfed.training import files


def write_table(protocol: Protocol, out: Path, table: list[Line]) -> list[Path]:
    """Write a table's files.

    Args:
        protocol: the table.
        out: the folder of all tables' runs, where its files go, too.
        table: its lines.

    Returns:
        The files.
    """
    out.mkdir(parents=True, exist_ok=True)
    titled = {
        name: replace(column, title=column_title(protocol, table, name)) for name, column in protocol.columns.items()
    }
    pictures = draw(replace(protocol, columns=titled), out)
    about: dict[str, Any] = {"table": protocol.name, "title": protocol.title, "label": protocol.label, "lines": table}
    about["agreement"] = {column: agreement(table, column) for column in protocol.columns}
    csv, text, json = (out / f"{file_name(protocol)}{ending}" for ending in (".csv", ".md", ".json"))
    files.write(csv, to_csv(table))
    files.write(text, report(protocol, table, [picture.name for picture in pictures]))
    files.write_json(json, about)
    return [csv, text, json, *pictures]
