"""The picture of a run: its score over rounds (and simulated time), its spread over clients, and gains over Local."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfed.core.words import visible
from perfed.training.prepare import BASELINE
from perfed.training.results import Run

COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#bcbd22")
STYLES = ("-", "--", ":")
Looks = dict[str, dict[str, Any]]  # method -> colour and style of its lines


def line_style(index: int) -> dict[str, Any]:
    """Return how a line is drawn; all colours come before the next style."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def drawn(text: str) -> str:
    """Return text from outside as matplotlib shows it letter by letter: dollars are no formula."""
    return visible(text).replace("$", r"\$")


def picture(run: Run) -> bytes:
    """Draw a run's panels as a PNG: accuracy over rounds, and over simulated time where there is such; its spread;
    gains, where Local was trained beside another method.
    """
    others = [name for name in run.entries if name != BASELINE]
    gains = BASELINE in run.entries and bool(others)
    timed = all(run.clock(name) for name in run.entries)
    columns, panels = (9, 3 + timed) if gains else (7, 2 + timed)
    size = (5 * panels, 4.2 + 0.25 * (len(run.entries) // columns))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels))
    looks = {name: line_style(index) for index, name in enumerate(run.entries)}
    for name, entry in run.entries.items():
        rounds, scores = run.curve(name)
        style = {"label": drawn(entry.title), "marker": "o" if len(rounds) < 3 else None, **looks[name]}
        for panel, place in zip(axes, (rounds, run.clock(name))[: 1 + timed], strict=False):
            panel.plot(place, scores, **style)
    score = run.metric.replace("_", " ")
    for panel, place in zip(axes, ("round", "simulated seconds")[: 1 + timed], strict=False):
        panel.set(xlabel=place, ylabel=f"mean test {score} over clients", title=score.capitalize())
    _spread(axes[1 + timed], run, looks)
    if gains:
        _gains(axes[2 + timed], run, others, looks)
    for panel in axes:
        panel.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _spread(axes: Axes, run: Run, looks: Looks) -> None:
    """Draw a histogram of the clients' scores for each method, as an outline."""
    scores = {name: run.scores(name, run.metric) for name in run.entries}
    known = {name: each[np.isfinite(each)] for name, each in scores.items()}
    together = np.concatenate(list(known.values()))
    shares = run.metric == "accuracy"
    lowest, highest = (together.min(initial=0.9), 1.0) if shares else (0.0, together.max(initial=0.0) or 1.0)
    edges = np.linspace(lowest, highest, 11)
    for name, each in known.items():
        axes.stairs(np.histogram(each, edges)[0], edges, linewidth=1.5, **looks[name])
    score = run.metric.replace("_", " ")
    axes.set(xlabel=f"test {score}", ylabel="clients", title=f"Clients by {score}")


def _gains(axes: Axes, run: Run, others: list[str], looks: Looks) -> None:
    """Draw a curve for each method: clients sorted by gain, so that the share above 0 can be read off."""
    sign, score = run.task.sign(run.metric), run.metric.replace("_", " ")
    difference = f"test {score} minus Local's" if sign > 0 else f"Local's test {score} minus the method's"
    for name in others:
        gain = sign * (run.scores(name, run.metric) - run.scores(BASELINE, run.metric))
        gain = np.sort(gain[~np.isnan(gain)])
        share = (np.arange(len(gain)) + 0.5) / max(len(gain), 1)
        axes.plot(share, gain, marker=".", drawstyle="steps-mid", **looks[name])
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="share of clients, sorted", ylabel=difference, title="Gain over Local, per client")
