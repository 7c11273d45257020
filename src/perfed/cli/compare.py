"""perfed compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from perfed.cli.options import Json, Out, Quiet, Typed, with_settings
from perfed.cli.output import console_for, interruptible, print_json, refuse_diverged
from perfed.core.errors import Problem
from perfed.training.config import refuse_taken


@with_settings
def compare(
    typed: Typed,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from --seed.", min=1, max=1000)] = 3,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also spread, fairness, convergence and cost.")] = False,
    target: Annotated[
        float | None,
        typer.Option(help="--metrics, and rounds, local epochs and bytes until this mean test accuracy.", min=0, max=1),
    ] = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare several methods under several seeds: mean and deviation, gain over Local with a Wilcoxon test."""
    config = typed.config()
    refuse_taken(out)
    if target is not None and math.isnan(target):
        raise Problem("--target must be a number from 0 to 1, not nan")
    from perfed.studies.compare import create  # imports torch

    folder = create(config, seeds, out, metrics, target)
    with interruptible(lambda: folder):
        carry_out_comparison(folder, console_for(json, quiet), json)


def carry_out_comparison(folder: Path, console: Console, json: bool) -> None:
    """Run what is missing of a comparison and print its tables."""
    from perfed.report.tables import remarks, rich_table  # imports torch
    from perfed.studies import measures
    from perfed.studies.compare import HEADINGS, PLAN, carry_out, lines
    from perfed.training import files
    from perfed.training.results import Run

    result = carry_out(folder, console)
    console = console_for(json)
    console.print()
    console.print(rich_table(HEADINGS, lines(result)), soft_wrap=False)
    for line in remarks(result["methods"]):
        console.print(line, highlight=False, soft_wrap=True)
    plan = files.read_json(folder / PLAN)
    target = plan.get("target")
    if plan.get("metrics") or target is not None:
        runs = [Run(path) for path in result["methods"][0]["runs"]]
        result["metrics"] = measures.of_runs(runs, target)
        for table in measures.as_tables(result["metrics"], target):
            console.print()
            console.print(rich_table(*table), soft_wrap=False)
    console.print(f"\nreport   {folder / 'compare.md'}")
    if json:
        print_json(result)
    refuse_diverged({method["method"]: method["diverged"] for method in result["methods"] if "diverged" in method})
