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
from perfed.studies.papers.cells import cell, check_cells
from perfed.studies.papers.protocol import RULES, Protocol
from perfed.studies.papers.rank_agreement import interval, kendall, same_order, spearman
from perfed.studies.papers.scores import scores
from perfed.training import catalog
from perfed.training.folder import RunFolder
from perfed.training.provenance import together

LOCAL = "local"
Line = dict[str, Any]
TEXTS = ("table", "label", "column", "row", "title", "plain", "rule", "machine", "version", "commit", "data", "command")


def found(protocol: Protocol, out: Path, column: str, row: str) -> dict[int, dict[str, Any]]:
    """What each finished seed of a cell says."""
    one = protocol.rows[row]
    how, seeds = (one.model, protocol.columns[column].until * protocol.rows[one.runs].times), {}
    for seed in range(protocol.seeds):
        one = cell(protocol, out, column, row, seed)
        if one.done:
            seeds[seed] = scores(one, *how)
    return seeds


def lines(protocol: Protocol, out: Path, command: str = "") -> list[Line]:
    """One flat dict for every column and row; numbers are percent, None where there is none."""
    check_cells(protocol, out, ended=True)
    made = []
    for column in protocol.columns:
        seeds = {row: found(protocol, out, column, row) for row in protocol.rows}
        made += [
            _line(protocol, column, row, seeds, _diverged(protocol, out, column, row))
            | _memory(protocol, out, column, row, seeds[row])
            | {"command": command}
            for row in protocol.rows
            if not (protocol.kind == "gain" and row == LOCAL)
        ]
    return made


def _memory(protocol: Protocol, out: Path, column: str, row: str, seeds: Iterable[int]) -> Line:
    """What a row's server and one of its clients keep; the same in every seed."""
    for seed in seeds:
        one = cell(protocol, out, column, row, seed)
        config = protocol.config(column, protocol.rows[row].runs, seed)
        return dict(measures.memory(config, catalog.find(one.method), RunFolder(one.folder).clients()))
    return {"server_state": None, "client_state": None}


def _diverged(protocol: Protocol, out: Path, column: str, row: str) -> int:
    return sum(cell(protocol, out, column, row, seed).diverged for seed in range(protocol.seeds))


def _line(protocol: Protocol, column: str, row: str, seeds: dict[str, dict[int, Any]], diverged: int) -> Line:
    one, mine = protocol.rows[row], seeds[row]
    paper, std = protocol.number(row, column)
    line: Line = {"table": protocol.name, "label": protocol.label, "column": column, "row": row, "title": one.title}
    line |= {"plain": one.plain, "rule": protocol.rule, "seeds": len(mine), "diverged": diverged}
    line |= {"paper": paper, "paper_std": std}
    line |= {key: together(s.get(key, "") for s in mine.values()) for key in ("machine", "version", "commit", "data")}
    for rule in RULES:
        line[rule], line[f"{rule}_std"] = _over([_headline(protocol, s, rule) for s in mine.values()])
    local = seeds.get(LOCAL, {})
    both = [seed for seed in mine if seed in local]
    gains = [measures.gain(_clients(mine[s], protocol.rule), _clients(local[s], protocol.rule)) for s in both]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    line["gain"] = _percent(mean([g["mean"] for g in gains]))
    line["gain_std"] = _percent(mean([g["std"] for g in gains]))
    line["gain_positive"] = mean([g["positive"] for g in gains])
    if protocol.kind == "accuracy":
        line["value"], line["value_std"] = line[protocol.rule], line[f"{protocol.rule}_std"]
    elif protocol.kind == "gain":
        line["value"], line["value_std"], line["seeds"] = line["gain"], line["gain_std"], len(both)
    else:
        reached = [_reached(s, protocol.target) for s in mine.values()]
        known = [r for r in reached if r is not None]
        line["value"], line["value_std"] = _over(known) if len(known) == len(reached) else (None, None)
        line["reached"] = len(known)
    value: float | None = line["value"]
    line["difference"] = None if protocol.label or value is None or paper is None else value - paper
    line |= _ahead(protocol, column, row, seeds, protocol.rule)
    for rule in ("max", "val", "last10"):  # which round counts may decide who is ahead
        if protocol.kind == "accuracy" and rule != protocol.rule:
            other = _ahead(protocol, column, row, seeds, rule)
            line |= {key.replace("ahead", f"ahead_{rule}"): other[key] for key in ("ahead", "ahead_low", "ahead_high")}
    spreads = [measures.spread(_clients(s, protocol.rule), np.array(s["samples"])) for s in mine.values()]
    for key in ("std", "variance", "p10", "worst10", "jain", "pooled"):
        line[f"clients_{key}"] = mean([s[key] for s in spreads])
    line["loss"] = mean([s["loss"][-1] for s in mine.values()])
    for key in measures.FULL:
        known = [s.get("full", {}).get(key) for s in mine.values()]
        line[key] = None if None in known else mean(known)
    line["area"] = mean([s["system"]["area"] for s in mine.values()])
    for key in ("bytes", "flops", "seconds"):
        line[key] = mean([s["system"][key] for s in mine.values() if s["system"][key] is not None])
    return line


