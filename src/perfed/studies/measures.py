"""What can be said about a finished run: accuracy and how it is spread, convergence, bytes, arithmetic, memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfed.core.errors import Problem
from perfed.core.further import models_of
from perfed.core.tree import leaves
from perfed.engines.scores import PERSONAL
from perfed.federation.traffic import count_bytes
from perfed.models import make_networks
from perfed.studies.method_costs import passes
from perfed.training.catalog import Entry
from perfed.training.config import Config
from perfed.training.folder import task_of_run
from perfed.training.prepare import BASELINE, make_method
from perfed.training.results import Run
from perfed.training.statistics import gain_over, means, spread

FULL = ("macro_f1", "auc")  # made from all outputs at once, in the evaluations that `run.scores` names


@dataclass(frozen=True)
class Curves:
    """Every client's scores in every evaluated round."""

    rounds: np.ndarray  # [R], ascending
    test: np.ndarray  # [R, N], accuracy or another score
    val: np.ndarray  # [R, N]; NaN without validation samples
    loss: np.ndarray  # [R, N], on test samples
    samples: np.ndarray  # [N], test samples
    train_loss: np.ndarray | None = None  # [R, N], on training samples; NaN unless these were scored
    sign: int = 1  # -1 where less is better

    @property
    def mean(self) -> np.ndarray:
        """Mean test score over clients, in every evaluated round."""
        return means(self.test)


def curves(run: Run, method: str, model: str = PERSONAL, until: int = 0, metric: str = "") -> Curves:
    """Read the scores of a method's models.

    Args:
        run: a finished run.
        method: one of its methods.
        model: which of the method's models.
        until: the last round that counts; 0: all.
        metric: the score; empty: the first of the run's task, such as accuracy.
    """
    metric = metric or run.metric
    picked = (("test", metric), ("val", metric), ("test", "loss"), ("train", "loss"))
    column = {client["name"]: index for index, client in enumerate(run.about["clients"])}
    samples = np.array([client["test"] for client in run.about["clients"]])
    tables: dict[int, np.ndarray] = {}
    folder = run.folder.method(method)
    log = folder.scores()
    for line in log:
        if until and line["round"] > until:
            break
        scores = line[model]
        table = tables.setdefault(line["round"], np.full((len(picked), len(column)), np.nan))
        numbers = [scores.get(split, {}).get(name) for split, name in picked]
        table[:, column[line["client"]]] = [np.nan if number is None else number for number in numbers]
    if not tables:
        early = f" up to round {until}" if log else ""
        why = f"the first are of round {log[0]['round']}" if log else "the run's log is missing or empty"
        raise Problem(f"'{folder.scores_log}' has no scores{early}: {why}")
    test, val, loss, train_loss = np.stack(list(tables.values()), axis=1)
    return Curves(np.array(list(tables)), test, val, loss, samples, train_loss, run.task.sign(metric))


def first_round(rounds: np.ndarray, mean: np.ndarray, target: float, sign: int = 1) -> int | None:
    """Return the first evaluated round with at least this mean score; with at most this one where `sign` is -1."""
    size = 1.0 if sign > 0 else abs(target)  # an error is of any size
    reached = np.flatnonzero(sign * (mean - target) >= -1e-9 * size)
    return int(rounds[reached[0]]) if len(reached) else None


def area(rounds: np.ndarray, mean: np.ndarray) -> float:
    """Average the accuracy over a run's rounds: the area under its curve, over the curve's length.

    >>> area(np.array([1, 2, 4]), np.array([0.0, 1.0, 1.0]))
    0.8333333333333334
    """
    if len(rounds) == 1:
        return float(mean[0])
    return float(np.trapezoid(mean, rounds) / (rounds[-1] - rounds[0]))


