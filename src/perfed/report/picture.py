"""The picture of a run: accuracy over rounds, how it is spread over clients, and every client's gain over Local."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfed.training.prepare import BASELINE
from perfed.training.results import Run

COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#bcbd22")

STYLES = ("-", "--", ":")


def picture(run: Run) -> bytes:
    """A PNG with three panels; the last only where Local was trained beside another method."""
    others = [name for name in run.entries if name != BASELINE]
    gains = BASELINE in run.entries and bool(others)
    columns, panels = (9, 3) if gains else (7, 2)
    size = (5 * panels, 4.2 + 0.25 * (len(run.entries) // columns))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    colour = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(run.entries)}
    style = {name: STYLES[at // len(COLOURS) % len(STYLES)] for at, name in enumerate(run.entries)}
    for name, entry in run.entries.items():
        rounds, accuracy = run.curve(name)
        few = "o" if len(rounds) < 3 else None
        axes[0].plot(rounds, accuracy, label=entry.title, color=colour[name], linestyle=style[name], marker=few)
    axes[0].set(xlabel="round", ylabel="mean test accuracy over clients", title="Accuracy")
    _spread(axes[1], run, colour, style)
    if gains:
        _gains(axes[2], run, others, colour, style)
    for one in axes:
        one.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _spread(axes, run: Run, colour: dict[str, str], style: dict[str, str]) -> None:
    """A histogram of the clients' accuracies for each method, as an outline."""
    found = {name: run.accuracies(name) for name in run.entries}
    known = {name: each[~np.isnan(each)] for name, each in found.items()}
    lowest = np.concatenate(list(known.values())).min(initial=0.9)
    edges = np.linspace(lowest, 1, 11)
    for name, each in known.items():
        axes.stairs(np.histogram(each, edges)[0], edges, color=colour[name], linestyle=style[name], linewidth=1.5)
    axes.set(xlabel="test accuracy", ylabel="clients", title="Clients by accuracy")


def _gains(axes, run: Run, others: list[str], colour: dict[str, str], style: dict[str, str]) -> None:
    """One curve per method: clients sorted by gain, so the share above 0 can be read off."""
    for name in others:
        gain = run.accuracies(name) - run.accuracies(BASELINE)
        gain = np.sort(gain[~np.isnan(gain)])
        share = (np.arange(len(gain)) + 0.5) / max(len(gain), 1)
        axes.plot(share, gain, color=colour[name], linestyle=style[name], marker=".", drawstyle="steps-mid")
    axes.axhline(0, color="black", linewidth=1)
    axes.set(
        xlabel="share of clients, sorted", ylabel="test accuracy minus Local's", title="Gain over Local, per client"
    )
