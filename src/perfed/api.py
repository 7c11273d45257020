"""perfed from Python: run, load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed.training.config import Config, from_dict, place_flags
from perfed.training.results import Run


def run(*methods: str, out: str | Path | None = None, quiet: bool = True, **settings: Any) -> Run:
    """Train methods and return the finished run; settings are named as on the command line.

    `perfed.run("pgfed", data="digits", rounds=10, lr=0.05, mu=0.1)`
    """
    import torch

    raw, threads = place_flags(settings, list(methods)), torch.get_num_threads()
    console = Console(stderr=True, quiet=quiet)
    try:
        return start(from_dict(raw), None if out is None else Path(out), console)
    finally:
        torch.set_num_threads(threads)  # a run uses one; the caller's own setting comes back


def start(config: Config, out: Path | None, console: Console) -> Run:
    """A new run of a configuration."""
    from perfed.training.experiment import create, prepare
    from perfed.training.train import train

    experiment = prepare(config)
    folder = create(experiment, out)
    train([experiment], [folder], console)
    return finish(folder)


def resume(folder: Path, console: Console) -> Run:
    """Continue a run that was stopped; a finished one is left as it is."""
    from perfed.training.experiment import read_config

    return carry_out([read_config(folder)], [folder], console)[0]


def carry_out(configs: Sequence[Config], folders: Sequence[Path], console: Console) -> list[Run]:
    """Carry out runs that are alike but for their seeds, new or resumed; on a GPU their cohorts train as one batch."""
    from perfed.training.experiment import reopen
    from perfed.training.train import train

    experiments = [reopen(config, folder, console) for config, folder in zip(configs, folders, strict=True)]
    train(experiments, folders, console)
    return [finish(folder) for folder in folders]


def finish(folder: Path) -> Run:
    """The report of a run all of whose methods are done."""
    from perfed.report.folder import write_report

    finished = Run(folder)
    write_report(finished)
    return finished


def load(path: str | Path) -> Run:
    """Open a run folder."""
    return Run(path)