def traffic(run: Run, method: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounds, and the bytes sent until each in both directions and between servers."""
    lines = run.folder.method(method).rounds()
    sent = [line["bytes"] for line in lines]
    total = [sum(n for way, n in b.items() if way != "extra") + sum(b.get("extra", {}).values()) for b in sent]
    return np.array([line["round"] for line in lines]), np.array(total)


def system(run: Run, method: str, curve: Curves, target: float | None = None) -> dict[str, Any]:
    """Describe what a method's training took, and what it took to a target.

    Args:
        run: a finished run.
        method: one of its methods.
        curve: the method's scores.
        target: a mean test score.

    Returns:
        Rounds, bytes, floating-point operations, seconds, simulated ones (`clock`) where time was simulated; `area`
        under the accuracy curve. With a target rounds, bytes, local epochs and simulated seconds to it. Local epochs
        are passes with a gradient over a participant's training samples, as many as the method makes: pFedMB's round of
        E epochs has 2 E.
    """
    rounds, sent = traffic(run, method)
    out: dict[str, Any] = {"rounds": int(rounds[-1]), "bytes": int(sent[-1]), "flops": flops(run, method)}
    out["seconds"] = round(run.seconds(method), 3)
    out["area"] = area(curve.rounds, curve.mean)
    clock = run.clock(method)
    if clock:
        out["clock"] = clock[-1]
    if target is not None:
        reached = first_round(curve.rounds, curve.mean, target, curve.sign)
        out["rounds_to_target"] = reached
        out["bytes_to_target"] = None if reached is None else int(sent[rounds <= reached][-1])
        each = None if reached is None else epochs(run, method)
        if clock:
            out["clock_to_target"] = None if reached is None else clock[list(curve.rounds).index(reached)]
        out["epochs_to_target"] = None if each is None or reached is None else each * reached
    return out


def summary(run: Run, method: str, target: float | None = None) -> dict[str, Any]:
    """Say everything about a method of a run, in its last round or in the round whose models are saved.

    Args:
        run: a finished run.
        method: one of its methods.
        target: a mean test score; also say what it took to it.

    Returns:
        The clients' accuracies (`spread`), losses, F1 and AUC, the gain over Local, what personalisation added
        (`delta`), and what all of it cost (`system`, `memory`).
    """
    curve, others = curves(run, method), [m for m in run.result(method)["clients"][0] if m != PERSONAL]
    saved = run.result(method).get("saved_round", curve.rounds[-1])
    index = int(np.flatnonzero(curve.rounds == saved)[0])
    score = curve.test[index]
    out: dict[str, Any] = {"method": method, **spread(score, curve.samples, curve.sign)}
    out["loss"] = float(means(curve.loss)[index])
    if curve.train_loss is not None and not np.isnan(curve.train_loss[index]).all():
        out["train_loss"] = float(means(curve.train_loss)[index])
    out |= full_scores(run, method)
    if BASELINE in run.entries and method != BASELINE:
        out["gain"] = gain_over(run.scores(BASELINE, run.metric), score, sign=curve.sign)
    start = next((model for model in ("before", "global") if model in others), None)
    if start:
        out["delta"] = gain_over(run.scores(method, run.metric, start), score, sign=curve.sign)["mean"]
    return {**out, **system(run, method, curve, target), **memory(run.config, run.entries[method], run.about)}


def full_scores(run: Run, method: str, model: str = PERSONAL) -> dict[str, float]:
    """Average macro-F1 and AUC over the clients, in the last round; empty for a run without them (`run.scores`)."""
    scores = {metric: run.scores(method, metric, model) for metric in FULL}
    return {metric: float(np.nanmean(each)) for metric, each in scores.items() if not np.isnan(each).all()}


def of_runs(runs: list[Run], target: float | None = None) -> list[dict[str, Any]]:
    """Summarise each method, averaged over runs that differ in their seed alone."""
    titled = lambda run: [{"title": entry.title, **summary(run, name, target)} for name, entry in run.entries.items()]
    reached = lambda seeds: sum(each["rounds_to_target"] is not None for each in seeds)
    count = lambda seeds: {} if target is None else {"reached": reached(seeds), "seeds": len(seeds)}
    return [_average(list(seeds)) | count(seeds) for seeds in zip(*map(titled, runs), strict=True)]


def _average(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Average several seeds' summaries, number by number."""
    out: dict[str, Any] = {}
    for key, first in summaries[0].items():
        values = [summary[key] for summary in summaries]
        if isinstance(first, dict):
            out[key] = _average(values)
        elif isinstance(first, int | float) and None not in values:
            out[key] = float(np.mean(values))
        else:
            out[key] = first if first is not None and all(value == first for value in values) else None
    return out


# ------------------------------------------------------------------ memory and arithmetic


def memory(config: Config, entry: Entry, about: dict[str, Any]) -> dict[str, int]:
    """Count the bytes that stay from round to round: all that the server holds, and the private state of a client.

    Counters are not counted. States keep their shapes, so this is their peak (but for tables of pairs of more than
    1,000 clients, which grow from nothing); what a round needs while it is computed is the engine's affair.

    Args:
        config: the run's configuration.
        entry: the method.
        about: who the run's clients are.
    """
    task, names = task_of_run(about), [client["name"] for client in about["clients"]]
    network = make_networks(config.model, tuple(about["shape"]), task.outputs, names)
    count, method = len(names), make_method(config, entry, network, len(names), task=task)
    widest = max(method.networks, key=lambda model: model.size)  # rows of theta are as wide as its own
    method = replace(method, model=widest.taking(tuple(about["shape"]))).at(**vars(method.context))
    sizes = {model.width: model.size for model in models_of(method).values()}
    tensors = lambda state: [leaf for leaf in leaves(state) if not isinstance(leaf, int | float)]
    size = lambda state: int(count_bytes(tensors(state), sizes))
    return {"server_state": size(method.init_server(count)), "client_state": size(method.init_client())}


def epochs(run: Run, method: str) -> float | None:
    """Average the gradient passes over a participant's training samples in a round; None where some did a part."""
    sizes, counts = _work(run, method)
    return None if counts is None or not sizes[:, 0].sum() else float(counts[0] / sizes[:, 0].sum())


def flops(run: Run, method: str) -> int | None:
    """Count the floating-point operations of all local training, evaluations aside, as this implementation computes it.

    Per sample: forward and backward pass of the client's network, counted by torch from its layers. Samples: those of
    every participant in every round, with the extra passes that the method makes, counted by `passes`. None where
    there were clients that did a part of that, or trained with public samples, too.
    """
    total, several = 0.0, run.networks
    for id in [several.of.index(number) for number in sorted({*several.of})] if several else [0]:
        _, counts = _work(run, method, None if several is None else several.of[id])
        if counts is None:
            return None
        forward, backward = network_flops(run.path, id)
        total += counts[0] * (forward + backward) + counts[1] * forward
    return int(total)


def _work(run: Run, method: str, network: int | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sizes of all participants in all rounds, and the sample passes that they made.

    The sizes are [m, 2], training and validation samples; the passes [with a gradient, without], None where some
    did a part, or trained with public samples. With `network` only clients that have it count.
    """
    of = run.networks.of if run.networks else [None] * len(run.about["clients"])
    clients = [
        client for client, number in zip(run.about["clients"], of, strict=True) if number == network or network is None
    ]
    sizes_of = {client["name"]: (client["train"], client["val"]) for client in clients}
    lines = run.folder.method(method).rounds()
    sizes = [sizes_of[name] for line in lines for name in line["cohort"] if name in sizes_of]
    sizes = np.array(sizes).reshape(-1, 2)  # [0, 2] where nobody ever answered
    if run.config.run.stragglers or run.config.system.affordable_max or any("epochs" in line for line in lines):
        return sizes, None
    entry = run.entries[method]
    if entry.load().sends_public:  # whose work at a client depends on the number of public samples
        return sizes, None
    settings = tuple(sorted(run.config.settings(entry).items()))
    per_train, per_val, fixed = passes(str(entry.file), settings)
    return sizes, sizes[:, 0].sum() * per_train + sizes[:, 1].sum() * per_val + len(sizes) * fixed


@functools.lru_cache(maxsize=64)
def network_flops(folder: Path, id: int = 0) -> tuple[int, int]:
    """Count the operations of a sample's forward and backward pass through the network of a run's client."""
    run = Run(folder)
    network, samples = run.network(id).train(), torch.rand(2, *run.about["shape"])  # two: BatchNorm needs them
    samples = samples.long() if run.about.get("tokens") else samples
    with FlopCounterMode(display=False) as counter:
        loss = network(samples).sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward // 2, (counter.get_total_flops() - forward) // 2
