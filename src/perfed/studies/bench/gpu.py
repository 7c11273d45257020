"""Cohorts on a GPU against the plain loop: `perfed bench gpu`.

Every speed stands beside that of a client-by-client PyTorch loop, or beside its own limit, measured in the same run.
Images are random bytes: what they show does not change how long they take. Only the accuracies of the last part, TF32
against full float32, need real ones.
"""

from __future__ import annotations

import dataclasses
import gc
import platform
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from perfed import __version__
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.rates import Rates
from perfed.data.config import DataConfig
from perfed.data.schemes.dirichlet import share
from perfed.engines.base import Job
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.apfl import APFL
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg
from perfed.methods.pfedme import PFedMe
from perfed.methods.pgfed import PGFed
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.studies import method_costs
from perfed.training import catalog
from perfed.training.provenance import commit

DEVICE = "cuda"
SHAPE, CLASSES = (3, 32, 32), 10
# network, clients, batch, times faster than the loop: at least, and hoped for
STEPS = (
    ("fedavgcnn", 25, 64, 30, 50),
    ("fedavgcnn", 25, 10, 90, 150),
    ("lenet", 50, 64, 90, 200),
    ("resnet", 25, 64, 20, 20),
)
# Methods of the survey whose clients train with a loop of their own, and what keeps their preparation short; those that
# are not there yet are left out.
FOLDS: dict[str, dict[str, Any]] = {
    "fedcl": {}, "fedcurv": {}, "feddf": {}, "fedgen": {}, "fedmd": {"public_epochs": 1, "private_epochs": 1},
    "jiang": {}, "aruba": {"momentum": 0.0}, "fedhome": {},
}  # fmt: skip
MOST = 1.3  # times FedAvg's, for each gradient


class PflCNN(nn.Module):
    """The network of pfl-research's CIFAR10 benchmark: 1,626,442 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.head = nn.Linear(64 * 14 * 14, 128), nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        return self.head(self.drop2(self.fc1(self.drop1(x).flatten(1)).relu()))


def network(name: str) -> Callable[[], nn.Module]:
    """Return the factory of a network of ours, or of that of pfl-research."""
    return PflCNN if name == "pfl" else make_network(ModelConfig(name=name), SHAPE, CLASSES)


def images(sizes: list[int], test: list[int]) -> Clients:
    """Make clients with random pictures."""
    draw = torch.Generator().manual_seed(0)

    def split(counts: list[int]) -> Split:
        x = torch.randint(0, 256, (sum(counts), *SHAPE), generator=draw, dtype=torch.uint8)
        return Split(x, torch.randint(0, CLASSES, (sum(counts),), generator=draw), tuple(counts))

    half = torch.full((3, 1, 1), 0.5)
    names = tuple(f"client_{id}" for id in range(len(sizes)))
    return Clients(names, split(sizes), split([0] * len(sizes)), split(test), CLASSES, half, half).to(DEVICE)


def milliseconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Return the median time of a call, device work included."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def flops(name: str) -> float:
    """Count the floating-point operations of a sample's forward and backward pass."""
    net = network(name)()
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(torch.randn(1, *SHAPE)), torch.zeros(1, dtype=torch.int64)).backward()
    return float(counter.get_total_flops())


def peak() -> float:
    """Measure the TFLOP/s of a large matrix product, in the precision that runs use."""
    a = torch.randn(8192, 8192, device=DEVICE)
    torch.mm(a, a)
    return 5 * 2 * 8192**3 / (milliseconds(lambda: [a @ a for _ in range(5)]) * 1e-3) / 1e12


def plain_loop(name: str, clients: int, batch: int) -> Callable[[], None]:
    """Return what everybody writes first: one step of every client, one after another."""
    build = network(name)
    nets = [build().to(DEVICE) for _ in range(clients)]
    optimisers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in nets]
    x = torch.randn(clients, batch, *SHAPE, device=DEVICE)
    y = torch.randint(0, CLASSES, (clients, batch), device=DEVICE)

    def step() -> None:
        for client, (net, optimiser) in enumerate(zip(nets, optimisers, strict=True)):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(net(x[client]), y[client]).backward()
            optimiser.step()

    return step


def make(kind: type[Method], name: str, **settings: Any) -> Method:
    """Make a method on the GPU."""
    given = {"lr": 0.01, "momentum": 0.9, **settings}
    return kind(Model(network(name), device=DEVICE), **given)


