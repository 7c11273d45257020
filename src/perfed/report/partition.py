"""How a data set was shared out: a table for the terminal, a picture, and label counts as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from perfed.core.clients import SPLITS, Clients
from perfed.core.words import visible
from perfed.data.config import DataConfig
from perfed.data.strata import strata_of, stratum_counts, stratum_names
from perfed.report.picture import drawn
from perfed.report.tables import TextTable, safe_cell

STEPS = "▁▂▃▄▅▆▇█"
WIDEST = 50  # characters of a client's bar: more classes than that are joined
FEW_CLIENTS, FEW_CLASSES = 60, 24  # with more of either, bubbles would touch: a heat map instead
MOST_ROWS, MOST_LABELS = 20, 8  # of the table of labels that a run begins with
INK, MUTED = "#1c2b36", "#6b7a86"
PARTS = {"train": "#1f6f8b", "val": "#7fb6c4", "test": "#f2a65a"}
SHADES = LinearSegmentedColormap.from_list("share", ("#b9dde0", "#1f6f8b", "#101f3c"))
GROUPS = ("#8e6bbf", "#e2b53e", "#4c9f70", "#d1495b", "#3d6cb9", "#b0803c", "#7a8b99", "#c970a8")


def heading(clients: Clients, data: DataConfig) -> str:
    """Say what was shared out, and how."""
    about = _about(clients)
    plain = lambda v: str(v).lower() if isinstance(v, bool) else f"{v:g}"
    settings = [f"{key.replace('_', ' ')} {plain(value)}" for key, value in about["settings"].items()]
    skews = [f"rotate {data.rotate}"] if "rotate" in about["skews"] else []
    skews += [f"noise up to {data.noise:g}"] if "noise" in about["skews"] else []
    if "relabel" in about["skews"]:
        who = f"in {data.relabel_groups} groups" if data.relabel_groups else "client by client"
        skews.append(f"{data.relabel:.0%} relabelled by {data.relabel_by} {who}")
    note = [about["note"]] if "note" in about else []
    note += [f"by {known.rule}"] if (known := strata_of(clients)) and len(known.names) > 1 else []
    whole = [f"{data.name}, {len(clients)} clients, {about['scheme']}", *settings, *skews, *note]
    return ", ".join([*whole, "official test set"] if data.split == "official" else whole)


def summary(clients: Clients) -> list[str]:
    """Say how uneven the clients are, in words."""
    measures, counts = _about(clients)["measures"], stratum_counts(clients, "train")
    most_frequent = (counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)).mean()
    labels = (
        "mean EMD {emd:.3f}, total variation {total_variation:.3f}, 1-Wasserstein between clients {wasserstein:.3f}"
    )
    known = strata_of(clients)
    what = known.what if known else "label"
    sizes = "{smallest} to {largest} (max/min {max_over_min:.1f}), Gini {gini:.3f}"
    return [
        f"{what + 's':<9}" + labels.format(**measures),
        f"         mean share of a client's most frequent {what} {100 * most_frequent:.1f} %",
        "sizes    " + sizes.format(**measures),
        *_public(clients),
    ][2 * (counts.shape[1] == 1) :]


def _public(clients: Clients) -> list[str]:
    """Say how many public samples there are, where there are some."""
    public = clients.public
    return (
        [] if public is None else [f"public   {len(public.y):,} samples with{'' if public.labelled else 'out'} labels"]
    )


def bar(counts: np.ndarray) -> str:
    """Draw a client's labels as a line of little bars, with a dot where it has none.

    >>> bar(np.array([0, 1, 8, 4]))
    '·▁█▄'
    """
    if len(counts) > WIDEST:
        counts = np.array([piece.sum() for piece in np.array_split(counts, WIDEST)])
    top = max(int(counts.max()), 1)
    return "".join(STEPS[-(-int(n) * len(STEPS) // top) - 1] if n else "·" for n in counts)


def lines(clients: Clients) -> TextTable:
    """Return the table of who got what."""
    about, train = _about(clients), stratum_counts(clients, "train")
    skews, measures = about["skews"], about["measures"]
    extra: dict[str, list[str]] = {}
    if "rotate" in skews:
        extra["turned"] = [f"{degrees}°" for degrees in skews["rotate"]]
    if "noise" in skews:
        extra["noise"] = [f"{level:.3f}" for level in skews["noise"]]
    if "relabel" in skews:
        extra["relabel group"] = [str(group) for group in skews["relabel"]["groups"]]
    rows = []
    for id, name in enumerate(clients.names):
        sizes = [str(clients.split(split).size[id]) for split in SPLITS]
        tail = [values[id] for values in extra.values()]
        mix = (str(measures["classes"][id]), bar(train[id]), f"{measures['emd_per_client'][id]:.3f}")
        rows.append((name, *sizes, *(mix if train.shape[1] > 1 else ()), *tail))
    known = strata_of(clients)
    titles = (f"{known.what}s", f"training {known.what}s", "EMD") if known else ("classes", "training labels", "EMD")
    return ("client", *SPLITS, *(titles if train.shape[1] > 1 else ()), *extra), rows


def label_table(clients: Clients) -> TextTable:
    """Return which client has how many samples of which label, in all splits together; what is too much is joined."""
    counts, kinds = stratum_counts(clients, *SPLITS), stratum_names(clients)
    names = kinds[:MOST_LABELS]
    rows = [(name, *row) for name, row in zip(clients.names[:MOST_ROWS], counts.tolist(), strict=False)]
    if len(clients) > MOST_ROWS:
        rows.append((f"{len(clients) - MOST_ROWS} more", *counts[MOST_ROWS:].sum(axis=0).tolist()))
    rows.append(("all", *counts.sum(axis=0).tolist()))
    shown = []
    for name, *numbers in rows:
        others = [str(sum(numbers[MOST_LABELS:]))] if len(numbers) > MOST_LABELS else []
        shown.append((name, *(str(number or "-") for number in numbers[:MOST_LABELS]), *others))
    others = [f"{len(kinds) - MOST_LABELS} others"] if len(kinds) > MOST_LABELS else []
    known = strata_of(clients)
    return (f"samples by {known.rule}" if known else "samples with label", *names, *others), shown


def as_dict(clients: Clients) -> dict[str, Any]:
    """Return everything in plain values."""
    tables = {split: stratum_counts(clients, split) for split in SPLITS}
    listed = [
        {"name": name, "labels": {split: counts[id].tolist() for split, counts in tables.items()}}
        for id, name in enumerate(clients.names)
    ]
    public = clients.public
    shared = {} if public is None else {"public": {"samples": len(public.y), "labelled": public.labelled}}
    return {"classes": stratum_names(clients), "clients": listed, **_about(clients), **shared}


def counts_csv(clients: Clients) -> str:
    """Write the samples of each label, a line for each client and part."""
    out = io.StringIO()
    write = csv.writer(out)
    write.writerow(["client", "part", *(safe_cell(name) for name in stratum_names(clients))])
    tables = {split: stratum_counts(clients, split) for split in SPLITS}
    for id, name in enumerate(clients.names):
        for split, counts in tables.items():
            write.writerow([safe_cell(name), split, *counts[id].tolist()])
    return out.getvalue()


def pictures(clients: Clients, data: DataConfig) -> dict[str, bytes]:
    """Draw the partition as PNG and SVG: sizes above, labels below, a column for each client."""
    figure = _draw(clients, data)
    out = {}
    with mpl.rc_context({"svg.hashsalt": "perfed", "svg.fonttype": "none"}):
        for kind in ("png", "svg"):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            out[kind] = file.getvalue()
    return out


def _draw(clients: Clients, data: DataConfig) -> Figure:
    about, train = _about(clients), stratum_counts(clients, "train")
    strips = _strips(about["skews"], about.get("domains"))
    n, classes = train.shape
    width = float(np.clip(2.6 + 0.34 * n, 6.5, 15))
    tall = float(np.clip(0.34 * classes, 2.4, 8))
    heights = [1.5, tall, 0.9, *[0.22] * len(strips)]
    figure = Figure(figsize=(width, sum(heights) + 1.6 + 0.3 * len(strips)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    _sizes(axes[0], clients)
    known = strata_of(clients)
    _mixes(figure, axes[1], train, stratum_names(clients), known.rule if known else "label")
    _distances(axes[2], about["measures"])
    for axis, (title, groups, names) in zip(axes[3:], strips, strict=True):
        _strip(axis, title, groups, names)
    for axis in axes:
        axis.tick_params(colors=INK, length=0, labelsize=8)
        axis.spines[:].set_visible(False)
        axis.set_xlim(-0.7, n - 0.3)
    _names(axes[-1], clients.names)
    figure.suptitle(drawn(heading(clients, data)), fontsize=11, color=INK, wrap=True)
    _settle(figure)
    return figure


def _settle(figure: Figure) -> None:
    """Round where the panels stand: the layout's last digits differ from time to time, and a file should not."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axis in figure.axes:
        left, bottom, width, height = axis.get_position().bounds
        axis.set_position((round(left, 4), round(bottom, 4), round(width, 4), round(height, 4)))


