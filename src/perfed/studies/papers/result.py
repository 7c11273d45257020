"""The table itself: the paper's numbers, ours, and how far they agree."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.errors import Problem
from perfed.studies import measures
from perfed.studies.papers.cell_scores import cell_scores
from perfed.studies.papers.cells import cells_of, check_cells, find_cell
from perfed.studies.papers.protocol import RULES, Protocol
from perfed.studies.papers.rank_agreement import interval, kendall, same_order, spearman
from perfed.training import catalog
from perfed.training.prepare import BASELINE
from perfed.training.provenance import together
from perfed.training.statistics import gain_over, spread

Line = dict[str, Any]
Scores = dict[int, dict[str, Any]]  # seed -> what a cell says
SPREAD = ("std", "variance", "p10", "worst10", "jain", "pooled")
TEXTS = ("table", "label", "column", "row", "title", "plain", "rule", "machine", "version", "commit", "data", "command")


def seed_scores(protocol: Protocol, out: Path, column: str, row: str) -> Scores:
    """Return what each finished seed of a row says in a column."""
    about = protocol.rows[row]
    until = protocol.columns[column].until * protocol.rows[about.runs].times
    cells = cells_of(protocol, out, column, row)
    return {cell.seed: cell_scores(cell, about.model, until) for cell in cells if cell.done}


def lines(protocol: Protocol, out: Path, command: str = "") -> list[Line]:
    """Return the table, a flat dict for each column and row; numbers are percent, None where there is none.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        command: what was typed to make it.
    """
    check_cells(protocol, out, ended=True)
    table = []
    for column in protocol.columns:
        rows = {row: seed_scores(protocol, out, column, row) for row in protocol.rows}
        for row in protocol.rows:
            if protocol.kind == "gain" and row == BASELINE:
                continue
            diverged = sum(cell.diverged for cell in cells_of(protocol, out, column, row))
            line = _line(protocol, column, row, rows, diverged) | _memory(protocol, out, column, row, rows[row])
            table.append(line | {"command": command})
    return table


def _memory(protocol: Protocol, out: Path, column: str, row: str, seeds: Iterable[int]) -> Line:
    """Return what a row's server and one of its clients keep, which is the same in every seed."""
    for seed in seeds:
        cell = find_cell(protocol, out, column, row, seed)
        config = protocol.config(column, protocol.rows[row].runs, seed)
        return dict(measures.memory(config, catalog.find(cell.method), cell.run.clients()))
    return {"server_state": None, "client_state": None}


def _line(protocol: Protocol, column: str, row: str, rows: dict[str, Scores], diverged: int) -> Line:
    about, mine = protocol.rows[row], rows[row]
    seeds = mine.values()
    paper, std = protocol.number(row, column)
    line: Line = {"table": protocol.name, "label": protocol.label, "column": column, "row": row, "title": about.title}
    line |= {"plain": about.plain, "rule": protocol.rule, "seeds": len(mine), "diverged": diverged}
    line |= {"paper": paper, "paper_std": std}
    line |= {key: together(seed.get(key, "") for seed in seeds) for key in ("machine", "version", "commit", "data")}
    for rule in RULES:
        line[rule], line[f"{rule}_std"] = _over_seeds([_headline(protocol, seed, rule) for seed in seeds])
    baseline = rows.get(BASELINE, {})
    both = [seed for seed in mine if seed in baseline]
    gains = [gain_over(*(_accuracies(each[seed], protocol.rule) for each in (baseline, mine))) for seed in both]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    line["gain"] = _percent(mean([gain["mean"] for gain in gains]))
    line["gain_std"] = _percent(mean([gain["std"] for gain in gains]))
    line["gain_positive"] = mean([gain["positive"] for gain in gains])
    if protocol.kind == "accuracy":
        line["value"], line["value_std"] = line[protocol.rule], line[f"{protocol.rule}_std"]
    elif protocol.kind == "gain":
        line["value"], line["value_std"], line["seeds"] = line["gain"], line["gain_std"], len(both)
    else:
        rounds = [_rounds_to(seed, protocol.target) for seed in seeds]
        known = [number for number in rounds if number is not None]
        line["value"], line["value_std"] = _over_seeds(known) if len(known) == len(rounds) else (None, None)
        line["reached"] = len(known)
    value: float | None = line["value"]
    line["difference"] = None if protocol.label or value is None or paper is None else value - paper
    line |= _ahead(protocol, column, row, rows, protocol.rule)
    for rule in ("max", "val", "last10"):  # which round counts may decide who is ahead
        if protocol.kind == "accuracy" and rule != protocol.rule:
            other = _ahead(protocol, column, row, rows, rule)
            line |= {key.replace("ahead", f"ahead_{rule}"): other[key] for key in ("ahead", "ahead_low", "ahead_high")}
    spreads = [spread(_accuracies(seed, protocol.rule), np.array(seed["samples"])) for seed in seeds]
    for key in SPREAD:
        line[f"clients_{key}"] = mean([numbers[key] for numbers in spreads])
    line["loss"] = mean([seed["loss"][-1] for seed in seeds])
    for key in measures.FULL:
        known = [seed.get("full", {}).get(key) for seed in seeds]
        line[key] = None if None in known else mean(known)
    line["area"] = mean([seed["system"]["area"] for seed in seeds])
    for key in ("bytes", "flops", "seconds"):
        line[key] = mean([seed["system"][key] for seed in seeds if seed["system"][key] is not None])
    return line