def step_row(name: str, clients: int, batch: int, least: float, aim: float, top: float, repeats: int) -> dict[str, Any]:
    """Measure the mean time of a step over a round of many, against the loop's."""
    steps = 256  # a round's other work is spread over so many
    torch.backends.cudnn.benchmark = True  # the loop may choose its kernels
    loop = plain_loop(name, clients, batch)
    loop()
    plain = milliseconds(lambda: [loop() for _ in range(3)], repeats) / 3
    torch.backends.cudnn.benchmark = False
    began = time.perf_counter()
    method = make(FedAvg, name, batch_size=batch, epochs=16)
    engine = Vectorised(Job(method, images([steps * batch // 16] * clients, [4] * clients)), fast=True)
    federation = Federation(engine)
    federation.step()
    torch.cuda.synchronize()
    ready = time.perf_counter() - began
    ours = milliseconds(federation.step, repeats) / steps
    rate = clients * batch / (ours * 1e-3)
    return {
        "network": name, "clients": clients, "batch": batch, "plain_ms": plain, "perfed_ms": ours,
        "times_faster": plain / ours, "least": least, "aim": aim, "reached": plain / ours >= least,
        "samples_per_s": rate, "tflops": rate * flops(name) / 1e12, "share_of_peak": rate * flops(name) / 1e12 / top,
        "first_round_s": ready, "tuning_s": engine.tuning_seconds,
    }  # fmt: skip


def method_rows(repeats: int, clients: int = 25, batch: int = 10) -> list[dict[str, Any]]:
    """Measure a round of personalised methods: its time over that of FedAvg, against gradients taken."""
    data = images([160] * clients, [4] * clients)
    rows: list[dict[str, Any]] = []
    inner = epochs = 5
    kinds: list[tuple[type[Method], dict[str, Any], float]] = [
        (FedAvg, {}, 1), (Ditto, {}, 2), (APFL, {}, 2 + 1 / epochs),  # once a round, an exact gradient for its alpha
        (PFedMe, {"momentum": 0.0, "inner_steps": inner}, inner),
    ]  # fmt: skip
    for kind, settings, gradients in kinds:
        method = make(kind, "fedavgcnn", batch_size=batch, epochs=epochs, **settings)
        federation = Federation(Vectorised(Job(method, data), fast=True))
        federation.step()
        ms = milliseconds(federation.step, repeats)
        ratio = ms / (rows[0]["round_ms"] if rows else ms)
        rows.append({
            "method": kind.__name__, "round_ms": ms, "times_fedavg": ratio, "gradients": gradients,
            "per_gradient": ratio / gradients, "most": 1.2, "reached": ratio / gradients <= 1.2,
        })  # fmt: skip
    return rows


def gradients(name: str, settings: dict[str, Any], samples: int, public: int) -> float:
    """Count the gradients that a client of a method takes in a round, over those of FedAvg."""
    usual = {"epochs": settings["epochs"], "batch_size": settings["batch_size"]}
    (per_sample, _), _, (fixed, _) = method_costs.passes(name, tuple((usual | settings).items()))
    return float(per_sample + fixed * public / method_costs.PUBLIC / samples) / settings["epochs"]


def clients_part(federation: Federation) -> float:
    """Carry out a round, and return the milliseconds that its clients took."""
    spent = 0.0
    federation.begin()
    for request in federation.requests():
        torch.cuda.synchronize()
        began = time.perf_counter()
        (reply,) = federation.engine.exchange([request])
        torch.cuda.synchronize()
        spent += 1e3 * (time.perf_counter() - began)
        federation.receive(request, reply)
    federation.end()
    return spent


def fold_rows(repeats: int, name: str = "fedavgcnn", clients: int = 25, samples: int = 160) -> list[dict[str, Any]]:
    """Measure the clients' part of a round of the survey's methods: its time over that of FedAvg, for each gradient."""
    data = images([samples] * clients, [4] * clients)
    public = Split(data.train.x[:samples], data.train.y[:samples], (samples,))  # random pictures like all others
    data, rows = dataclasses.replace(data, public=public), list[dict[str, Any]]()
    for fold, changed in ({"fedavg": {}} | FOLDS).items():
        if fold not in catalog.names():
            continue
        settings = {"batch_size": 10, "epochs": 5, **changed}
        method, notices = make(catalog.find(fold).load(), name, **settings), []
        job = Job(method, data, rates=Rates(rounds=100))
        federation = Federation(Vectorised(job, fast=True, notice=notices.append))
        for _ in range(2):  # the first has what a client does once
            clients_part(federation)
        ms = statistics.median(clients_part(federation) for _ in range(repeats))
        ratio = ms / (rows[0]["round_ms"] if rows else ms)
        count = gradients(fold, settings, samples, samples)
        rows.append({
            "method": type(method).__name__, "round_ms": ms, "times_fedavg": ratio, "gradients": count,
            "per_gradient": ratio / count, "most": MOST, "reached": ratio / count <= MOST, "notices": notices,
        })  # fmt: skip
    return rows


def whole_run(
    name: str, method: Method, clients: Clients, cohort: int, rounds: int, every: int, limit: float, aim: float
) -> dict[str, Any]:
    """Measure a complete run, from data in the host's memory to every client's model there."""
    began = time.perf_counter()
    engine = Vectorised(Job(method, clients, cohort=cohort), fast=True)
    federation = Federation(engine)
    for round in range(1, rounds + 1):
        federation.step()
        if round % every == 0 and round < rounds:
            federation.evaluate()
    kept: dict[int, Tensor] = {}
    save = lambda id, models: kept.__setitem__(id, models["personal"].cpu())
    federation.evaluate(None if federation.shared() else save)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "run": name, "rounds": rounds, "seconds": seconds, "limit_s": limit, "aim_s": aim, "reached": seconds <= limit,
        "recording_s": engine.recording_seconds, "tuning_s": engine.tuning_seconds,
        "useful_slots": engine.useful, "models": len(kept),
    }  # fmt: skip


def pgfed_run(rounds: int = 300) -> dict[str, Any]:
    """Measure PGFed's CIFAR10 protocol: 100 clients, 25 per round, Dirichlet 0.3, 5 epochs, batch 10, 75 % to train."""
    config = DataConfig(clients=100, alpha=0.3, min_samples=40)
    dealt = share(np.full(CLASSES, 60_000 // CLASSES), config, np.random.default_rng(1))
    sizes: list[int] = dealt.counts.sum(axis=0).tolist()
    train = [3 * size // 4 for size in sizes]
    data = images(train, [size - part for size, part in zip(sizes, train, strict=True)])
    method = make(PGFed, "fedavgcnn", batch_size=10, epochs=5)
    return whole_run(
        "PGFed, CIFAR10, 100 clients", method, data, 25, rounds, 10, 75.0 * rounds / 300, 40.0 * rounds / 300
    )


def pfl_run(rounds: int = 1500, name: str = "pfl-research CIFAR10, first run") -> dict[str, Any]:
    """Measure pfl-research's CIFAR10 benchmark: 1,000 clients with 50 images, 50 per round, batch 10, one epoch."""
    data = images([50] * 1000, [10] * 1000)
    method = make(FedAvg, "pfl", batch_size=10, epochs=1, momentum=0.0, lr=0.1)
    return whole_run(name, method, data, 50, rounds, 10, 10.0 * rounds / 1500, 6.0 * rounds / 1500)


def pfl_again(rounds: int = 1500) -> dict[str, Any]:
    """Measure `pfl_run` with kernels that are timed and compiled, as they are from the second run on."""
    return pfl_run(rounds, "pfl-research CIFAR10, next run")


def measure(repeats: int = 3, quick: bool = False, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure steps, methods and complete runs.

    Args:
        repeats: how often each is measured.
        quick: shorten the complete runs to a tenth.
        say: is told what was measured, line by line.
    """
    if not torch.cuda.is_available():
        raise Problem("perfed bench gpu needs a CUDA GPU; perfed bench cpu measures the CPU engines")
    if find_spec("triton") is None:
        raise Problem("perfed bench gpu needs Triton, which comes with PyTorch's CUDA builds for Linux")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = True
    top = peak()
    measured: dict[str, Any] = {
        "benchmark": "gpu", "device": torch.cuda.get_device_name(), "torch": torch.__version__, "perfed": __version__,
        "python": platform.python_version(), "commit": commit(), "repeats": repeats, "quick": quick,
        "matrix_product_tflops": top, "steps": [], "methods": [], "folds": [], "runs": [],
    }  # fmt: skip
    for row in STEPS:
        measured["steps"].append(step_row(*row, top, repeats))
        _tidy()
        say(_in_words("steps", measured["steps"][-1]))
    for part, rows in (("methods", method_rows), ("folds", fold_rows)):
        measured[part] = rows(repeats)
        _tidy()
        for row in measured[part]:
            say(_in_words(part, row))
    shorter = 10 if quick else 1
    for run, rounds in ((pgfed_run, 300), (pfl_run, 1500), (pfl_again, 1500)):
        measured["runs"].append(run(rounds // shorter))
        _tidy()
        say(_in_words("runs", measured["runs"][-1]))
    return measured


def _tidy() -> None:
    gc.collect()
    torch.cuda.empty_cache()


SENTENCES = {
    "steps": "{network}, {clients} clients, batch {batch}: loop {plain_ms:.1f} ms, perfed {perfed_ms:.3f} ms, "
    "{times_faster:.1f} times faster (at least {least}: {verdict}); {samples_per_s:,.0f} samples/s, "
    "{tflops:.1f} TFLOP/s, {share_of_peak:.1%} of the peak",
    "methods": "{method}: a round {round_ms:.1f} ms, {times_fedavg:.2f} times FedAvg for {gradients:g} times the "
    "gradients: {per_gradient:.2f} (at most {most}: {verdict})",
    "folds": "{method}: the clients' part of a round {round_ms:.1f} ms, {times_fedavg:.2f} times FedAvg for "
    "{gradients:.3g} times the gradients: {per_gradient:.2f} (at most {most}: {verdict})",
    "runs": "{run}, {rounds} rounds: {seconds:.1f} s (at most {limit_s:.1f}: {verdict}), of it recording "
    "{recording_s:.1f} s with tuning {tuning_s:.1f} s; useful slots {useful_slots:.3f}",
}


def _in_words(part: str, row: dict[str, Any]) -> str:
    return SENTENCES[part].format(**row, verdict="reached" if row["reached"] else "NOT reached")


def report(measured: dict[str, Any]) -> list[str]:
    """Say for people what was measured."""
    peak = f"matrix products {measured['matrix_product_tflops']:.0f} TFLOP/s"
    lines = [_in_words(part, row) for part in SENTENCES for row in measured.get(part, ())]
    return [f"{measured['device']}, torch {measured['torch']}, {peak}", *lines]
