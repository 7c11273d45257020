"""Figures of the papers from run folders: PNG, and the same as SVG beside it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from perfed.methods.pgfed import PGFed
from perfed.report.picture import COLOURS, drawn, line_style
from perfed.studies.papers.cells import cells_of, find_cell
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.rank_agreement import correlation
from perfed.studies.papers.result import seed_scores
from perfed.studies.papers.watch import mixtures
from perfed.training import files

Curve = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, mean over seeds, deviation over seeds
SHOWN = 6.0  # points below the median seed that Figure 5 shows; what lies deeper is written


def draw(protocol: Protocol, out: Path) -> list[Path]:
    """Draw all figures of a table that its finished cells allow.

    Args:
        protocol: the table.
        out: the folder of all tables' runs, where figures go, too.

    Returns:
        The PNG files.
    """
    makers: dict[str, Callable[..., Figure | None]] = {"rounds": over_rounds, "bytes": over_bytes, "matrix": matrix}
    makers |= {"branches": branches, "alpha": alpha}
    written = []
    for kind in protocol.figures:
        for column in protocol.columns:
            figure = makers[kind](protocol, out, column)
            if figure is not None:
                written.append(save(figure, out / f"{protocol.cells}-{kind}-{column}.png"))
    return written


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, and as an SVG with the same bytes every time."""
    FigureCanvasAgg(figure)
    for kind in ("png", "svg"):
        content = io.BytesIO()
        with rc_context({"svg.hashsalt": "perfed"}):
            meta: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 130}
            figure.savefig(content, format=kind, **meta)
        files.write(path.with_suffix(f".{kind}"), content.getvalue())
    return path


def _new(
    protocol: Protocol, column: str, width: float = 7.5, height: float = 5.0, panels: int = 1
) -> tuple[Figure, Any]:
    figure = Figure(
        figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12)
    )  # the labels of images need room
    axes = figure.subplots(1, panels, squeeze=False)[0]
    head = f"{protocol.title.partition(':')[0]}: {protocol.columns[column].title}"
    figure.suptitle(drawn(head), fontsize=10)
    return figure, axes


def _curves(protocol: Protocol, out: Path, column: str, score: str, along: str) -> dict[str, Curve]:
    """Return every row's curve: a score along the rounds, or along the bytes sent."""
    curves = {}
    for row in protocol.rows:
        seeds = list(seed_scores(protocol, out, column, row).values())
        if not seeds:
            continue
        length = min(len(seed["rounds"]) for seed in seeds)  # as far as every seed goes: run.patience may stop one
        table = np.array([[np.nan if v is None else v for v in seed[score][:length]] for seed in seeds])
        x = np.mean([seed[along][:length] for seed in seeds], axis=0)
        if along == "rounds":
            x = (
                x / protocol.rows[protocol.rows[row].runs].times
            )  # a row that takes more rounds is drawn on the column's scale
        curves[row] = (x, table.mean(0), table.std(0))
    return curves


