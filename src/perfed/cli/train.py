"""perfed run, perfed resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from perfed import __version__
from perfed.cli.compare import carry_out_comparison
from perfed.cli.options import Json, Out, Quiet, RunFolder, Typed, with_settings
from perfed.cli.output import console_for, interruptible, print_json, refuse_diverged
from perfed.training.config import refuse_taken

if TYPE_CHECKING:
    from perfed.training.prepare import Experiment
    from perfed.training.results import Run


@with_settings
def run(typed: Typed, out: Out = None, json: Json = False, quiet: Quiet = False) -> None:
    """Train methods beside Local and compare them. Without arguments: digits, 20 clients, Local, FedAvg, PGFed."""
    config, console = typed.config(), console_for(json, quiet)
    refuse_taken(out)
    from perfed import api  # imports torch

    experiment, folder = api.begin(config, out)
    with interruptible(lambda: folder):
        _print_heading(console, experiment, folder)
        (finished,) = api.train_all([experiment], [folder], console)
        _print_ending(finished, json)


def resume(
    run: RunFolder,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Go on although settings were changed; the report says so.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run (or a comparison) that was stopped; it ends as if it had never been."""
    from perfed import api  # imports torch
    from perfed.studies.compare import Comparison, is_comparison

    console = console_for(json, quiet)
    with interruptible(lambda: run):
        if is_comparison(run):
            carry_out_comparison(Comparison.open(run), console, json, allow_change)
        else:
            _print_ending(api.resume(run, console, allow_change), json)


def _print_heading(console: Console, experiment: Experiment, folder: Path) -> None:
    """Say what is trained, on what and where."""
    config, clients = experiment.config, experiment.clients
    from perfed.data.strata import strata_of, stratum_counts  # imports numpy

    known, kinds = strata_of(clients), (stratum_counts(clients, "train") > 0).sum(axis=1).tolist()
    what = f"{known.what}s" if known else "classes"
    mixed = f"{what} per client {min(kinds)}-{max(kinds)}  " if known is None or len(known.names) > 1 else ""
    partition = config.data.partition + (f" {config.data.alpha:g}" if config.data.partition == "dirichlet" else "")
    partition = " + ".join([partition, *(clients.partition or {}).get("skews", {})])
    sizes = clients.train.size
    where = f"{experiment.engine} on {experiment.device}"
    console.print(f"perfed {__version__}  {folder}  seed {config.run.seed}  {where}")
    console.print(
        f"data     {config.data.name}  {len(clients)} clients  {partition}  "
        f"{mixed}training samples {min(sizes)}-{max(sizes)}"
    )
    if config.data.name == "folder":  # labels that several people have written
        from perfed.report.partition import label_table
        from perfed.report.tables import rich_table

        console.print(rich_table(*label_table(clients)), soft_wrap=False)


def _print_ending(run: Run, json: bool) -> None:
    """Print the table, and where to find things."""
    from perfed.report.tables import headings, lines, on_terminal, remarks, rich_table  # imports torch

    console = console_for(json)
    console.print()
    console.print(rich_table(headings(run), lines(run), on_terminal(run)), soft_wrap=False)
    for line in remarks(run.summary()):
        console.print(line, soft_wrap=True)
    console.print(f"\nreport   {run.folder.report}")
    client, count = run.clients()[0], len(run.about["clients"])
    if not run.folder.files.exists(client.path):
        console.print("models   none written (--save-models)")
    elif client.path.parent.name != client.about["folder"]:
        console.print(f"models   {client.path}   (one for all {count} clients)")
    else:
        console.print(f"models   {client.path.parent.parent}/<client>/{client.path.name}   ({count} clients)")
    if run.folder.files.exists(client.path):
        load = f"perfed.load('{run.path}').client('{client.about['folder']}').model()"
        console.print(f'load     python -c "import perfed; print({load})"')
    if json:
        print_json({"run": str(run.path), "methods": run.summary()})
    refuse_diverged(run.diverged)
