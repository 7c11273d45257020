"""perfed table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.options import Json, Quiet, Sets, split_commas
from perfed.cli.output import console_for, interruptible, print_json, typed_command
from perfed.studies.papers import protocol


def table(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A table (`perfed list tables`), or a TOML file.")],
    column: Annotated[list[str] | None, typer.Option(help="Only these columns: a,b.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Only these rows: a,b.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds (default: the paper's).", min=1, max=1000)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A reduced version in a few minutes; labelled REDUCED.")
    ] = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Run nothing; show what is there.")] = False,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Folder of runs and results; what is there is not run again.")] = Path(
        "runs/tables"
    ),
    pack: Annotated[
        Path | None, typer.Option(help="Also write the runs behind it, without data and models, to this .tar.xz file.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with data files.")] = None,
    engine: Annotated[str | None, typer.Option(help="How a round is computed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile", help="Compile the steps of 'vectorised'.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a published table again: run what is missing, then the paper's numbers and these side by side."""
    wanted = protocol.reduced(protocol.find(name), sets or [], quick)
    wanted = protocol.chosen(wanted, split_commas(column), split_commas(methods), seeds)
    for each in wanted.columns:  # what is wrong is refused before anything is run
        for row in wanted.rows:
            wanted.config(each, row, 0)
    from perfed import api  # imports torch
    from perfed.report.table_text import cells, column_title, headings, orders
    from perfed.report.tables import rich_table
    from perfed.studies.machine import Machine
    from perfed.studies.papers.pack import check_path
    from perfed.studies.papers.pack import pack as write_pack
    from perfed.studies.papers.tuned import chosen_on

    if pack is not None:
        check_path(pack)
    progress, machine = console_for(json, quiet), Machine(engine, device, compile, data_dir)
    with interruptible():
        lines, written = api.table(wanted, out, progress, machine, only_report=only_report, command=typed_command())
    if pack is not None:
        write_pack(wanted, out, pack)
        written.append(pack)
    console = console_for(json)
    if not console.is_terminal:
        console.width = 200
    console.print(wanted.title + (f"\n{wanted.label}" if wanted.label else ""))
    for each in wanted.columns:
        console.print(f"\n{column_title(wanted, lines, each)}")
        console.print(rich_table(headings(wanted), cells(wanted, lines, each)), soft_wrap=False)
    for line in ["", *orders(wanted, lines), *chosen_on(wanted), *(f"written  {path}" for path in written)]:
        console.print(line)
    if json:
        print_json({"table": wanted.name, "label": wanted.label, "lines": lines, "files": list(map(str, written))})
