"""PGFed, Figure 2: a few exact gradient steps from FedAvg's model, on a client's own risk and on everybody's.

    perfed table pgfed-1 --column c10-100 --methods fedavg --seeds 1 --data-dir DIR
    python bench/pgfed_fig2.py runs/tables/pgfed-1/c10-100/fedavg/seed_0
    python bench/pgfed_fig2.py --quick           # trains FedAvg on digits first; seconds on two cores

Every client starts from the global model and takes S steps along the full gradient of

    implicit    f_i
    explicit    f_i + mu / (N - 1) * (sum of f_j over j != i)          (Eq. 4 of the paper)

where f_j is the mean loss over client j's training samples. No federated method takes the second kind of step: each
needs the gradients of all clients at one client's model. The paper does not print lr and mu: here they are chosen for
each objective by the mean validation accuracy after the last step, and all that was tried is in the CSV. A step of one
client on everybody's risk is a pass over all training samples, so its settings are tried on some clients (`--on`).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed import __version__
from perfed.accel.fast_model import FastModel
from perfed.core.clients import Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.report.picture import COLOURS
from perfed.report.table_figures import save
from perfed.studies.machine import Machine
from perfed.studies.papers import protocol
from perfed.studies.papers.carry_out import run_cells
from perfed.studies.papers.cells import Cell
from perfed.training import files
from perfed.training.folder import RunFolder
from perfed.training.prepare import Experiment, check_same, prepare
from perfed.training.provenance import commit, hardware

METHOD = "fedavg"
PAPER = {"implicit": 5.40, "explicit": 7.73}  # points of mean gain after six steps, CIFAR10, 100 clients
LABEL = {"implicit": "own risk alone", "explicit": "own and others' risks"}
AT_ONCE = 4096  # samples in one pass


def main(words: list[str]) -> None:
    """Run the command."""
    numbers = lambda text: [float(word) for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of a finished run of FedAvg")
    parser.add_argument("--quick", action="store_true", help="train one on digits and use that; labelled REDUCED")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=numbers, default=[1.0, 0.3, 0.1, 0.03], help="values to try: 0.3,0.1")
    parser.add_argument("--mu", type=numbers, default=[1.0, 0.3, 0.1], help="values to try, of the explicit objective")
    parser.add_argument(
        "--on", type=int, default=20, help="how many clients try the settings of the explicit objective"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"))
    asked = parser.parse_args(words)
    if asked.quick == (asked.run is not None):
        raise Problem("name the folder of a finished run of FedAvg, or say --quick")
    if asked.on < 1:
        raise Problem(f"--on must be at least 1, not {asked.on}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = train_reduced(Path(temporary) / "run") if asked.quick else asked.run
        experiment, start = opened(folder, asked.device)
        tried = list(study(experiment, start, asked.steps, asked.lr, asked.mu, asked.on))
    told = " ".join("RUN" if word == str(asked.run) else word for word in words)
    about = {"command": "python bench/pgfed_fig2.py " + re.sub(r" ?--(out|device)[ =]\S+", "", told).strip()}
    for path in write(asked.out, experiment, tried, about, asked.quick):
        sys.stdout.write(f"written  {path}\n")


def train_reduced(folder: Path) -> Path:
    """Train FedAvg as in the reduced version of Table 1."""
    table = protocol.reduced(protocol.find("pgfed-1"), [], quick=True)
    cell, config = Cell("", METHOD, 0, METHOD, folder), table.config("c10-25", METHOD, 0)
    run_cells([cell], [config], Console(quiet=True), Machine())
    return folder


def opened(folder: Path, device: str) -> tuple[Experiment, Tensor]:
    """Open a finished run: its clients and its network, and the model that FedAvg's server ended with."""
    run = RunFolder(folder)
    config, training = run.config(), run.method(METHOD)
    entries = {entry.name: entry for entry in config.entries()}
    if METHOD not in entries or not training.finished:
        raise Problem(f"'{folder}' has no finished {METHOD}")
    elsewhere = dataclasses.replace(config.run, device=device, engine="auto")
    experiment = prepare(dataclasses.replace(config, run=elsewhere))
    check_same(experiment, run, lambda text: sys.stderr.write(f"{text}\n"))
    if not len(experiment.clients.val.y):
        raise Problem("lr and mu are chosen on validation samples, and no client has one: set data.val above 0")
    return experiment, training.server().to(experiment.device)


