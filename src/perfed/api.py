"""perfed from Python: run, load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perfed.training.config import Config, from_dict, place_flags
from perfed.training.folder import RunFolder
from perfed.training.prepare import Experiment, create, prepare, reopen
from perfed.training.results import Run
from perfed.training.train import train


def run(*methods: str, out: str | Path | None = None, quiet: bool = True, **settings: Any) -> Run:
    """Train methods beside Local and return the finished run.

    `perfed.run("pgfed", data="digits", rounds=10, lr=0.05, mu=0.1)`

    Args:
        methods: names or files of methods; none: FedAvg and PGFed.
        out: the folder to make; None: a new one in ./runs.
        quiet: print no progress.
        settings: named as on the command line, with underscores.

    Returns:
        The finished run.
    """
    raw, threads = place_flags(settings, list(methods)), torch.get_num_threads()
    console = Console(stderr=True, quiet=quiet)
    try:
        return start(from_dict(raw), None if out is None else Path(out), console)
    finally:
        torch.set_num_threads(threads)  # a run uses one; the caller's own setting comes back


def load(path: str | Path) -> Run:
    """Open a run folder.

    Args:
        path: the folder.

    Returns:
        The run: its scores, and every client's model.
    """
    return Run(path)


def begin(config: Config, out: Path | None) -> tuple[Experiment, Path]:
    """Prepare a new run and make its folder; what is wrong is refused before anything is written.

    Args:
        config: the configuration.
        out: the folder to make; None: a new one in ./runs.

    Returns:
        The experiment and its folder.
    """
    experiment = prepare(config)
    return experiment, create(experiment, out)


def start(config: Config, out: Path | None, console: Console) -> Run:
    """Carry out a new run.

    Args:
        config: the configuration.
        out: the folder to make; None: a new one in ./runs.
        console: where progress goes.

    Returns:
        The finished run.
    """
    experiment, folder = begin(config, out)
    return train_all([experiment], [folder], console)[0]


def resume(folder: Path, console: Console) -> Run:
    """Continue a run that was stopped; a finished run is left as it is.

    Args:
        folder: the run's folder.
        console: where progress goes.

    Returns:
        The finished run.
    """
    return carry_out([RunFolder(folder).config()], [folder], console)[0]


def carry_out(configs: Sequence[Config], folders: Sequence[Path], console: Console) -> list[Run]:
    """Carry out runs that are alike but for their seeds; on a GPU their cohorts train as one batch.

    Args:
        configs: a configuration for each run.
        folders: a folder for each; a run that has been begun goes on.
        console: where progress goes.

    Returns:
        The finished runs.
    """
    experiments = [reopen(config, folder, console) for config, folder in zip(configs, folders, strict=True)]
    return train_all(experiments, folders, console)


def train_all(experiments: Sequence[Experiment], folders: Sequence[Path], console: Console) -> list[Run]:
    """Train every method that has no result yet, and write reports.

    Args:
        experiments: the runs.
        folders: a folder for each.
        console: where progress goes.

    Returns:
        The finished runs.
    """
    from perfed.report.folder import write_report  # imports matplotlib, which takes long

    train(experiments, folders, console)
    runs = [Run(folder) for folder in folders]
    for finished in runs:
        write_report(finished)
    return runs
