"""perfed new, perfed check: writing a method of one's own."""

from __future__ import annotations

from typing import Annotated

import typer

from perfed.cli.options import Json
from perfed.cli.output import answer, complain, console_for, print_json
from perfed.contract.template import write_method
from perfed.training import catalog


def new(
    name: Annotated[str, typer.Argument(help="The method's name; writes NAME.py here.", show_default=False)],
    json: Json = False,
) -> None:
    """Write a method file to edit."""
    path = write_method(name)
    answer(json, {"file": str(path)}, [str(path), f"edit it, then: perfed check {path}, perfed run ./{path}"])


def check(
    file: Annotated[str, typer.Argument(help="A method's file, or its name.", show_default=False)], json: Json = False
) -> None:
    """Run the contract tests on a method."""
    entry = catalog.find(file)
    from perfed.contract.runner import check_method  # imports torch

    console, results = console_for(json), []
    for title, ok, error in check_method(entry):
        results.append({"check": title, "ok": ok, "error": error})
        if ok is not None:
            console.print(f"ok     {title}" if ok else f"FAILED {title}: {error}")
    waiting = [result["check"] for result in results if result["ok"] is None]
    if waiting:
        console.print(f"not tried, since they build on what failed: {'; '.join(waiting)}")
    failed = sum(result["ok"] is False for result in results)
    if json:
        print_json({"method": entry.name, "checks": results, "failed": failed})
    if failed:
        complain(f"{entry.name} fails {failed} of {len(results)} checks")
        raise typer.Exit(1)