def _sizes(axis: Axes, clients: Clients) -> None:
    places, base = np.arange(len(clients)), np.zeros(len(clients))
    for split, colour in PARTS.items():
        size = np.array(clients.split(split).size)
        axis.bar(places, size, bottom=base, width=0.8, color=colour, label=split)
        base += size
    axis.set_ylabel("samples", color=INK, fontsize=9)
    axis.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    axis.legend(ncols=3, frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.98), borderaxespad=0)


def _mixes(figure: Figure, axis: Axes, train: np.ndarray, labels: list[str], rule: str) -> None:
    """Draw bubbles whose area is the number of samples, or a heat map where there are too many."""
    n, classes = train.shape
    share = train / np.maximum(train.sum(axis=1, keepdims=True), 1)
    shown = {"cmap": SHADES, "vmin": 0, "vmax": max(float(share.max()), 1e-9)}
    if n <= FEW_CLIENTS and classes <= FEW_CLASSES:
        client, label = np.nonzero(train)
        area = 360 * train[client, label] / train.max()  # in square points: the largest just fills its place
        drawn = axis.scatter(client, label, s=area + 3, c=share[client, label], linewidths=0, **shown)
        axis.set_ylim(classes - 0.4, -0.6)
        axis.grid(alpha=0.18)
        axis.set_axisbelow(True)
    else:
        empty = np.ma.masked_equal(share.T, 0)
        drawn = axis.imshow(empty, aspect="auto", interpolation="nearest", **shown)
    step = max(1, -(-classes // 25))
    axis.set_yticks(range(0, classes, step), [visible(label) for label in labels[::step]], parse_math=False)
    axis.set_ylabel(rule, color=INK, fontsize=9)
    side = figure.colorbar(drawn, ax=axis, pad=0.01, aspect=30, fraction=0.03)
    side.set_label("share of the client's training samples", fontsize=8, color=MUTED)
    side.ax.tick_params(labelsize=7, colors=MUTED)
    side.outline.set_visible(False)


def _distances(axis: Axes, measures: dict[str, Any]) -> None:
    axis.bar(range(len(measures["emd_per_client"])), measures["emd_per_client"], width=0.8, color=MUTED)
    axis.axhline(measures["emd"], color=INK, linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 2)
    axis.set_yticks([0, 1, 2])
    axis.set_ylabel("EMD", color=INK, fontsize=9)
    words = "mean EMD {emd:.2f}    Gini of sizes {gini:.2f}    max/min {max_over_min:.1f}".format(**measures)
    axis.set_title(words, fontsize=8, color=MUTED, loc="left", pad=3)


def _strips(skews: dict[str, Any], domains: list[str] | None) -> list[tuple[str, list[int], list[str]]]:
    """Return lines of coloured squares: title, colour number of each client, what each colour is called."""
    out = []
    if domains is not None:
        kinds = list(dict.fromkeys(domains))
        out.append(("domain", [kinds.index(domain) for domain in domains], kinds))
    if "rotate" in skews:
        angles = sorted(set(skews["rotate"]))
        out.append(("turned", [angles.index(a) for a in skews["rotate"]], [f"{a}°" for a in angles]))
    if "relabel" in skews:
        groups = skews["relabel"]["groups"]
        out.append(("relabel", groups, [f"group {g}" for g in range(len(skews["relabel"]["maps"]))]))
    return out


def _strip(axis: Axes, title: str, groups: list[int], names: list[str]) -> None:
    for number, name in enumerate(names):
        places = [place for place, group in enumerate(groups) if group == number]
        axis.bar(places, [1] * len(places), width=0.8, color=GROUPS[number % len(GROUPS)], label=drawn(name))
    axis.set_yticks([])
    axis.set_ylabel(title, color=INK, fontsize=9, rotation=0, ha="right", va="center")
    axis.legend(
        ncols=len(names), frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.9), borderaxespad=0
    )


def _names(axis: Axes, names: tuple[str, ...]) -> None:
    step = max(1, -(-len(names) // 40))
    short = [visible(name).removeprefix("client_") for name in names]
    short = [name if len(name) <= 14 else f"{name[:13]}…" for name in short]
    long = max(map(len, short)) > 3
    axis.set_xticks(range(0, len(names), step), short[::step], rotation=90 if long else 0, parse_math=False)
    axis.set_xlabel("client", color=INK, fontsize=9)


def _about(clients: Clients) -> dict[str, Any]:
    if clients.partition is None:
        raise ValueError("these clients were not made by perfed.data.load")
    return clients.partition
