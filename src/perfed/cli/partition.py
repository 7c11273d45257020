"""perfed partition show."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.help import Group, Verb
from perfed.cli.options import Json, Typed, with_settings
from perfed.cli.output import console_for, print_json
from perfed.core.errors import Problem

partitions = typer.Typer(help="How a data set becomes clients.", rich_markup_mode=None, cls=Group)


@partitions.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@partitions.command(cls=Verb)
@partial(with_settings, only_data=True)
def show(
    typed: Typed,
    out: Annotated[Path | None, typer.Option(help="Write this PNG; an SVG and a CSV beside it.")] = None,
    json: Json = False,
) -> None:
    """Share a data set out and show who got what: sizes, labels, how uneven the clients are."""
    config = typed.config()
    if out is not None and out.suffix.lower() != ".png":
        raise Problem(f"--out must end in .png, not '{out}'")
    if out is not None and not out.parent.is_dir():
        raise Problem(f"--out: there is no folder '{out.parent}'")
    from perfed.report import partition as report  # imports torch and matplotlib
    from perfed.report.tables import rich_table
    from perfed.training import files
    from perfed.training.prepare import load_clients

    clients, console = load_clients(config.data, config.run.seed), console_for(json)
    console.print(report.heading(clients, config.data))
    for notice in clients.notices:
        console.print(notice)
    console.print()
    console.print(rich_table(*report.lines(clients)), soft_wrap=False)
    console.print()
    for line in report.summary(clients):
        console.print(line)
    written = []
    if out is not None:
        contents = report.pictures(clients, config.data) | {"csv": report.counts_csv(clients)}
        for kind, content in contents.items():
            written.append(str(out.with_suffix(f".{kind}") if kind != "png" else out))
            files.write(Path(written[-1]), content)
        console.print(f"\nwritten  {'  '.join(written)}")
    if json:
        print_json(report.as_dict(clients) | {"data": config.data.name, "files": written})