def gradient(model: Model, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the sum of weight * loss; in eval mode, because a full gradient knows no batches."""
    total = torch.zeros_like(theta)
    for rows in torch.arange(len(y), device=y.device).split(AT_ONCE):
        leaf = theta.detach().requires_grad_()
        loss = cross_entropy(model.apply(leaf, x[rows])[0], y[rows], reduction="none")
        total += torch.autograd.grad((loss * weight[rows]).sum(), leaf)[0]
    return total * model.weights.mask


def weights(train: Split, client: int, mu: float) -> Tensor:
    """Return what samples count in a client's objective: 1 / n_i its own, mu / (N - 1) / n_j those of client j."""
    each = torch.full((len(train.size),), mu / max(len(train.size) - 1, 1), dtype=torch.float64, device=train.y.device)
    each[client] = 1.0
    sizes = train.sizes
    return (each / sizes.clamp(min=1)).repeat_interleave(sizes)


def accuracy(experiment: Experiment, model: Model, theta: Tensor, split: Split, client: int) -> float:
    """Return a client's accuracy on its own samples; NaN where it has none."""
    mine = slice(split.start[client], split.start[client] + split.size[client])
    x, y = experiment.clients.ready(split.x[mine], theta.dtype), split.y[mine]
    with torch.no_grad():
        return (model.apply(theta, x)[0].argmax(1) == y).double().mean().item()


def walk(
    experiment: Experiment, model: Model, start: Tensor, steps: int, lr: float, mu: float, who: Sequence[int]
) -> np.ndarray:
    """Score a model before the first step and after each: [validation or test, steps + 1, clients]."""
    clients, scores = experiment.clients, np.full((2, steps + 1, len(experiment.clients)), np.nan)
    x = clients.ready(clients.train.x, start.dtype)
    for client in who:
        weight, theta = weights(clients.train, client, mu), start
        used = weight.nonzero()[:, 0]
        mine = x[used], clients.train.y[used], weight[used].to(start.dtype)
        for step in range(steps + 1):
            if step:
                theta = theta - lr * gradient(model, theta, *mine)
            for which, split in enumerate((clients.val, clients.test)):
                scores[which, step, client] = accuracy(experiment, model, theta, split, client)
    return scores


def study(
    experiment: Experiment, start: Tensor, steps: int, rates: list[float], mus: list[float], on: int
) -> Iterator[dict[str, Any]]:
    """Try all settings of both objectives; for the `chosen` ones of each every client takes its steps.

    They have the best mean validation accuracy after the last step; of equals the first.
    """
    (entry,) = [entry for entry in experiment.config.entries() if entry.name == METHOD]
    model, everybody = FastModel.of(experiment.method(entry).model), range(len(experiment.clients))
    able = [client for client in everybody if experiment.clients.val.size[client]]
    few = [able[int(place)] for place in np.linspace(0, len(able) - 1, min(on, len(able)))]

    def walked(objective: str, lr: float, mu: float, who: Sequence[int]) -> dict[str, Any]:
        val, test = walk(experiment, model, start, steps, lr, mu, who)
        trial = {"objective": objective, "lr": lr, "mu": mu, "on": len(who), "chosen": False}
        trial |= {"val": val, "test": test, "gain": 100 * (test - test[0])}
        sys.stdout.write(
            f"{objective}  lr {lr:g}  mu {mu:g}  {len(who)} clients  validation {100 * np.nanmean(val[-1]):.2f}  "
            f"test {100 * np.nanmean(test[-1]):.2f}  gain {np.nanmean(trial['gain'][-1]):+.2f}\n"
        )
        return trial

    for objective in LABEL:
        own = objective == "implicit"
        settings = [(lr, 0.0) for lr in rates] if own else list(itertools.product(rates, mus))
        tried = [walked(objective, lr, mu, everybody if own else few) for lr, mu in settings]
        best = max(tried, key=lambda trial: np.nanmean(trial["val"][-1]))
        if best["on"] < len(everybody):
            best = walked(objective, best["lr"], best["mu"], everybody)
            tried.append(best)
        best["chosen"] = True
        yield from tried


def write(out: Path, experiment: Experiment, tried: list[dict[str, Any]], about: dict[str, str], quick: bool) -> Any:
    """Write all steps as CSV, what was chosen as JSON, and the figure."""
    out.mkdir(parents=True, exist_ok=True)
    base = out / ("pgfed-fig2-reduced" if quick else "pgfed-fig2")
    picked = {trial["objective"]: trial for trial in tried if trial["chosen"]}
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["objective", "lr", "mu", "clients", "chosen", "step", "validation", "test", "gain"])
    for trial in tried:
        settings = [trial[key] for key in ("objective", "lr", "mu", "on", "chosen")]
        for step, gain in enumerate(trial["gain"]):
            numbers = [100 * np.nanmean(trial[split][step]) for split in ("val", "test")]
            rows.writerow([*settings, step, *(f"{number:.4f}" for number in (*numbers, np.nanmean(gain)))])
    files.write(base.with_suffix(".csv"), text.getvalue())
    config, clients = experiment.config, experiment.clients
    about |= {"data": config.data.name, "clients": len(clients), "rounds": config.run.rounds, "seed": config.run.seed}
    about |= {"label": "REDUCED" if quick else "", "version": __version__, "commit": commit()}
    about |= {"device": hardware(experiment.device), "torch": torch.__version__}
    plain = lambda values: [None if np.isnan(v) else round(float(v), 4) for v in values]
    tried_on = {trial["objective"]: trial["on"] for trial in reversed(tried)}
    about["objectives"] = [
        {"objective": name, "lr": trial["lr"], "mu": trial["mu"], "tried_on": tried_on[name], "paper": PAPER[name]}
        | {"gain": round(float(np.nanmean(trial["gain"][-1])), 4), "gains": plain(trial["gain"][-1])}
        for name, trial in picked.items()
    ]
    files.write_json(base.with_suffix(".json"), about)
    head = f"PGFed, Figure 2: {config.data.name}, {len(clients)} clients, from FedAvg after {config.run.rounds} rounds"
    figure = draw(picked, ("REDUCED: " if quick else "") + head)
    return [base.with_suffix(".csv"), base.with_suffix(".json"), save(figure, base.with_suffix(".png"))]