def _plot(protocol: Protocol, axes: Any, curves: dict[str, Curve]) -> None:
    rows = list(protocol.rows)  # a row has one colour in all figures
    for row, (x, mean, std) in curves.items():
        index = rows.index(row)
        look = line_style(index) | {"linewidth": 2.4 if row == protocol.own else 1.4}
        if protocol.rows[row].plain:  # often under another curve: dashes let it through
            look |= {"linestyle": (0, (3, 2 + index % 3)), "linewidth": 2.0}
        axes.plot(x, mean, label=drawn(protocol.rows[row].title), **look)
        axes.fill_between(x, mean - std, mean + std, color=look["color"], alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(figure: Figure, axes: Any, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def over_rounds(protocol: Protocol, out: Path, column: str) -> Figure | None:
    """Draw mean accuracy and loss over rounds, mean and deviation over seeds."""
    accuracy = _curves(protocol, out, column, protocol.metric, "rounds")
    if not accuracy:
        return None
    figure, (left, right) = _new(protocol, column, 11, 5, 2)
    loss = _curves(protocol, out, column, "loss", "rounds")
    _plot(protocol, left, accuracy)
    _plot(protocol, right, loss)
    # Rows differ by points: a start near chance, or a run that blows up, would leave one line of all of them.
    left.set_ylim(bottom=0.95 * min(np.median(mean) for _, mean, _ in accuracy.values()))
    along = "epoch of the clients that joined" if protocol.columns[column].first else "round"
    left.set(xlabel=along, ylabel=f"{protocol.metric} test accuracy")
    right.set(xlabel=along, ylabel="mean test loss", yscale="log")
    ends = [f(mean) for f in (np.nanmin, np.median) for _, mean, _ in loss.values()]
    right.set_ylim(0.8 * min(ends), 2 * max(ends))
    _legend(figure, left, 4)
    return figure


def over_bytes(protocol: Protocol, out: Path, column: str) -> Figure | None:
    """Draw mean accuracy over bytes sent; what sends nothing is a level line."""
    every = _curves(protocol, out, column, protocol.metric, "sent")
    sending = {row: curve for row, curve in every.items() if curve[0][-1] > 0}
    if not sending:
        return None
    figure, (axes,) = _new(protocol, column)
    _plot(protocol, axes, sending)
    for row in every.keys() - sending.keys():
        axes.axhline(
            every[row][1][-1], color="black", linestyle=":", label=drawn(f"{protocol.rows[row].title}, nothing sent")
        )
    axes.set(xlabel="bytes sent, both directions", ylabel=f"{protocol.metric} test accuracy", xscale="log")
    _legend(figure, axes)
    return figure


def branches(protocol: Protocol, out: Path, column: str) -> Figure | None:
    """Draw accuracy against the number of branches (pFedMB, Figure 5)."""
    x, mean, dots = [], [], []
    for name, row in protocol.rows.items():
        seeds = seed_scores(protocol, out, column, name).values()
        each = [scores["rules"][protocol.rule]["clients"] for scores in seeds]
        values = [100 * np.nanmean(np.array(clients, dtype=float)) for clients in each]
        if values:
            x.append(row.settings["branches"])
            mean.append(np.mean(values))
            dots += [(x[-1], value) for value in values]
    if not x:
        return None
    figure, (axes,) = _new(protocol, column, 6, 4)
    axes.plot(x, mean, marker="o", color=COLOURS[2], label="mean")
    axes.scatter(*zip(*dots, strict=True), marker="x", color="black", zorder=3, label="one seed")
    axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="branches B", ylabel="mean test accuracy (%)", xticks=x)
    axes.grid(alpha=0.3)
    floor = np.median([value for _, value in dots]) - SHOWN
    if min(value for _, value in dots) < floor:  # they would press the others into a line
        axes.set_ylim(bottom=floor)
    for B, middle in zip(x, mean, strict=True):
        below = ", ".join(f"{value:.1f}" for b, value in dots if b == B and value < floor)
        text = f"below: {below}" + (f"\nmean: {middle:.1f}" if middle < floor else "")
        side = "right" if (x[0] + x[-1]) / 2 < B else "left"
        if below:
            axes.annotate(text, (B, floor), (0, 3), textcoords="offset points", fontsize=8, ha=side)
    return figure


def correlations(change: np.ndarray, train: np.ndarray) -> tuple[float | None, float | None]:
    """Correlate a matrix's column means, and its row means, with the clients' sizes."""
    return correlation(change.mean(0), train), correlation(change.mean(1), train)


def colours_end(change: np.ndarray) -> float:
    """Return where the colours of a matrix end: few large entries would make all others white.

    >>> colours_end(np.array([0.0] * 50 + [-2.0] * 50 + [900.0]))
    2.0
    """
    size = np.abs(change)
    return float(np.quantile(size, 0.99)) or float(size.max()) or 1.0


def matrix(protocol: Protocol, out: Path, column: str) -> Figure | None:
    """Draw the change of PGFed's matrix A from its start, and how it goes with clients' sizes (PGFed, Figure 3)."""
    if protocol.own not in protocol.rows:
        return None
    cell = find_cell(protocol, out, column, protocol.own, 0)
    if not (cell.done and cell.training.server_file.is_file()):  # of a kept run, the scores may be all there is
        return None
    change = PGFed.change(cell.training.server())
    if change is None:
        return None
    change = change.numpy()
    train = np.array([client["train"] for client in cell.run.clients()["clients"]])
    order = np.argsort(train)
    change, train = change[np.ix_(order, order)], train[order]
    of_columns, of_rows = ("n/a" if r is None else f"{r:+.2f}" for r in correlations(change, train))
    figure, axes = _new(protocol, column, 13, 4.4, 3)
    limit, largest = colours_end(change), np.abs(change).max()
    shown = axes[0].imshow(change, cmap="RdBu_r", vmin=-limit, vmax=limit)
    figure.colorbar(shown, ax=axes[0], shrink=0.85, extend="both" if limit < largest else "neither")
    axes[0].set(xlabel="client j, smallest first", ylabel="client i, smallest first", xticks=[], yticks=[])
    axes[0].set_title("change of alpha_ij from its start, seed 0", fontsize=10)
    titles = (f"columns: use of client j (r = {of_columns})", f"rows: use by client i (r = {of_rows})")
    for axis, (panel, title) in enumerate(zip(axes[1:], titles, strict=True)):
        panel.scatter(train, change.mean(axis), s=14, color=COLOURS[2 - axis])
        panel.set(xlabel="training samples", ylabel="mean change")
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    return figure


def alpha(protocol: Protocol, out: Path, column: str) -> Figure | None:
    """Draw every client's weights of the branches over rounds (pFedMB, Figure 3), for the rows that were watched.

    One seed is drawn; the text beside it is about all of them, after their last rounds.
    """
    watched, first = {}, set()  # by row: rounds and weights [rounds, clients, branches] of each seed
    for row in protocol.rows:
        cells = cells_of(protocol, out, column, row)
        seeds = {cell.seed: pair for cell in cells if cell.done and (pair := mixtures(cell.folder))}
        if seeds:
            watched[row] = list(seeds.values())
            first.add(min(seeds))
    if not watched:
        return None
    clients = next(iter(watched.values()))[0][1].shape[1]
    seeds = " or ".join(map(str, sorted(first)))
    head = f"{protocol.columns[column].title}\nweights of the branches, seed {seeds}; one panel per client"
    figure = Figure(figsize=(1.35 * clients, 2.1 * len(watched) + 0.8), layout="constrained")
    figure.suptitle(drawn(head), fontsize=10)
    grid = figure.subplots(len(watched), clients, squeeze=False, sharex=True, sharey=True)
    for panels, (row, seeds) in zip(grid, watched.items(), strict=True):
        rounds, values = seeds[0]
        pairs, distinct = zip(*(clusters(weights[-1]) for _, weights in seeds), strict=True)
        for client, axes in enumerate(panels):
            for branch in range(values.shape[2]):
                axes.plot(rounds, values[:, client, branch], color=COLOURS[1 + branch % 9], linewidth=1.2)
            axes.set_title(str(client + 1), fontsize=8)
            axes.tick_params(labelsize=7)
        words = f"{np.mean(pairs):.0%} of pairs on one\nbranch; {', '.join(map(str, distinct))} in use"
        panels[0].set_ylabel(f"{protocol.rows[row].title}\n{words}", fontsize=8)
    figure.supxlabel("round", fontsize=8)
    return figure


def clusters(alpha: np.ndarray) -> tuple[float, int]:
    """Return the share of pairs of neighbours with the same largest weight, and how many branches are somebody's."""
    largest = alpha.argmax(1)
    return float((largest[0::2] == largest[1::2]).mean()), len(set(largest.tolist()))
