"""perfed compare."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from perfed.cli.options import Json, Out, Quiet, Typed, with_settings
from perfed.cli.output import console_for, interruptible, print_json, refuse_diverged
from perfed.core.errors import Problem
from perfed.training.config import refuse_taken

if TYPE_CHECKING:
    from perfed.studies.compare import Comparison


@with_settings
def compare(
    typed: Typed,
    seeds: Annotated[int, typer.Option(help="How many seeds, counted up from --seed.", min=1, max=1000)] = 3,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also spread, fairness, convergence and cost.")] = False,
    target: Annotated[
        float | None,
        typer.Option(help="--metrics, and rounds, local epochs and bytes until this mean test accuracy (or error)."),
    ] = None,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare several methods under several seeds: mean and deviation, gain over Local with a Wilcoxon test."""
    config = typed.config()
    refuse_taken(out)
    if target is not None and not math.isfinite(target):
        raise Problem(f"--target must be a number, not {target}")
    from perfed.studies.compare import Comparison  # imports torch

    comparison = Comparison.create(config, seeds, out, metrics, target)
    with interruptible(lambda: comparison.folder):
        carry_out_comparison(comparison, console_for(json, quiet), json)


def carry_out_comparison(comparison: Comparison, console: Console, json: bool, allow_change: bool = False) -> None:
    """Run what is missing of a comparison and print its tables."""
    from perfed import api  # imports torch
    from perfed.report.comparison import headings, lines, measure_tables, on_terminal
    from perfed.report.tables import remarks, rich_table

    result = api.compare(comparison, console, allow_change)
    console = console_for(json)
    console.print()
    console.print(rich_table(headings(result), lines(result), on_terminal(result)), soft_wrap=False)
    for line in remarks(result["methods"]):
        console.print(line, soft_wrap=True)
    if measures := comparison.measures():
        result["metrics"] = measures
        for table in measure_tables(measures, comparison.target):
            console.print()
            console.print(rich_table(*table), soft_wrap=False)
    console.print(f"\nreport   {comparison.report}")
    if json:
        print_json(result)
    refuse_diverged({method["method"]: method["diverged"] for method in result["methods"] if "diverged" in method})
