"""The page of reproductions: every table with its command, its choices and the results that come with perfed."""

from __future__ import annotations

from pathlib import Path

from perfed.report.table_text import body
from perfed.report.tables import markdown
from perfed.studies.papers import protocol
from perfed.studies.papers.make import file_name, kept, without_run
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.result import from_csv
from perfed.studies.papers.tuned import chosen_on


def page() -> str:
    """Everything between the page's marks; made from files alone."""
    return "\n".join(_section(protocol.find(name)) for name in protocol.names())


def headline(name: str = "pgfed-1", column: str = "c10-100") -> str:
    """One column of one table, in short, for the front page: what was run, in the paper's order."""
    made = protocol.find(name)
    lines = [line for line in from_csv(kept(made)) if line["column"] == column and line["seeds"]]
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
    head = (made.columns[column].title, "paper", "perfed, best test round", "best validation round", "seeds")
    return markdown(head, rows)


def _section(made: Protocol) -> str:
    text = [f"### {made.title}", "", f"`perfed table {made.name}`. {made.paper}", ""]
    if made.source:
        text += [f"Read off the runs of `{made.source}`.", ""]
    text += [f"- {note}" for note in (*made.notes, *chosen_on(made))]
    text += [f"- {row.title}: {row.note}." for row in made.rows.values() if row.note and not made.source]
    text += ["", _results(made), _results(protocol.reduced(made, [], quick=True))]
    return "\n".join(text)


def _results(made: Protocol) -> str:
    name = f"`{file_name(made)}`"
    if not kept(made).is_file():
        cells = len(made.columns) * len(made.rows)
        return f"**{name}: not run** ({cells} cells of {made.seeds} seeds each).\n"
    table = from_csv(kept(made))
    columns = list(dict.fromkeys(line["column"] for line in table))
    shown = protocol.chosen(made, columns, [], None)
    left = [one.title for column, one in made.columns.items() if column not in columns]
    names = [f"{made.cells}-{kind}-{column}.png" for kind in made.figures for column in columns]
    pictures = [one for one in (kept(made).parent / picture for picture in names) if one.is_file()]
    text = [f"**{name}**" + (f": {made.label}" if made.label else ""), "", body(shown, table, full=False)]
    text += [f"Not run: {'; '.join(left)}.\n"] * bool(left)
    text += _lost(shown)
    return "\n".join(text + [f"![{one.stem}]({_link(one)})\n" for one in pictures])


def _lost(made: Protocol) -> list[str]:
    """Which numbers cannot be read off a kept run again."""
    seed = lambda seeds: f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    said = [
        f"- {made.columns[column].title}: "
        + ", ".join(f"{made.rows[row].title} ({seed(seeds)})" for row, seeds in rows.items())
        for column, rows in without_run(made).items()
    ]
    return ["Of these runs nothing is kept but what stands here and in the pictures:", "", *said, ""] if said else []


def _link(picture: Path) -> str:
    return f"../bench/results/{picture.name}"
