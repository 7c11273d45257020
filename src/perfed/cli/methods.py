"""perfed new, perfed check: writing a method of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from perfed import wire
from perfed.cli.options import Json
from perfed.cli.output import answer, complain, console_for, print_json
from perfed.contract.template import write_method
from perfed.core.errors import Problem, nearest
from perfed.training import catalog


def new(
    name: Annotated[str, typer.Argument(help="The method's name; writes NAME.py here.", show_default=False)],
    json: Json = False,
) -> None:
    """Write a method file to edit."""
    path = write_method(name)
    answer(json, {"file": str(path)}, [str(path), f"edit it, then: perfed check {path}, perfed run ./{path}"])


def check(
    file: Annotated[
        str,
        typer.Argument(help="A method's file, or its name, or that of a treatment of uploads.", show_default=False),
    ],
    json: Json = False,
) -> None:
    """Run the contract tests on a method, or on what happens to uploads on their way."""
    name, kind, verdicts = _checks(file)
    console, results = console_for(json), []
    for title, ok, error in verdicts:
        results.append({"check": title, "ok": ok, "error": error})
        if ok is not None:
            console.print(f"ok     {title}" if ok else f"FAILED {title}: {error}")
    waiting = [result["check"] for result in results if result["ok"] is None]
    if waiting:
        console.print(f"not tried, since they build on what failed: {'; '.join(waiting)}")
    failed = sum(result["ok"] is False for result in results)
    if json:
        print_json({kind: name, "checks": results, "failed": failed})
    if failed:
        complain(f"{name} fails {failed} of {len(results)} checks")
        raise typer.Exit(1)


def _checks(file: str) -> tuple[str, str, Iterator[Any]]:
    """Return what is checked by its name, what it is, and what each of its checks finds."""
    names, others = catalog.names(), wire.treatments()
    if file in others and file not in names:
        from perfed.contract.treatments import check_treatment  # imports torch

        return file, "wire", check_treatment(wire.treatment(file))
    if file not in names and not file.endswith(".py") and "/" not in file:
        known = nearest(file, [*names, *others])
        raise Problem(f"there is no method and no treatment of uploads '{file}'{known}")
    entry = catalog.find(file)
    from perfed.contract.runner import check_method  # imports torch

    return entry.name, "method", check_method(entry)
