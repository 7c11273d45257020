"""A paper's table and ours, for the terminal and as Markdown."""

from __future__ import annotations

import math
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
    """What the columns of the printed table are."""
    if protocol.kind == "rounds":
        return ("", "paper", "ours", "difference", "speed-up, paper", "speed-up, ours", "seeds")
    others = [RULE[rule] for rule in ("max", "val", "last10") if protocol.kind == "accuracy" and rule != protocol.rule]
    main = RULE[protocol.rule] if protocol.kind == "accuracy" else f"gain, {RULE[protocol.rule]}"
    own = protocol.rows[protocol.own].title if protocol.own else "own method"
    more = ("share above 0",) if protocol.kind == "gain" else ()
    return ("", "paper", main, "difference", *others, *more, f"{own} minus row", "seeds")


def column_title(protocol: Protocol, table: list[Line], column: str) -> str:
    """What a column is called, with what is unusual about the data that it was run on."""
    data = together(line.get("data") or "" for line in table if line["column"] == column)
    return protocol.columns[column].title + (f" ({data})" if data else "")


def cells(protocol: Protocol, table: list[Line], column: str) -> list[tuple[str, ...]]:
    """The printed lines of one column; what was not run says so."""
    here = [line for line in table if line["column"] == column]
    return [_cells(protocol, line, here) for line in here]


def _cells(protocol: Protocol, line: Line, here: list[Line]) -> tuple[str, ...]:
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
        speed = [
            _speed_up(line[key], [other[key] for other in here if not other["plain"]]) for key in ("paper", "value")
        ]
        return (title, paper, value, difference, *speed, seeds)
    others = [r for r in ("max", "val", "last10") if protocol.kind == "accuracy" and r != protocol.rule]
    more = [_pair(line[rule], line[f"{rule}_std"]) for rule in others]
    if protocol.kind == "gain":
        more.append("-" if line["gain_positive"] is None else f"{100 * line['gain_positive']:.0f} %")
    ahead = "-"
    if line["ahead"] is not None:
        ahead = f"{line['ahead']:+.2f} [{line['ahead_low']:+.2f}, {line['ahead_high']:+.2f}]"
        both = line.get("ahead_seeds", line["seeds"])
        if both < line["seeds"]:  # of the others the own method has no run yet
            ahead += f" ({both:.0f} of {line['seeds']:.0f} seeds)"
        elif both > line["seeds"]:  # gains count the seeds that Local has, too
            ahead += f" ({both:.0f} seeds)"
    return (title, paper, value, difference, *more, ahead, seeds)


def _speed_up(value: float | None, every: list[float | None]) -> str:
    """Rounds of the slowest listed method over one's own."""
    known = [v for v in every if v is not None]
    return "-" if value is None or not known else f"{max(known) / value:.1f}"


def orders(protocol: Protocol, table: list[Line]) -> list[str]:
    """One line per column: does the order of the methods agree?"""
    said = []
    for column in dict.fromkeys(line["column"] for line in table):
        found = agreement(table, column)
        if found is None:
            continue
        show = lambda value: "n/a" if value is None or math.isnan(value) else f"{value:+.2f}"
        said.append(
            f"{column_title(protocol, table, column)}: order of {found['rows']} rows against the paper's: "
            f"Spearman {show(found['spearman'])}, Kendall {show(found['kendall'])}, "
            f"{found['same']} of {found['pairs']} pairs alike"
        )
    return said


METRICS = (
    *("", "deviation over clients", "10th percentile", "worst tenth", "Jain", "macro-F1", "AUC", "loss", "area"),
    *("gain over Local", "gain above 0", "sent", "FLOPs", "time", "server keeps", "client keeps"),
)


def metric_cells(table: list[Line], column: str) -> list[tuple[str, ...]]:
    """Spread, fairness, convergence and cost of the finished rows of one column."""
    rows = []
    number = lambda value, pattern: "-" if value is None else pattern.format(value)
    for line in table:
        if line["column"] != column or not line["seeds"]:
            continue
        percent = [
            number(line[f"clients_{k}"] and 100 * line[f"clients_{k}"], "{:.2f}") for k in ("std", "p10", "worst10")
        ]
        tail = [number(line["clients_jain"], "{:.3f}")]
        tail += [number(line.get(key), "{:.3f}") for key in ("macro_f1", "auc", "loss")]  # the first two: last round
        tail += [number(line["area"] and 100 * line["area"], "{:.2f}"), number(line["gain"], "{:+.2f}")]
        tail += [number(line["gain_positive"], "{:.0%}"), size(line["bytes"] or 0)]
        tail += [number(line["flops"], "{:.2e}"), number(line["seconds"], "{:.0f} s")]
        kept = [line.get(key) for key in ("server_state", "client_state")]
        tail += ["-" if one is None else size(one) for one in kept]
        rows.append((line["title"], *percent, *tail))
    return rows


def report(protocol: Protocol, table: list[Line], pictures: list[str] | None = None) -> str:
    """The whole table as Markdown."""
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
    """The tables alone, with what they rest on; `full`: also the other measures, and what the rules are."""
    text = []
    for column in dict.fromkeys(line["column"] for line in table):
        text += [f"**{column_title(protocol, table, column)}**", ""]
        text += [markdown(headings(protocol), cells(protocol, table, column))]
        rows = metric_cells(table, column) if full and protocol.kind == "accuracy" else []
        text += [markdown(METRICS, rows)] * bool(rows)
    text += [f"- {line}" for line in orders(protocol, table)] + [""]
    text += [MEANING, ""] * (full and protocol.kind != "rounds")
    text += [provenance(table), ""]
    return "\n".join(text)


def provenance(table: list[Line]) -> str:
    """Where the numbers come from."""
    every: Any = lambda key: together(line.get(key) or "" for line in table)
    if not any(line["seeds"] for line in table):
        return "Nothing of this table has been run yet."
    seeds, commit = int(max(line["seeds"] for line in table)), every("commit") or "unknown"
    about = f"seeds 0 to {seeds - 1}" if seeds > 1 else "seed 0"
    return f"`{every('command')}`, {about}, perfed {every('version')}, commit {commit}, {every('machine')}."
