"""The page of reproductions: every table with its command, its choices and the results that come with perfed."""

from __future__ import annotations

from perfed.report.table_text import body
from perfed.report.tables import markdown
from perfed.studies.papers import protocol
from perfed.studies.papers.kept import file_name, kept_table, without_run
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.result import from_csv
from perfed.studies.papers.tuned import chosen_on


def page() -> str:
    """Write everything between the page's marks, from files alone."""
    return "\n".join(_section(protocol.find(name)) for name in protocol.names())


def headline(name: str = "pgfed-1", column: str = "c10-100") -> str:
    """Write a column of a table in short, for the front page: what was run, in the paper's order."""
    table = protocol.find(name)
    lines = [line for line in from_csv(kept_table(table)) if line["column"] == column and line["seeds"]]
    number = lambda value, std: "-" if value is None else f"{value:.2f}" + ("" if std is None else f" ± {std:.2f}")
    rows = [
        (
            line["title"] if not line["plain"] else f"({line['title']})",
            number(line["paper"], line["paper_std"]),
            number(line["max"], line["max_std"]),
            number(line["val"], line["val_std"]),
            f"{line['seeds']:g}",
        )
        for line in lines
    ]
    head = (table.columns[column].title, "paper", "perfed, best test round", "best validation round", "seeds")
    return markdown(head, rows)


def _section(table: Protocol) -> str:
    text = [f"### {table.title}", "", f"`perfed table {table.name}`. {table.paper}", ""]
    if table.source:
        text += [f"Read off the runs of `{table.source}`.", ""]
    text += [f"- {note}" for note in (*table.notes, *chosen_on(table))]
    text += [f"- {row.title}: {row.note}." for row in table.rows.values() if row.note and not table.source]
    text += ["", _results(table), _results(protocol.reduced(table, [], quick=True))]
    return "\n".join(text)


def _results(table: Protocol) -> str:
    name, path = f"`{file_name(table)}`", kept_table(table)
    if not path.is_file():
        cells = len(table.columns) * len(table.rows)
        return f"**{name}: not run** ({cells} cells of {table.seeds} seeds each).\n"
    lines = from_csv(path)
    columns = list(dict.fromkeys(line["column"] for line in lines))
    shown = protocol.chosen(table, columns, [], None)
    left = [column.title for name, column in table.columns.items() if name not in columns]
    pictures = [path.with_name(f"{table.cells}-{kind}-{column}.png") for kind in table.figures for column in columns]
    text = [f"**{name}**" + (f": {table.label}" if table.label else ""), "", body(shown, lines, full=False)]
    text += [f"Not run: {'; '.join(left)}.\n"] * bool(left)
    text += _lost(shown)
    links = [f"![{picture.stem}](../bench/results/{picture.name})\n" for picture in pictures if picture.is_file()]
    return "\n".join(text + links)


def _lost(table: Protocol) -> list[str]:
    """Say which numbers cannot be read off a kept run again."""
    words = lambda seeds: f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    lost = [
        f"- {table.columns[column].title}: "
        + ", ".join(f"{table.rows[row].title} ({words(seeds)})" for row, seeds in rows.items())
        for column, rows in without_run(table).items()
    ]
    return ["Of these runs nothing is kept but what stands here and in the pictures:", "", *lost, ""] if lost else []
