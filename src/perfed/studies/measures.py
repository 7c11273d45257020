"""What can be said about a finished run: accuracy and how it is spread, convergence, bytes, arithmetic, memory.

Accuracies are shares, not percent. Where a client has no test samples its accuracy is NaN and it counts nowhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.errors import Problem
from perfed.core.tree import leaves
from perfed.federation.traffic import count_bytes
from perfed.training import catalog
from perfed.training.catalog import Entry
from perfed.training.config import Config
from perfed.training.results import Run


@dataclass(frozen=True)
class Curves:
    """Every client's scores in every evaluated round."""

    rounds: np.ndarray  # [R], ascending
    test: np.ndarray  # [R, N], accuracy
    val: np.ndarray  # [R, N]; NaN without validation samples
    loss: np.ndarray  # [R, N], on test samples
    samples: np.ndarray  # [N], test samples
    train_loss: np.ndarray | None = None  # [R, N], on training samples; NaN unless these were scored

    @property
    def mean(self) -> np.ndarray:
        """Mean test accuracy over clients, in every evaluated round."""
        return means(self.test)


def means(values: np.ndarray) -> np.ndarray:
    """The mean of each row without its NaN; NaN where there is nothing else."""
    known = ~np.isnan(values)
    return np.where(known, values, 0).sum(1) / np.where(known.any(1), known.sum(1), np.nan)


def curves(run: Run, method: str, model: str = "personal", until: int = 0) -> Curves:
    """The scores of one of a method's models, up to a round (0: all)."""
    place = {client["name"]: at for at, client in enumerate(run.about["clients"])}
    samples = np.array([client["test"] for client in run.about["clients"]])
    found: dict[int, np.ndarray] = {}
    folder = run.folder.method(method)
    log = folder.scores()
    for line in log:
        if until and line["round"] > until:
            break
        scores = line[model]
        one = found.setdefault(line["round"], np.full((4, len(place)), np.nan))
        wanted = (("test", "accuracy"), ("val", "accuracy"), ("test", "loss"), ("train", "loss"))
        picked = [scores.get(split, {}).get(key) for split, key in wanted]
        one[:, place[line["client"]]] = [np.nan if value is None else value for value in picked]
    if not found:
        early = f" up to round {until}" if log else ""
        why = f"the first are of round {log[0]['round']}" if log else "the run's log is missing or empty"
        raise Problem(f"'{folder.scores_log}' has no scores{early}: {why}")
    rounds = np.array(list(found))
    table = np.stack(list(found.values()))
    return Curves(rounds, table[:, 0], table[:, 1], table[:, 2], samples, table[:, 3])


def spread(accuracy: np.ndarray, samples: np.ndarray) -> dict[str, float]:
    """How one number per client is spread.

    >>> found = spread(np.array([0.5, 1.0]), np.array([30, 10]))
    >>> found["mean"], found["pooled"], found["std"], found["jain"]
    (0.75, 0.625, 0.25, 0.9)
    """
    known = ~np.isnan(accuracy)
    a, n = accuracy[known], samples[known]
    worst = np.sort(a)[: max(1, round(len(a) / 10))]
    squares = float((a**2).sum())
    return {
        "mean": float(a.mean()),
        "pooled": float((a * n).sum() / n.sum()),
        "std": float(a.std()),
        "variance": float(a.var()),
        "p10": float(np.percentile(a, 10)),
        "worst10": float(worst.mean()),
        "jain": float(a.sum() ** 2 / (len(a) * squares)) if squares else 1.0,  # all alike: fair, however bad
    }


def gain(accuracy: np.ndarray, baseline: np.ndarray) -> dict[str, float]:
    """Accuracy minus a baseline's, client by client: mean, deviation over clients, share above 0."""
    difference = (accuracy - baseline)[~np.isnan(accuracy - baseline)]
    above = np.round(difference, 6) > 0  # equal accuracies may differ in their last bit
    return {"mean": float(difference.mean()), "std": float(difference.std()), "positive": float(above.mean())}


def first_round(rounds: np.ndarray, mean: np.ndarray, target: float) -> int | None:
    """The first evaluated round with at least this mean accuracy."""
    reached = np.flatnonzero(mean >= target - 1e-9)
    return int(rounds[reached[0]]) if len(reached) else None


