"""Several methods under several seeds: one run folder per seed, one table over all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from perfed.models import is_path
from perfed.report.folder import up_to
from perfed.report.tables import markdown, remarks, signed, size
from perfed.training import files
from perfed.training.config import Config, from_dict, new_folder, read_toml, to_toml
from perfed.training.prepare import BASELINE
from perfed.training.results import Run, compare

PLAN = "compare.json"
HEADINGS = ("", "mean", "weighted", "worst tenth", "gain over Local", "better", "worse", "p", "down", "up")


def is_comparison(folder: Path) -> bool:
    """Whether a folder holds a comparison rather than one run."""
    return (folder / PLAN).is_file()


def create(config: Config, seeds: int, out: Path | None, metrics: bool = False, target: float | None = None) -> Path:
    """A folder for a comparison, which says what is to be shown of it; its runs come later."""
    from perfed.training.prepare import prepare

    prepare(config)  # what is wrong is found before anything is written
    unique = hashlib.sha256(f"{time.time_ns()}".encode()).hexdigest()[:4]
    folder = out or Path("runs") / f"{datetime.now():%Y-%m-%d}_compare_{config.data.name}_{unique}"
    new_folder(folder)
    files.write(folder / "compare.toml", to_toml(_absolute(config)))
    every = [config.run.seed + at for at in range(seeds)]
    files.write_json(folder / PLAN, {"seeds": every, "metrics": metrics, "target": target})
    return folder


def _absolute(config: Config) -> Config:
    """The same with whole paths: a comparison may be resumed from another folder."""
    whole = lambda path: str(Path(path).expanduser().resolve())
    names = [whole(e.file) if n.endswith(".py") else n for n, e in zip(config.methods, config.entries(), strict=True)]
    data, model = config.data, config.model
    if data.dir is not None:
        data = dataclasses.replace(data, dir=whole(data.dir))
    if is_path(model.name):
        path, _, factory = model.name.rpartition(":")
        model = dataclasses.replace(model, name=f"{whole(path)}:{factory}")
    return dataclasses.replace(config, methods=tuple(names), data=data, model=model)


def carry_out(folder: Path, console: Console) -> dict[str, Any]:
    """Run what is missing, then write and return the comparison."""
    from perfed import api

    config = from_dict(read_toml(folder / "compare.toml"))
    seeds = files.read_json(folder / PLAN)["seeds"]
    seeded = [dataclasses.replace(config, run=dataclasses.replace(config.run, seed=seed)) for seed in seeds]
    places = [folder / f"seed_{seed}" for seed in seeds]
    if _batched(config):
        console.print(f"seeds {', '.join(map(str, seeds))} in one batch", highlight=False)
        runs = api.carry_out(seeded, places, console)
    else:  # one after another: only one seed's data are in memory
        runs = []
        for seed, one, place in zip(seeds, seeded, places, strict=True):
            console.print(f"seed {seed}")
            runs += api.carry_out([one], [place], console)
    result = {"compare": str(folder), "seeds": len(runs), "methods": [_one(runs, name) for name in runs[0].entries]}
    files.write_json(folder / "result.json", result)
    text = f"# {folder.name}\n\n{_about(config, runs)}\n\n" + markdown(HEADINGS, lines(result))
    text += "".join(f"\n{line}.\n" for line in remarks(result["methods"]))
    files.write(folder / "compare.md", text)
    return result


def _batched(config: Config) -> bool:
    """Whether cohorts are batches, so that several seeds can share one."""
    from perfed.training.engine import pick_device, pick_engine

    return pick_engine(config.run, pick_device(config.run.device), 2) == "vectorised"


def _about(config: Config, runs: list[Run]) -> str:
    seeds = ", ".join(str(run.config.run.seed) for run in runs)
    return (
        f"{config.data.name}, {len(runs[0].about['clients'])} clients, {up_to(config.run)} rounds, seeds {seeds}. "
        "Mean and deviation over seeds of the clients' mean test accuracy; gain, better, worse and p (Wilcoxon "
        "signed-rank) over all clients of all seeds, each against Local with the same client and seed."
    )


def _one(runs: list[Run], method: str) -> dict[str, Any]:
    each = [next(s for s in run.summary() if s["method"] == method) for run in runs]
    over = lambda key: [one["accuracy"][key] for one in each]
    accuracy = {key: {"mean": float(np.mean(over(key))), "std": _deviation(over(key))} for key in each[0]["accuracy"]}
    gain = None
    if method != BASELINE and BASELINE in runs[0].entries:
        pooled = [np.concatenate([run.accuracies(name) for run in runs]) for name in (method, BASELINE)]
        gain = compare(*pooled)
    mean = lambda values: int(np.mean(list(values)))
    sent: dict[str, Any] = {way: mean(one["bytes"][way] for one in each) for way in ("down", "up")}
    extra = [one["bytes"]["extra"] for one in each]
    sent["extra"] = {name: mean(one[name] for one in extra) for name in extra[0]}
    seconds = round(sum(one["seconds"] for one in each), 3)
    about = {"method": method, "title": each[0]["title"], "accuracy": accuracy, "gain": gain, "bytes": sent}
    failed = [one["faults"] for one in each]
    if all(failed):
        about["faults"] = {key: sum(one[key] for one in failed) for key in failed[0]}
    if refused := [one["refused"] for one in each if one["refused"]]:
        first = [refusal for one in refused for refusal in one["first"]]
        about["refused"] = {"count": sum(one["count"] for one in refused), "first": first}
    if diverged := [one["diverged"] for one in each if one["diverged"]]:
        about["diverged"] = f"{len(diverged)} of {len(each)} seeds: {diverged[0]}"
    return {**about, "seconds": seconds, "runs": [one["run"] for one in each]}


def _deviation(values: list[float]) -> float:
    """Deviation over seeds, of the sample; 0 for a single seed."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def lines(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the comparison, one line per method."""
    out = []
    for one in result["methods"]:
        several = result["seeds"] > 1  # one seed has no deviation
        cells = [
            f"{v['mean']:.3f}" + (f" ± {v['std']:.3f}" if several else "")
            for k, v in one["accuracy"].items()
            if k != "std"
        ]
        gain = one["gain"]
        versus = ("-",) * 4
        if gain is not None:
            p = "n/a" if gain["p"] is None else f"{gain['p']:.3g}"
            versus = (signed(gain["mean"]), str(gain["better"]), str(gain["worse"]), p)
        title = one["title"] + " (diverged)" * ("diverged" in one)
        out.append((title, *cells, *versus, size(one["bytes"]["down"]), size(one["bytes"]["up"])))
    return out
