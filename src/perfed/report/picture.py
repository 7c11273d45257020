"""The picture of a run: accuracy over rounds, and every client's gain over Local."""

from __future__ import annotations

import io

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfed.experiment import BASELINE
from perfed.results import Run

COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#bcbd22")

STYLES = ("-", "--", ":")


def picture(run: Run) -> bytes:
    """A PNG with two panels; the second only where Local was trained beside another method."""
    others = [name for name in run.entries if name != BASELINE]
    gains = BASELINE in run.entries and bool(others)
    columns = 7 if gains else 4
    figure = Figure(figsize=(11 if gains else 6, 4.2 + 0.25 * (len(run.entries) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if gains else 1, squeeze=False)[0]
    colour = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(run.entries)}
    for name, entry in run.entries.items():
        rounds, accuracy = run.curve(name)
        style = STYLES[list(run.entries).index(name) // len(COLOURS) % len(STYLES)]
        few = "o" if len(rounds) < 3 else None
        axes[0].plot(rounds, accuracy, label=entry.title, color=colour[name], linestyle=style, marker=few)
    axes[0].set(xlabel="round", ylabel="mean test accuracy over clients", title="Accuracy")
    axes[0].grid(alpha=0.3)
    if gains:
        _gains(axes[1], run, others, colour)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


def _gains(axes, run: Run, others: list[str], colour: dict[str, str]) -> None:
    """One curve per method: clients sorted by gain, so the share above 0 can be read off."""
    for name in others:
        gain = run.accuracies(name) - run.accuracies(BASELINE)
        gain = np.sort(gain[~np.isnan(gain)])
        share = (np.arange(len(gain)) + 0.5) / max(len(gain), 1)
        style = STYLES[list(run.entries).index(name) // len(COLOURS) % len(STYLES)]
        axes.plot(share, gain, color=colour[name], linestyle=style, marker=".", drawstyle="steps-mid")
    axes.axhline(0, color="black", linewidth=1)
    axes.set(
        xlabel="share of clients, sorted", ylabel="test accuracy minus Local's", title="Gain over Local, per client"
    )
    axes.grid(alpha=0.3)