def area(rounds: np.ndarray, mean: np.ndarray) -> float:
    """Area under the accuracy curve over its length: the mean accuracy of a run's rounds.

    >>> area(np.array([1, 2, 4]), np.array([0.0, 1.0, 1.0]))
    0.8333333333333334
    """
    if len(rounds) == 1:
        return float(mean[0])
    return float(np.trapezoid(mean, rounds) / (rounds[-1] - rounds[0]))


def traffic(run: Run, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(rounds, bytes sent until then in both directions, between servers too)."""
    lines = run.folder.method(method).rounds()
    sent = [line["bytes"] for line in lines]
    total = [sum(v for k, v in b.items() if k != "extra") + sum(b.get("extra", {}).values()) for b in sent]
    return np.array([line["round"] for line in lines]), np.array(total)


def system(run: Run, method: str, curve: Curves, target: float | None = None) -> dict[str, Any]:
    """Bytes, rounds, arithmetic and time; with a target also what it took to get there.

    Local epochs to the target are passes with a gradient over a participant's training samples, as many as the method
    makes: pFedMB's round of E epochs has 2 E.
    """
    rounds, sent = traffic(run, method)
    out: dict[str, Any] = {"rounds": int(rounds[-1]), "bytes": int(sent[-1]), "flops": flops(run, method)}
    out["seconds"] = round(run.seconds(method), 3)
    out["area"] = area(curve.rounds, curve.mean)
    if target is not None:
        reached = first_round(curve.rounds, curve.mean, target)
        out["rounds_to_target"] = reached
        out["bytes_to_target"] = None if reached is None else int(sent[rounds <= reached][-1])
        each = None if reached is None else epochs(run, method)
        out["epochs_to_target"] = None if each is None or reached is None else each * reached
    return out


def summary(run: Run, method: str, target: float | None = None) -> dict[str, Any]:
    """Everything about one method of a run, its last round or the one whose models are saved."""
    curve, others = curves(run, method), [m for m in run.result(method)["clients"][0] if m != "personal"]
    saved = run.result(method).get("saved_round", curve.rounds[-1])
    at = int(np.flatnonzero(curve.rounds == saved)[0])
    out: dict[str, Any] = {"method": method, **spread(curve.test[at], curve.samples)}
    out["loss"] = float(means(curve.loss)[at])
    if curve.train_loss is not None and not np.isnan(curve.train_loss[at]).all():
        out["train_loss"] = float(means(curve.train_loss)[at])
    out |= full_scores(run, method)
    if "local" in run.entries and method != "local":
        out["gain"] = gain(curve.test[at], run.accuracies("local"))
    start = next((m for m in ("before", "global") if m in others), None)
    if start:  # what personalisation added
        out["delta"] = gain(curve.test[at], run.accuracies(method, start))["mean"]
    return {**out, **system(run, method, curve, target), **memory(run.config, run.entries[method], run.about)}


FULL = ("macro_f1", "auc")


def full_scores(run: Run, method: str, model: str = "personal") -> dict[str, float]:
    """Mean macro-F1 and mean AUC over the clients, last round; empty for a run without them (`run.scores`)."""
    found = {key: run.scores(method, key, model) for key in FULL}
    return {key: float(np.nanmean(each)) for key, each in found.items() if not np.isnan(each).all()}


# ------------------------------------------------------------------ memory and arithmetic


def memory(config: Config, entry: Entry, about: dict[str, Any]) -> dict[str, int]:
    """Bytes that stay from round to round: all that the server holds, and the private state of one client.

    Counters are not counted. States keep their shapes, so this is their peak; what a round needs while it is computed
    is the engine's affair.
    """
    from perfed.models import make_network
    from perfed.training.prepare import make_method

    count, network = len(about["clients"]), make_network(config.model, tuple(about["shape"]), about["classes"])
    made = make_method(config, entry, network, count)
    tensors = lambda state: [leaf for leaf in leaves(state) if not isinstance(leaf, int | float)]
    size = lambda state: count_bytes(tensors(state), made.model.width, made.model.size)
    return {"server_state": size(made.init_server(count)), "client_state": size(made.init_client())}


def epochs(run: Run, method: str) -> float | None:
    """Gradient passes over a participant's training samples in one round, in the mean; None with stragglers."""
    took, counts = _work(run, method)
    return None if counts is None or not took[:, 0].sum() else float(counts[0] / took[:, 0].sum())


def flops(run: Run, method: str) -> int | None:
    """Floating-point operations of all local training (evaluations not counted), as this implementation computes it.

    Per sample: forward and backward pass of the network, counted by torch from its layers. Samples: those of every
    participant in every round, with the extra passes that the method makes, counted by `passes`. None where there were
    stragglers, who did a part of that.
    """
    _, counts = _work(run, method)
    if counts is None:
        return None
    forward, backward = network_flops(run.path)
    return int(counts[0] * (forward + backward) + counts[1] * forward)


def _work(run: Run, method: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(training and validation samples of all participations [m, 2], sample passes [with a gradient, without])."""
    sizes = {client["name"]: (client["train"], client["val"]) for client in run.about["clients"]}
    took = [sizes[name] for line in run.folder.method(method).rounds() for name in line["cohort"]]
    took = np.array(took).reshape(-1, 2)  # perhaps nobody ever answered
    if run.config.run.stragglers:  # they did a part of it
        return took, None
    entry = run.entries[method]
    settings = tuple(sorted(run.config.settings(entry).items()))
    per_train, per_val, fixed = passes(str(entry.file), settings)
    return took, took[:, 0].sum() * per_train + took[:, 1].sum() * per_val + len(took) * fixed


@functools.lru_cache(maxsize=64)
def network_flops(folder: Path) -> tuple[int, int]:
    """(forward, backward) of one sample through a run's network."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    run = Run(folder)
    network, sample = run.network().train(), torch.rand(2, *run.about["shape"])  # two: BatchNorm needs them
    found = []
    with FlopCounterMode(display=False) as both:
        loss = network(sample).sum()
        found.append(both.get_total_flops())
        loss.backward()
    return found[0] // 2, (both.get_total_flops() - found[0]) // 2


@functools.lru_cache(maxsize=256)
def passes(method: str, settings: tuple[tuple[str, Any], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample passes of one client's round: per training sample, per validation sample, and regardless of both.

    Each is [passes with a gradient, forward passes alone]. Counted in one round of tiny clients; the number is a linear
    function of a client's sizes, so three sizes tell all of it. Rounds of a warm-up are not looked at, nor is what runs
    outside `Model` (FedAlign's narrow pass).
    """
    entry = catalog.find(method)
    kept = dict(settings) | ({"warmup": 0} if "warmup" in entry.fields else {})
    batch = int(kept.get("batch_size", 10))
    small, more, val = (_count(entry, kept, *sizes) for sizes in ((batch, 4), (2 * batch, 4), (batch, 8)))
    per_train, per_val = (more - small) / batch, (val - small) / 4
    return per_train, per_val, small - batch * per_train - 4 * per_val


def _count(entry: Entry, settings: dict[str, Any], train: int, val: int) -> np.ndarray:
    import torch

    from perfed.core.clients import Clients, Split
    from perfed.engines.base import Job
    from perfed.engines.local import Sequential
    from perfed.federation.federation import Federation
    from perfed.report.methods import CLASSES, FEATURES, network

    many = 1 + int(settings.get("downloads", 1) or 1)  # others whose models a client may ask for

    def split(size: int) -> Split:
        return Split(torch.ones(many * size, FEATURES), torch.arange(many * size) % CLASSES, (size,) * many)

    counted = _counting()(network)
    plain = {key: value for key, value in settings.items() if key in entry.fields}
    parts = {"personal": "head", "module": ""}  # names of the run's own network mean nothing here
    plain |= {key: usual for key, usual in parts.items() if key in plain and plain[key] not in ("head", "body", "norm")}
    plain["lr"] = min(plain.get("lr", 0.01), 0.01)
    method, names = entry.load()(counted, **plain, cohort=many), tuple(map(str, range(many)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    try:
        Federation(Sequential(Job(method, Clients(names, split(train), split(val), split(4), CLASSES)))).step()
    finally:
        torch.set_num_threads(threads)
    return np.maximum(counted.seen, 0) / many


def _counting() -> Any:
    import torch
    from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim

    from perfed.core.model import Model

    class Counting(Model):
        """A model that counts the samples it is given, with a gradient and without."""

        def __init__(self, build: Any):
            self.seen, self.silent = np.zeros(2), False
            super().__init__(build)

        def _see(self, kind: int, theta: torch.Tensor, x: torch.Tensor) -> None:
            times = 1
            if is_batchedtensor(theta):  # a stack of models at once
                times = get_unwrapped(theta).shape[maybe_get_bdim(theta)]
            self.seen[kind] += times * len(x)

        def grad(self, theta: Any, batch: Any, loss: Any = None, train: bool = True) -> Any:
            self._see(0, theta, batch.x)
            if loss is not None:  # its own pass belongs to the gradient; any further ones come on top
                self.seen[1] -= len(batch.x)
            self.silent = loss is None
            found = super().grad(theta, batch, loss, train)
            self.silent = False
            return found

        def apply(self, theta: Any, x: Any, *rest: Any, **options: Any) -> Any:
            if not self.silent:
                self._see(1, theta, x)
            return super().apply(theta, x, *rest, **options)

    return Counting


Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, and lines


def as_tables(found: list[dict[str, Any]], target: float | None = None) -> list[Cells]:
    """Headings and cells of the tables of summaries: scores, what they took, and what it took to get to a target."""
    from perfed.report.tables import score, signed, size

    keys = ["mean", "pooled", "std", "p10", "worst10", "jain", "macro_f1", "auc", "loss"]
    keys += ["train_loss"] * any("train_loss" in one for one in found)
    words = {
        "train_loss": "training loss",
        "p10": "10th percentile",
        "worst10": "worst tenth",
        "macro_f1": "macro F1",
        "auc": "AUC",
    }
    scores, cost = [], []
    for one in found:
        title = one.get("title", one["method"])
        share = "-" if "gain" not in one else f"{100 * one['gain']['positive']:.0f} %"
        delta = "-" if "delta" not in one else signed(one["delta"])
        scores.append((title, *(score(one[key]) if key in one else "-" for key in keys), share, delta))
        arithmetic = "n/a" if one["flops"] is None else f"{one['flops']:.2e}"
        kept = [size(one[key]) for key in ("server_state", "client_state")]
        cost.append((title, score(one["area"]), size(one["bytes"]), arithmetic, f"{one['seconds']:.1f} s", *kept))
    heads = ("", *(words.get(key, key) for key in keys), "gain above 0", "delta")
    tables = [(heads, scores), (("", "area", "sent", "FLOPs", "time", "server keeps", "client keeps"), cost)]
    return tables if target is None else [*tables, _to_target(found, target)]


def _to_target(found: list[dict[str, Any]], target: float) -> Cells:
    """Rounds, local epochs and bytes until a mean accuracy, and over one's own the rounds of who got there last."""
    from perfed.report.tables import size

    slowest = max((one["rounds_to_target"] or 0 for one in found), default=0)
    rows = []
    for one in found:
        title, rounds, passes = one.get("title", one["method"]), one["rounds_to_target"], one["epochs_to_target"]
        if rounds is None:
            said = f"in {one['reached']} of {one['seeds']} seeds" if one["reached"] else "not reached"
            rows.append((title, said, "-", "-", "-"))
        else:
            took = "n/a" if passes is None else f"{passes:.1f}"
            rows.append((title, f"{rounds:g}", f"{slowest / rounds:.1f}", took, size(one["bytes_to_target"])))
    return ("", f"rounds to {target:g}", "speed-up", "local epochs", "sent"), rows


def average(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several seeds' summaries, number by number."""
    out: dict[str, Any] = {}
    for key, value in found[0].items():
        values = [one[key] for one in found]
        if isinstance(value, dict):
            out[key] = average(values)
        elif isinstance(value, int | float) and None not in values:
            out[key] = float(np.mean(values))
        else:
            out[key] = value if value is not None and all(v == value for v in values) else None
    return out


def of_runs(runs: list[Run], target: float | None = None) -> list[dict[str, Any]]:
    """One summary per method, mean over runs that differ in their seed alone."""
    every = [[{"title": e.title, **summary(run, name, target)} for name, e in run.entries.items()] for run in runs]
    reached = lambda some: sum(one["rounds_to_target"] is not None for one in some)
    count = lambda some: {} if target is None else {"reached": reached(some), "seeds": len(some)}
    return [average(list(one)) | count(one) for one in zip(*every, strict=True)]
