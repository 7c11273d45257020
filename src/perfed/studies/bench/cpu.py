"""A round on a CPU against the plain loop: `perfed bench cpu`.

The plain loop and perfed take turns; the medians count. CPU seconds are compared, which other programs on the machine
disturb little; wall time only for several workers, where it is the point.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfed import __version__, data
from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.data.config import DataConfig
from perfed.data.pool import data_dir
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.workers import Workers, cores
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.studies.bench.plain import Loop, Samples
from perfed.training.provenance import commit

WORKERS = 2


@dataclass(frozen=True)
class Workload:
    """FedAvg on Fashion-MNIST, Dirichlet 0.3, 20 clients, one epoch, with an evaluation on every client's test set."""

    name: str
    model: ModelConfig
    batch_size: int
    cpu_target: float  # CPU seconds of a round, as a share of the plain loop's
    wall_target: float | None = None  # wall time with two workers, as a share of the plain loop's
    lr: float = 0.05


WORKLOADS = (
    Workload("fedavgcnn, batch 64", ModelConfig(name="fedavgcnn"), 64, 0.70, 0.40),
    Workload("mlp 784-100-10, batch 10", ModelConfig(name="mlp", hidden=100), 10, 0.75),
)


def measure(repeats: int = 3, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure all workloads.

    Args:
        repeats: rounds to measure, after one that warms up.
        quick: a try-out on a few samples, whose ratios mean nothing.
        say: is told how far the measurement is.
    """
    torch.set_num_threads(1)
    clients, source = _clients(quick)
    load = os.getloadavg()[0]
    findings = [_compare(workload, clients, 1 if quick else repeats, say) for workload in WORKLOADS]
    return {
        "benchmark": "cpu",
        "data": source,
        "clients": len(clients),
        "training_samples": sum(clients.train.size),
        "test_samples": sum(clients.test.size),
        "repeats": 1 if quick else repeats,
        "quick": quick,
        "workers": WORKERS,
        "findings": findings,
        "machine": {"cpu": processor(), "cores": cores(), "platform": platform.platform()},
        "load": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},  # above 1, wall times are doubtful
        "python": platform.python_version(),
        "torch": torch.__version__,
        "perfed": __version__,
        "commit": commit(),
    }


def report(measured: dict[str, Any]) -> list[str]:
    """Say for people what was measured."""
    machine, data, load = measured["machine"], measured["data"], measured["load"]["before"]
    lines = [f"{data}, {measured['clients']} clients, {measured['training_samples']} training samples, one epoch"]
    lines += [f"{machine['cpu']}, {machine['cores']} cores, torch {measured['torch']}, median of {measured['repeats']}"]
    if load > 1:
        lines += [f"the machine was busy (load {load}): do not trust wall times"]
    for row in measured["findings"]:
        lines += [
            "",
            row["workload"],
            f"  plain loop   {row['plain_cpu_s']:8.2f} CPU s a round   accuracy {row['plain_accuracy']:.3f}",
            f"  perfed       {row['perfed_cpu_s']:8.2f} CPU s a round   accuracy {row['perfed_accuracy']:.3f}",
            f"  ratio        {row['cpu_ratio']:8.2f}   {_verdict(row['cpu_target'], row['cpu_reached'])}",
        ]
        if row["wall_ratio"] is not None:
            lines += [
                f"  {measured['workers']} workers    {row['workers_wall_s']:8.2f} s of wall time; "
                f"the plain loop {row['plain_wall_s']:.2f}; the workers' CPU s {row['workers_cpu_s']:.2f}",
                f"  ratio        {row['wall_ratio']:8.2f}   {_verdict(row['wall_target'], row['wall_reached'])}",
            ]
    return lines


def _verdict(target: float, reached: bool) -> str:
    return f"target {target:.2f}, {'reached' if reached else 'not reached'}"


def _clients(quick: bool) -> tuple[Clients, str]:
    config = DataConfig(name="fashion-mnist", partition="dirichlet", alpha=0.3, clients=20, test=0.25, val=0.0)
    if (data_dir(config) / "fashion_mnist.npz").is_file() and not quick:
        return data.load(config, seed=0), "fashion-mnist, dirichlet 0.3"
    # As many pictures of the same shape, of noise, in parts about as uneven as those of Dirichlet 0.3.
    draw = torch.Generator().manual_seed(0)
    scale = 20 if quick else 700

    def split(rows: list[int]) -> Split:
        x = torch.randint(0, 256, (sum(rows), 1, 28, 28), dtype=torch.uint8, generator=draw)
        return Split(x, torch.randint(0, 10, (sum(rows),), generator=draw), tuple(rows))

    share = [1 + id % 5 + 3 * (id % 4) for id in range(4 if quick else 20)]
    train, test = split([scale * s * 3 // 8 for s in share]), split([scale * s // 8 for s in share])
    none = Split(train.x[:0], train.y[:0], (0,) * len(share))
    names = tuple(f"client_{id:02}" for id in range(len(share)))
    mean = std = torch.full((1, 1, 1), 0.5)
    return Clients(names, train, none, test, 10, mean, std), "synthetic pictures of the same shape"


def _compare(workload: Workload, clients: Clients, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure a workload on both sides; returns medians over repetitions, per round.

    The workers' CPU seconds are of all workers together, mean of all rounds, without their parent's.
    """
    build = make_network(workload.model, clients.shape, clients.classes)
    samples = {name: _tensors(clients, name) for name in ("train", "test")}
    settings: dict[str, Any] = {"lr": workload.lr, "batch_size": workload.batch_size, "epochs": 1}
    plain = Loop(build, samples["train"], samples["test"], **settings)
    method = FedAvg(Model(build), **settings)
    ours = Federation(Sequential(Job(method, clients)))
    shared = Federation(Workers(Job(method, clients), workers=WORKERS)) if workload.wall_target else None
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "perfed": [], "workers": []}
    accuracy = {"plain": 0.0, "perfed": 0.0}
    children = _children()
    try:
        for number in range(repeats + 1):  # the first round warms up: kernels are chosen, workers started
            say(f"{workload.name}: round {number} of {repeats}")
            times["plain"].append(_timed(lambda: accuracy.update(plain=plain.round())))
            times["perfed"].append(_timed(lambda: accuracy.update(perfed=_round(ours))))
            if shared is not None:
                times["workers"].append(_timed(lambda: _round(shared)))
    finally:
        if shared is not None:
            shared.engine.close()
    cpu = {name: statistics.median(c for c, _ in taken[1:]) for name, taken in times.items() if taken}
    wall = {name: statistics.median(w for _, w in taken[1:]) for name, taken in times.items() if taken}
    ratio, target = cpu["perfed"] / cpu["plain"], workload.wall_target
    shares = dict.fromkeys(("workers_cpu_s", "workers_wall_s", "wall_ratio", "wall_target", "wall_reached"))
    if shared is not None and target is not None:
        wall_ratio = wall["workers"] / wall["plain"]
        shares |= {"workers_cpu_s": round((_children() - children) / (repeats + 1), 3)}
        shares |= {"workers_wall_s": round(wall["workers"], 3), "wall_ratio": round(wall_ratio, 3)}
        shares |= {"wall_target": target, "wall_reached": wall_ratio <= target}
    return {
        "workload": workload.name,
        "plain_cpu_s": round(cpu["plain"], 3),
        "perfed_cpu_s": round(cpu["perfed"], 3),
        "cpu_ratio": round(ratio, 3),
        "cpu_target": workload.cpu_target,
        "cpu_reached": ratio <= workload.cpu_target,
        "plain_wall_s": round(wall["plain"], 3),
        **shares,
        "plain_accuracy": round(accuracy["plain"], 4),
        "perfed_accuracy": round(accuracy["perfed"], 4),
    }


def _tensors(clients: Clients, name: str) -> Samples:
    """Return each client's samples as float tensors: the plain loop gets them ready-made, outside its time."""
    split = clients.split(name)
    x = clients.ready(split.x, torch.float32)
    return [(a.clone(), b.clone()) for a, b in zip(x.split(split.size), split.y.split(split.size), strict=True)]


def _round(federation: Federation) -> float:
    federation.step()
    return float(federation.evaluate()["personal"]["test"]["accuracy"].mean())


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the CPU seconds of this process that something takes, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def _children() -> float:
    """Return the CPU seconds of processes that this one has started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def processor() -> str:
    """Return the CPU's name, where the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
