"""The tables of a comparison: accuracy and gain over all seeds, and what else can be said about its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfed.core.words import visible
from perfed.report.folder import up_to
from perfed.report.tables import SHOWN, TextTable, markdown, remarks, score, signed, size
from perfed.studies.compare import Comparison
from perfed.training.files import Folder
from perfed.training.results import Run

HEADINGS = ("", "mean", "weighted", "worst tenth", "gain over Local", "better", "worse", "p", "down", "up")
SCORES = 4  # of these columns say whose scores they are, and which
TITLES = {
    "train_loss": "training loss",
    "p10": "10th percentile",
    "worst10": "worst tenth",
    "macro_f1": "macro F1",
    "auc": "AUC",
}


def write_comparison(comparison: Comparison, runs: Sequence[Run], result: dict[str, Any]) -> None:
    """Write the table of a comparison, with what it is about."""
    config, seeds = comparison.config, ", ".join(map(str, comparison.seeds))
    headline = SHOWN[result["methods"][0]["headline"]]
    about = (
        f"{config.data.name}, {len(runs[0].about['clients'])} clients, {up_to(config.run)} rounds, seeds {seeds}. "
        f"Mean and deviation over seeds of the clients' mean test {headline}; gain, better, worse and p (Wilcoxon "
        "signed-rank) over all clients of all seeds, each against Local with the same client and seed."
    )
    text = f"# {visible(comparison.folder.name)}\n\n{about}\n\n" + markdown(headings(result), lines(result))
    text += "".join(f"\n{visible(line)}.\n" for line in remarks(result["methods"]))
    Folder(comparison.folder).write(comparison.report, text)


def headings(result: dict[str, Any]) -> tuple[str, ...]:
    """Return the headings of the table: other scores stand beside the headline where accuracy says little."""
    return (*HEADINGS[:SCORES], *(SHOWN[key] for key in result["methods"][0]["columns"]), *HEADINGS[SCORES:])


def on_terminal(result: dict[str, Any]) -> int:
    """Return how many of the first columns are shown on a terminal: bytes make room for scores."""
    return len(HEADINGS) + (len(columns) - 2 if (columns := result["methods"][0]["columns"]) else 0)


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the cells of the comparison's table, a line for each method."""
    rows = []
    for method in result["methods"]:
        several = result["seeds"] > 1  # a single seed has no deviation
        written = lambda number, several=several: (
            score(number["mean"]) + (f" ± {number['std']:.3f}" if several and number["mean"] is not None else "")
        )
        cells = [written(number) for key, number in method["spread"].items() if key != "std"]
        more = [score(method["scores"][key]["mean"]) for key in method["columns"]]
        gain = method["gain"]
        versus = ("-",) * 4
        if gain is not None:
            p = "n/a" if gain["p"] is None else f"{gain['p']:.3g}"
            versus = (signed(gain["mean"]), str(gain["better"]), str(gain["worse"]), p)
        title = method["title"] + " (diverged)" * ("diverged" in method)
        rows.append((title, *cells, *more, *versus, size(method["bytes"]["down"]), size(method["bytes"]["up"])))
    return rows


def measure_tables(methods: list[dict[str, Any]], target: float | None = None) -> list[TextTable]:
    """Return the tables of what `measures.of_runs` says: scores, what they took, and what it took to the target."""
    keys = ["mean", "pooled", "std", "p10", "worst10", "jain", "macro_f1", "auc", "loss"]
    keys += ["train_loss"] * any("train_loss" in method for method in methods)
    scores, costs = [], []
    for method in methods:
        title = method.get("title", method["method"])
        share = "-" if "gain" not in method else f"{100 * method['gain']['positive']:.0f} %"
        delta = "-" if "delta" not in method else signed(method["delta"])
        scores.append((title, *(score(method[key]) if key in method else "-" for key in keys), share, delta))
        arithmetic = "n/a" if method["flops"] is None else f"{method['flops']:.2e}"
        kept = [size(method[key]) for key in ("server_state", "client_state")]
        seconds = [f"{method[key]:,.1f} s" for key in ("seconds", "clock") if key in method]
        costs.append((title, score(method["area"]), size(method["bytes"]), arithmetic, *seconds, *kept))
    headings = ("", *(TITLES.get(key, key) for key in keys), "gain above 0", "delta")
    times = ("time", *["simulated time"] * any("clock" in method for method in methods))
    tables = [(headings, scores), (("", "area", "sent", "FLOPs", *times, "server keeps", "client keeps"), costs)]
    return tables if target is None else [*tables, _to_target(methods, target)]


def _to_target(methods: list[dict[str, Any]], target: float) -> TextTable:
    """Return what it took to a mean accuracy; the speed-up is over the last method to get there."""
    slowest = max((method["rounds_to_target"] or 0 for method in methods), default=0)
    rows, timed = [], any("clock" in method for method in methods)
    for method in methods:
        title = method.get("title", method["method"])
        rounds, epochs = method["rounds_to_target"], method["epochs_to_target"]
        if rounds is None:
            reached = f"in {method['reached']} of {method['seeds']} seeds" if method["reached"] else "not reached"
            rows.append((title, reached, "-", "-", "-", *["-"] * timed))
        else:
            passes = "n/a" if epochs is None else f"{epochs:.1f}"
            clock = [f"{method['clock_to_target']:,.1f} s"] if timed else []
            sent = size(method["bytes_to_target"])
            rows.append((title, f"{rounds:g}", f"{slowest / rounds:.1f}", passes, sent, *clock))
    return ("", f"rounds to {target:g}", "speed-up", "local epochs", "sent", *["simulated time"] * timed), rows
