"""perfed tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from perfed.cli.options import Json, Quiet, Typed, split_commas, split_words, with_settings
from perfed.cli.output import console_for, interruptible, print_json, typed_command
from perfed.core.errors import Problem
from perfed.studies.papers import protocol
from perfed.training.config import read_toml

if TYPE_CHECKING:
    from perfed.studies.tune import Task

MACHINE = ("data_dir", "engine", "device")  # settings that say where, not what


@with_settings
def tune(
    typed: Typed,
    grid: Annotated[list[str] | None, typer.Option(help="Values to try: lr=0.1,0.01; once for each setting.")] = None,
    table: Annotated[str | None, typer.Option(help="Take settings and grid from this table (METHOD is a row).")] = None,
    column: Annotated[str | None, typer.Option(help="The column of that table.")] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Rows of that table, one after another: a,b.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="That table's reduced version.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds of every trial.", min=1, max=1000)] = 1,
    trials: Annotated[int | None, typer.Option(help="Search with Optuna, so many trials.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder of the trials; finished ones are not run again.")] = Path(
        "runs/tune"
    ),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose a method's settings on validation samples: every combination of --grid, or of a table's own grid."""
    names = split_words(typed.words)[0] + split_commas(rows)
    if not names or (rows and table is None):
        raise Problem("name the method to tune (perfed tune pgfed --grid lr=0.1,0.01), or --rows of a --table")
    if table is None:
        tasks, settings = [_task_of_run(typed, grid or [], out)], {}
    else:
        tasks = _tasks_of_table(typed, table, column, names, quick, grid or [], out)
        settings = {key: typed.settings[key] for key in MACHINE if key in typed.settings}
    from perfed.studies import tune as study  # imports torch
    from perfed.studies.machine import Machine

    machine = Machine(**settings)

    progress, results, problems = console_for(json, quiet), {}, []
    with interruptible():
        for task in tasks:
            try:
                result = study.tune(
                    task, progress, seeds=seeds, trials=trials, machine=machine, command=typed_command()
                )
            except Problem as problem:  # what is wrong with a row is said after the others
                problems.append(problem)
                continue
            results[task.name] = result
            _print_result(console_for(json), result)
    if problems:
        raise problems[0]
    if json:
        print_json(results[tasks[0].name] if len(tasks) == 1 else {"rows": results})


def _task_of_run(typed: Typed, grid: list[str], out: Path) -> Task:
    """Return the search for the settings of a method; the file may have a table `grid`."""
    config = typed.config(apart="grid")
    if len(config.methods) != 1:
        raise Problem(f"perfed tune takes one method, not {', '.join(config.methods)}")
    from perfed.studies import tune as study  # imports torch

    values = read_toml(typed.file).get("grid", {}) if typed.file else {}
    return study.for_run(config, values | study.read_grid(grid), out)


def _tasks_of_table(
    typed: Typed, table: str, column: str | None, rows: list[str], quick: bool, grid: list[str], out: Path
) -> list[Task]:
    """Return a search for each of these rows of a published table."""
    if column is None:
        raise Problem("--table needs --column: settings are chosen column by column")
    others = set(typed.settings) - {*MACHINE, "rounds"}
    if others or typed.file or split_words(typed.words)[1]:
        raise Problem("with --table the settings are the table's: change them with --set section.key=value")
    from perfed.studies import tune as study  # imports torch

    whole = protocol.reduced(protocol.find(table), typed.sets, quick)
    rounds = [f"run.rounds={typed.settings['rounds']}"] if "rounds" in typed.settings else []
    trial = protocol.reduced(protocol.find(table), [*typed.sets, *rounds], quick)
    return [study.for_table(whole, trial, column, row, grid, out) for row in dict.fromkeys(rows)]


def _print_result(console: Console, result: dict[str, Any]) -> None:
    """Print what was tried, best first, and how to use it."""
    worst = float("-inf")
    rank = lambda trial: worst if trial["validation"] is None else trial["sign"] * trial["validation"]
    for trial in sorted(result["tried"], key=rank, reverse=True):
        score = "failed" if trial["validation"] is None else f"{trial['validation']:.4f}"
        console.print(f"{score}  " + "  ".join(f"{k} {v}" for k, v in trial["settings"].items()))
    best, metric = result["best"]["validation"], result["best"]["metric"].replace("_", " ")
    console.print(f"\nbest validation {metric} {best:.4f} of {len(result['tried'])} tried")
    console.print(f"use      {result['use']}\nwritten  {'  '.join(result['files'])}\n")