def _clients(score: dict[str, Any], rule: str) -> np.ndarray:
    return np.array([np.nan if a is None else a for a in score["rules"][rule]["clients"]])


def _headline(protocol: Protocol, score: dict[str, Any], rule: str) -> float | None:
    each = _clients(score, rule)
    if np.isnan(each).all():
        return None
    spread = measures.spread(each, np.array(score["samples"]))
    return 100 * spread["pooled" if protocol.metric == "pooled" else "mean"]


def _over(values: list[Any]) -> tuple[float | None, float | None]:
    """Mean and deviation over seeds (of the sample; None for one seed)."""
    if not values or None in values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _reached(score: dict[str, Any], target: float) -> int | None:
    mean = np.array([np.nan if m is None else m for m in score["mean"]])
    return measures.first_round(np.array(score["rounds"]), mean, target / 100)


def _ahead(protocol: Protocol, column: str, row: str, seeds: dict[str, dict[int, Any]], rule: str) -> Line:
    """The paper's own method minus this row, over clients and seeds, with an interval."""
    none: Line = {"ahead": None, "ahead_low": None, "ahead_high": None, "ahead_seeds": 0}
    own = seeds.get(protocol.own, {})
    both = [seed for seed in own if seed in seeds[row]]
    if not both or row == protocol.own:
        return none
    rows = [_clients(own[s], rule) - _clients(seeds[row][s], rule) for s in both]
    if len({len(one) for one in rows}) > 1 or np.isnan(rows).all():
        return none
    difference = 100 * np.stack(rows)
    crossed = protocol.columns[column].parts["data"].get("partition_seed") is not None
    low, high = interval(difference, crossed)
    mean = float(np.nanmean(difference))
    return {"ahead": mean, "ahead_low": low, "ahead_high": high, "ahead_seeds": len(both)}


def agreement(table: list[Line], column: str) -> Line | None:
    """How the order of the rows agrees with the paper's, in one column; None below three rows with both numbers."""
    both = [(line["paper"], line["value"]) for line in table if line["column"] == column]
    both = [pair for pair in both if None not in pair]
    if len(both) < 3:
        return None
    paper, own = np.array(both, dtype=float).T
    same, pairs = same_order(paper, own)
    ranked = {"spearman": spearman(paper, own), "kendall": kendall(paper, own)}
    return {"rows": len(both), **ranked, "pairs": pairs, "same": same}


def to_csv(table: list[Line]) -> str:
    """All of it, one line for each column and row."""
    out = io.StringIO()
    write = csv.DictWriter(out, list(table[0]), restval="")
    write.writeheader()
    for line in table:
        write.writerow({key: "" if value is None else value for key, value in line.items()})
    return out.getvalue()


def from_csv(path: Path) -> list[Line]:
    """What `to_csv` wrote."""
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
