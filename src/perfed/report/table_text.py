"""A paper's table and ours, for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from perfed.report.tables import markdown, size
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.result import Line, agreement
from perfed.studies.papers.tuned import chosen_on
from perfed.training.provenance import together

NOT_RUN, DIVERGED = "not run", "diverged"
RULE = {"max": "best test", "val": "best val.", "last10": "last ten", "last": "last"}
MEANING = (
    "Rules: best test, the round with the highest mean test accuracy (optimistic); best val., the round with the "
    "highest mean validation accuracy; last ten, the mean over the evaluations of the last ten rounds; last, the last "
    "round. ± is over seeds, in the paper as printed there. Rows in parentheses are not in the paper: they show what "
    "is the method's own doing. `minus row`: the paper's own method minus this row, mean over clients and seeds, "
    "paired, with a 95 % bootstrap interval."
)


def _pair(value: float | None, std: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def headings(protocol: Protocol) -> tuple[str, ...]:
    """Return the headings of the printed table."""
    if protocol.kind == "rounds":
        return ("", "paper", "ours", "difference", "speed-up, paper", "speed-up, ours", "seeds")
    others = [RULE[rule] for rule in _other_rules(protocol)]
    main = RULE[protocol.rule] if protocol.kind == "accuracy" else f"gain, {RULE[protocol.rule]}"
    own = protocol.rows[protocol.own].title if protocol.own else "own method"
    more = ("share above 0",) if protocol.kind == "gain" else ()
    return ("", "paper", main, "difference", *others, *more, f"{own} minus row", "seeds")


def _other_rules(protocol: Protocol) -> list[str]:
    """Return the rules that a table of accuracies shows beside its own."""
    return [rule for rule in ("max", "val", "last10") if protocol.kind == "accuracy" and rule != protocol.rule]


def column_title(protocol: Protocol, table: list[Line], column: str) -> str:
    """Return the title of a column, with what is unusual about the data that it was run on."""
    data = together(line.get("data") or "" for line in table if line["column"] == column)
    return protocol.columns[column].title + (f" ({data})" if data else "")


def cells(protocol: Protocol, table: list[Line], column: str) -> list[tuple[str, ...]]:
    """Return the printed rows of a column; what was not run says so."""
    lines = [line for line in table if line["column"] == column]
    return [_row(protocol, line, lines) for line in lines]


def _row(protocol: Protocol, line: Line, lines: list[Line]) -> tuple[str, ...]:
    title = f"({line['title']})" if line["plain"] else line["title"]  # not a row of the paper's
    whole = protocol.kind == "rounds"
    paper = _pair(line["paper"], line["paper_std"], 0 if whole else 2)
    width = len(headings(protocol))
    if not line["seeds"]:
        return (title, paper, DIVERGED if line["diverged"] else NOT_RUN, *("-",) * (width - 4), "0")
    value = _pair(line["value"], line["value_std"], 1 if whole else 2)
    if whole and line["value"] is None:
        value = f"reached by {line['reached']:.0f} of {line['seeds']:.0f}"
    difference = "-" if line["difference"] is None else f"{line['difference']:+.{1 if whole else 2}f}"
    seeds = f"{line['seeds']:.0f}" + (f", {line['diverged']:.0f} {DIVERGED}" if line["diverged"] else "")
    if whole:
        listed = [other for other in lines if not other["plain"]]
        speed = [_speed_up(line[key], [other[key] for other in listed]) for key in ("paper", "value")]
        return (title, paper, value, difference, *speed, seeds)
    more = [_pair(line[rule], line[f"{rule}_std"]) for rule in _other_rules(protocol)]
    if protocol.kind == "gain":
        more.append("-" if line["gain_positive"] is None else f"{100 * line['gain_positive']:.0f} %")
    return (title, paper, value, difference, *more, _ahead(line), seeds)


def _ahead(line: Line) -> str:
    """Write by how much the paper's own method is ahead of a row, with the interval."""
    if line["ahead"] is None:
        return "-"
    text = f"{line['ahead']:+.2f} [{line['ahead_low']:+.2f}, {line['ahead_high']:+.2f}]"
    both = line.get("ahead_seeds", line["seeds"])
    if both < line["seeds"]:  # of the others the own method has no run yet
        return f"{text} ({both:.0f} of {line['seeds']:.0f} seeds)"
    if both > line["seeds"]:  # gains count the seeds that Local has, too
        return f"{text} ({both:.0f} seeds)"
    return text