def draw(picked: dict[str, dict[str, Any]], head: str) -> Figure:
    """Draw mean accuracy after every step, and how many clients gained how much."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    figure.suptitle(head, fontsize=10)
    left, right = figure.subplots(1, 2)
    gains = [trial["gain"][-1][~np.isnan(trial["gain"][-1])] for trial in picked.values()]
    edges = np.histogram_bin_edges(np.concatenate(gains), bins=20)
    for colour, (name, trial), gain in zip(COLOURS[1:], picked.items(), gains, strict=False):
        settings = f"lr {trial['lr']:g}" + (f", mu {trial['mu']:g}" if trial["mu"] else "")
        mean = 100 * np.nanmean(trial["test"], axis=1)
        left.plot(mean, marker="o", color=colour, label=f"{name}: {LABEL[name]} ({settings})")
        right.axvline(gain.mean(), color=colour, linestyle="--")
    labels = [f"{name}: mean {gain.mean():+.2f}" for name, gain in zip(picked, gains, strict=True)]
    right.hist(gains, edges, color=COLOURS[1 : 1 + len(gains)], label=labels)
    left.set(xlabel="gradient step", ylabel="mean test accuracy of own models (%)", xticks=range(len(mean)))
    right.set(xlabel="gain of a client over the global model (points)", ylabel="clients")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Problem as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(2)
