"""perfed doctor, perfed bench: this machine, and how fast it is."""

from __future__ import annotations

from typing import Annotated

import typer

from perfed.cli.options import Json
from perfed.cli.output import answer, console_for


def doctor(json: Json = False) -> None:
    """Show what this machine has, and what perfed would make of it."""
    from perfed.training.machine import findings  # imports torch

    facts = findings()
    answer(json, facts, (f"{key:<12} {value}" for key, value in facts.items()))


def bench(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="What to measure: cpu or gpu.")],
    repeats: Annotated[int, typer.Option(help="Rounds to measure, after one that warms up.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A try-out on little data; its ratios mean nothing.")] = False,
    json: Json = False,
) -> None:
    """Measure how fast a round is here, against a plain PyTorch loop in the same run."""
    from perfed.studies import bench  # imports torch

    study, console = bench.find(what), console_for(json)
    measured = study.measure(repeats=repeats, quick=quick, say=lambda text: console.print(text))
    answer(json, measured, () if json else study.report(measured))