def _speed_up(value: float | None, every: list[float | None]) -> str:
    """Return the rounds of the slowest listed method over a method's own."""
    known = [v for v in every if v is not None]
    return "-" if value is None or not known else f"{max(known) / value:.1f}"


def orders(protocol: Protocol, table: list[Line]) -> list[str]:
    """Say for each column how far the order of the methods agrees with the paper's."""
    sentences = []
    for column in dict.fromkeys(line["column"] for line in table):
        agreed = agreement(table, column)
        if agreed is None:
            continue
        show = lambda value: "n/a" if value is None or math.isnan(value) else f"{value:+.2f}"
        sentences.append(
            f"{column_title(protocol, table, column)}: order of {agreed['rows']} rows against the paper's: "
            f"Spearman {show(agreed['spearman'])}, Kendall {show(agreed['kendall'])}, "
            f"{agreed['same']} of {agreed['pairs']} pairs alike"
        )
    return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


# Heading, key of a line, and what writes its number.
MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("deviation over clients", "clients_std", _percent),
    ("10th percentile", "clients_p10", _percent),
    ("worst tenth", "clients_worst10", _percent),
    ("Jain", "clients_jain", "{:.3f}".format),
    ("macro-F1", "macro_f1", "{:.3f}".format),  # of the last round, like AUC
    ("AUC", "auc", "{:.3f}".format),
    ("loss", "loss", "{:.3f}".format),
    ("area", "area", _percent),
    ("gain over Local", "gain", "{:+.2f}".format),
    ("gain above 0", "gain_positive", "{:.0%}".format),
    ("sent", "bytes", size),
    ("FLOPs", "flops", "{:.2e}".format),
    ("time", "seconds", "{:.0f} s".format),
    ("server keeps", "server_state", size),
    ("client keeps", "client_state", size),
)


def measure_rows(table: list[Line], column: str) -> list[tuple[str, ...]]:
    """Return spread, fairness, convergence and cost of the finished rows of a column."""
    finished = [line for line in table if line["column"] == column and line["seeds"]]
    cell = lambda line, key, write: "-" if line.get(key) is None else write(line[key])
    return [(line["title"], *(cell(line, key, write) for _, key, write in MEASURES)) for line in finished]


def report(protocol: Protocol, table: list[Line], pictures: list[str] | None = None) -> str:
    """Write a whole table as Markdown."""
    text = [f"# {protocol.title}", ""]
    if protocol.label:
        text += [f"**{protocol.label}**: not the paper's settings, so at most orders may be compared.", ""]
    text += [protocol.paper, "", body(protocol, table), "Choices:", ""]
    text += [f"- {note}" for note in protocol.notes]
    text += [f"- {note}" for note in chosen_on(protocol)]
    text += [f"- {row.title}: {row.note}." for row in protocol.rows.values() if row.note] + [""]
    text += [f"![{name}]({name})\n" for name in pictures or []]
    return "\n".join(text)


def body(protocol: Protocol, table: list[Line], full: bool = True) -> str:
    """Write the tables alone, with what they rest on; `full`: also other measures, and what the rules mean."""
    text = []
    for column in dict.fromkeys(line["column"] for line in table):
        text += [f"**{column_title(protocol, table, column)}**", ""]
        text += [markdown(headings(protocol), cells(protocol, table, column))]
        rows = measure_rows(table, column) if full and protocol.kind == "accuracy" else []
        text += [markdown(("", *(heading for heading, _, _ in MEASURES)), rows)] * bool(rows)
    text += [f"- {line}" for line in orders(protocol, table)] + [""]
    text += [MEANING, ""] * (full and protocol.kind != "rounds")
    text += [provenance(table), ""]
    return "\n".join(text)


def provenance(table: list[Line]) -> str:
    """Say where the numbers come from."""
    every: Any = lambda key: together(line.get(key) or "" for line in table)
    if not any(line["seeds"] for line in table):
        return "Nothing of this table has been run yet."
    seeds, commit = int(max(line["seeds"] for line in table)), every("commit") or "unknown"
    about = f"seeds 0 to {seeds - 1}" if seeds > 1 else "seed 0"
    return f"`{every('command')}`, {about}, perfed {every('version')}, commit {commit}, {every('machine')}."
