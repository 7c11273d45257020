"""perfed from Python: run, load; and what the command does besides: resume, compare, table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from perfed.report.terminal import Terminal
from perfed.training.config import Config, from_dict, place_flags
from perfed.training.folder import RunFolder
from perfed.training.prepare import THREADS, Experiment, create, prepare, reopen
from perfed.training.results import Run
from perfed.training.train import train

if TYPE_CHECKING:
    from perfed.studies.compare import Comparison
    from perfed.studies.machine import Machine
    from perfed.studies.papers.protocol import Protocol
    from perfed.studies.papers.result import Line


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
    console = Terminal(stderr=True, quiet=quiet)
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


def personalise(
    run: Run | str | Path,
    data: Any,
    method: str | None = None,
    rounds: int = 1,
    fine_tune: int = 0,
    out: str | Path | None = None,
    name: str = "newcomer",
    quiet: bool = True,
    **settings: Any,
) -> Run:
    """Give clients that never took part models, from a finished run and their own data; nothing is sent.

    `perfed.personalise("runs/hospitals", "new.csv").client("new").predict(x)`

    Args:
        run: a finished run, or its folder.
        data: a file with one client, a table with a column that names the client, a folder with a file for each, or a
            DataFrame.
        method: a method of the run; None: the last one.
        rounds: local rounds, as the method's clients train.
        fine_tune: epochs of plain local training after them.
        out: the folder to make; None: a new one in ./runs.
        name: what the client of a DataFrame is called, where no column names it.
        quiet: print no progress.
        settings: settings of the data, such as label_column="diagnosis".

    Returns:
        A run: the newcomers' own models and the general one (`general`), beside Local on the same data.
    """
    from perfed.report.folder import write_report  # imports matplotlib, which takes long
    from perfed.training import newcomers

    opened, threads = run if isinstance(run, Run) else Run(run), torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with newcomers.as_config(data, name, settings) as config:
            folder = newcomers.personalise(
                opened,
                method or opened.main,
                config,
                rounds,
                fine_tune,
                None if out is None else Path(out),
                Console(stderr=True, quiet=quiet),
            )
    finally:
        torch.set_num_threads(threads)
    finished = Run(folder)
    write_report(finished)
    return finished


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


def resume(folder: Path, console: Console, allow_change: bool = False) -> Run:
    """Continue a run that was stopped; a finished run is left as it is.

    Args:
        folder: the run's folder.
        console: where progress goes.
        allow_change: go on with other settings than the run was begun with; its results say so.

    Returns:
        The finished run.
    """
    return carry_out([RunFolder(folder).config()], [folder], console, allow_change)[0]


def carry_out(
    configs: Sequence[Config], folders: Sequence[Path], console: Console, allow_change: bool = False
) -> list[Run]:
    """Carry out runs that are alike but for their seeds; on a GPU their cohorts train as one batch.

    Args:
        configs: a configuration for each run.
        folders: a folder for each; a run that has been begun goes on.
        console: where progress goes.
        allow_change: go on with other settings than a run was begun with; its results say so.

    Returns:
        The finished runs.
    """
    experiments = [reopen(config, folder, console) for config, folder in zip(configs, folders, strict=True)]
    return train_all(experiments, folders, console, allow_change)


def train_all(
    experiments: Sequence[Experiment], folders: Sequence[Path], console: Console, allow_change: bool = False
) -> list[Run]:
    """Train every method that has no result yet, and write reports.

    Args:
        experiments: the runs.
        folders: a folder for each.
        console: where progress goes.
        allow_change: go on with other settings than a run was begun with; its results say so.

    Returns:
        The finished runs.
    """
    from perfed.report.folder import write_report  # imports matplotlib, which takes long

    train(experiments, folders, console, allow_change=allow_change)
    runs = [Run(folder) for folder in folders]
    for finished in runs:
        write_report(finished)
    return runs


def compare(comparison: Comparison, console: Console, allow_change: bool = False) -> dict[str, Any]:
    """Run what is missing of a comparison, new or resumed.

    Args:
        comparison: what is compared, and where.
        console: where progress goes.
        allow_change: go on with other settings than a run was begun with; its results say so.

    Returns:
        What came out of it, which is also written into its folder.
    """
    from perfed.report.comparison import write_comparison  # imports matplotlib, which takes long

    runs: list[Run] = []
    batched = comparison.batched
    for seeds in [comparison.seeds] if batched else [[seed] for seed in comparison.seeds]:
        words = f"seeds {', '.join(map(str, seeds))} in one batch" if batched else f"seed {seeds[0]}"
        console.print(words, highlight=False)
        configs = [comparison.run_config(seed) for seed in seeds]
        runs += carry_out(configs, [comparison.run_folder(seed) for seed in seeds], console, allow_change)
    result = comparison.finish(runs)
    write_comparison(comparison, runs, result)
    return result


def table(
    protocol: Protocol, out: Path, console: Console, machine: Machine, *, only_report: bool = False, command: str = ""
) -> tuple[list[Line], list[Path]]:
    """Make a paper's table again: run what is missing, then write it.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        console: where progress goes.
        machine: where and with what to compute.
        only_report: run nothing; where nothing has been run, show the results that come with perfed.
        command: what was typed.

    Returns:
        The table's lines, and the files that were written.
    """
    from perfed.report.table_files import write_table  # imports matplotlib, which takes long
    from perfed.studies.papers.carry_out import carry_out as run_missing
    from perfed.studies.papers.kept import kept_table
    from perfed.studies.papers.result import from_csv, lines

    if only_report and not (out / protocol.cells).is_dir():
        kept = kept_table(protocol)
        every = from_csv(kept) if kept.is_file() else lines(protocol, out)
        return [line for line in every if line["column"] in protocol.columns and line["row"] in protocol.rows], []
    if not only_report:
        run_missing(protocol, out, console, machine)
    made = lines(protocol, out, command)
    return made, write_table(protocol, out, made)