def _accuracies(scores: dict[str, Any], rule: str) -> np.ndarray:
    return np.array([np.nan if a is None else a for a in scores["rules"][rule]["clients"]])


def _headline(protocol: Protocol, scores: dict[str, Any], rule: str) -> float | None:
    accuracies = _accuracies(scores, rule)
    if np.isnan(accuracies).all():
        return None
    return 100 * spread(accuracies, np.array(scores["samples"]))[protocol.metric]


def _over_seeds(values: list[Any]) -> tuple[float | None, float | None]:
    """Return mean and deviation over seeds (of the sample; None for one seed)."""
    if not values or None in values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _rounds_to(scores: dict[str, Any], target: float) -> int | None:
    mean = np.array([np.nan if number is None else number for number in scores["mean"]])
    return measures.first_round(np.array(scores["rounds"]), mean, target / 100)


def _ahead(protocol: Protocol, column: str, row: str, rows: dict[str, Scores], rule: str) -> Line:
    """Compare the paper's own method with this row, over clients and seeds, with an interval."""
    none: Line = {"ahead": None, "ahead_low": None, "ahead_high": None, "ahead_seeds": 0}
    own, other = rows.get(protocol.own, {}), rows[row]
    both = [seed for seed in own if seed in other]
    if not both or row == protocol.own:
        return none
    each = [_accuracies(own[seed], rule) - _accuracies(other[seed], rule) for seed in both]
    if len({len(differences) for differences in each}) > 1 or np.isnan(each).all():
        return none
    differences = 100 * np.stack(each)
    crossed = protocol.columns[column].parts["data"].get("partition_seed") is not None
    low, high = interval(differences, crossed)
    return {"ahead": float(np.nanmean(differences)), "ahead_low": low, "ahead_high": high, "ahead_seeds": len(both)}


def agreement(table: list[Line], column: str) -> Line | None:
    """Compare the order of a column's rows with the paper's; None below three rows with both numbers."""
    pairs = [(line["paper"], line["value"]) for line in table if line["column"] == column]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) < 3:
        return None
    paper, own = np.array(pairs, dtype=float).T
    same, ordered = same_order(paper, own)
    ranked = {"spearman": spearman(paper, own), "kendall": kendall(paper, own)}
    return {"rows": len(pairs), **ranked, "pairs": ordered, "same": same}


def to_csv(table: list[Line]) -> str:
    """Write a table as CSV, a line for each column and row."""
    out = io.StringIO()
    write = csv.DictWriter(out, list(table[0]), restval="")
    write.writeheader()
    for line in table:
        write.writerow({key: "" if value is None else value for key, value in line.items()})
    return out.getvalue()


def from_csv(path: Path) -> list[Line]:
    """Read what `to_csv` wrote."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [{key: _read(key, text) for key, text in row.items()} for row in rows]
    except (OSError, ValueError, csv.Error) as error:
        raise Problem(f"'{path}' is not a table of results: {error}") from None


def _read(key: str, text: str) -> Any:
    if key == "plain":
        return text == "True"
    if key in TEXTS:
        return text
    return None if text == "" else float(text)
