"""A comparison: several methods under several seeds, with a run folder for each seed and one table over all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.errors import Problem
from perfed.engines.scores import PERSONAL
from perfed.studies.measures import of_runs
from perfed.training.config import Config
from perfed.training.engine import is_batched
from perfed.training.files import Folder
from perfed.training.folder import SettingsFolder
from perfed.training.prepare import BASELINE, prepare
from perfed.training.results import Run
from perfed.training.statistics import gain_with_test

FORM = {"seeds": [int], "metrics?": bool, "target?": (int, float, type(None))}
PLAN, CONFIG, RESULT, REPORT = "compare.json", "compare.toml", "result.json", "compare.md"


def is_comparison(folder: Path) -> bool:
    """Tell a comparison's folder from that of one run."""
    return folder.is_dir() and Folder(folder).exists(folder / PLAN)


@dataclass(frozen=True)
class Comparison:
    """What was asked for in a comparison, and where it is kept."""

    folder: Path
    config: Config
    seeds: list[int]
    metrics: bool = False  # also spread, fairness, convergence and cost
    target: float | None = None  # the metrics, and what it took to this mean test accuracy

    @classmethod
    def create(
        cls, config: Config, seeds: int, out: Path | None = None, metrics: bool = False, target: float | None = None
    ) -> Comparison:
        """Make the folder of a comparison; its runs come later.

        Args:
            config: the configuration of its runs; its seed is the first.
            seeds: how many there are.
            out: the folder to make; None: a new one in ./runs.
            metrics: also show spread, fairness, convergence and cost.
            target: show them, and what it took to this mean test accuracy.
        """
        task = prepare(config).clients.task  # what is wrong is refused before anything is written
        metric = task.scores[task.headline].metric
        if target is not None and (target < 0 or (target > 1 and metric == "accuracy")):
            raise Problem(f"--target must be a mean {metric.replace('_', ' ')}, which cannot be {target:g}")
        unique = hashlib.sha256(f"{time.time_ns()}".encode()).hexdigest()[:4]
        folder = out or Path("runs") / f"{datetime.now():%Y-%m-%d}_compare_{config.data.name}_{unique}"
        own = SettingsFolder(folder, CONFIG)
        own.create()
        plan = {"seeds": [config.run.seed + n for n in range(seeds)], "metrics": metrics, "target": target}
        own.write_config(own.with_copies(config))
        own.files.write_json(folder / PLAN, plan)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> Comparison:
        """Read what was asked for."""
        own = SettingsFolder(folder, CONFIG)
        plan = own.files.read_json(folder / PLAN, FORM)
        if not plan["seeds"]:
            raise Problem(f"'{folder / PLAN}' is damaged: it names no seed")
        config = own.config()
        return cls(folder, config, plan["seeds"], plan.get("metrics", False), plan.get("target"))

    @property
    def report(self) -> Path:
        """The file with the comparison's table."""
        return self.folder / REPORT

    @property
    def batched(self) -> bool:
        """Whether all seeds are one batch; else they are run one by one, and only one seed's data are in memory."""
        return is_batched(self.config.run)

    def run_config(self, seed: int) -> Config:
        """Return the configuration of a seed's run."""
        return dataclasses.replace(self.config, run=dataclasses.replace(self.config.run, seed=seed))

    def run_folder(self, seed: int) -> Path:
        """Return the folder of a seed's run."""
        return self.folder / f"seed_{seed}"

    def finish(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Write and return what came out of the runs, one for each seed."""
        methods = [_summary(runs, name) for name in runs[0].entries]
        result = {"compare": str(self.folder), "seeds": len(runs), "methods": methods}
        Folder(self.folder).write_json(self.folder / RESULT, result)
        return result

    def measures(self) -> list[dict[str, Any]]:
        """Say more than accuracy of each method's finished runs, where that was asked for; else nothing."""
        if not self.metrics and self.target is None:
            return []
        return of_runs([Run(self.run_folder(seed)) for seed in self.seeds], self.target)


def _summary(runs: Sequence[Run], method: str) -> dict[str, Any]:
    """Summarise a method over all seeds."""
    each = [next(summary for summary in run.summary() if summary["method"] == method) for run in runs]
    headline, judge = runs[0].headline, runs[0].judged  # those of all seeds, also where another would choose otherwise
    over = lambda spreads: {key: _over_seeds([spread[key] for spread in spreads]) for key in spreads[0]}
    metric = runs[0].metric
    shown = over([summary[metric] for summary in each])
    judged = over([run.spread(method, PERSONAL, judge) for run in runs])
    scores = over([summary["scores"][PERSONAL] for summary in each])
    gain = None
    if method != BASELINE and BASELINE in runs[0].entries:
        pooled = [np.concatenate([run.scores(name, judge) for run in runs]) for name in (BASELINE, method)]
        gain = gain_with_test(*pooled, sign=runs[0].sign)
    mean = lambda values: int(np.mean(list(values)))
    sent: dict[str, Any] = {way: mean(summary["bytes"][way] for summary in each) for way in ("down", "up")}
    extra = [summary["bytes"]["extra"] for summary in each]
    sent["extra"] = {name: mean(numbers[name] for numbers in extra) for name in extra[0]}
    seconds = round(sum(summary["seconds"] for summary in each), 3)
    about = {"method": method, "title": each[0]["title"], metric: shown, "gain": gain, "bytes": sent}
    if untrained := each[0]["untrained"]:
        about["untrained"] = untrained
    about |= {"headline": headline, "why": runs[0].why, "columns": runs[0].columns, "spread": judged, "scores": scores}
    faults = [summary["faults"] for summary in each]
    if all(faults):
        about["faults"] = {key: sum(counts[key] for counts in faults) for key in faults[0]}
    clocks = [summary["clock"] for summary in each]
    if None not in clocks:
        about["clock"] = float(np.mean(clocks))
    if refused := [summary["refused"] for summary in each if summary["refused"]]:
        first = [refusal for uploads in refused for refusal in uploads["first"]]
        about["refused"] = {"count": sum(uploads["count"] for uploads in refused), "first": first}
    if changes := [change for summary in each for change in summary["changes"]]:
        about["changes"] = list(dict.fromkeys(changes))
    if diverged := [summary["diverged"] for summary in each if summary["diverged"]]:
        about["diverged"] = f"{len(diverged)} of {len(each)} seeds: {diverged[0]}"
    return {**about, "seconds": seconds, "runs": [summary["run"] for summary in each]}


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    """Return mean and deviation over seeds; None where a score is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"mean": None, "std": None}
    return {"mean": float(np.mean(known)), "std": _deviation(known)}


def _deviation(values: list[float]) -> float:
    """Return the sample's deviation over seeds; 0 for a single seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
