"""perfed list."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perfed import engines, models, wire
from perfed.cli.options import Json
from perfed.cli.output import answer
from perfed.core.errors import Problem, nearest
from perfed.data.catalog import datasets, partitions, scenarios
from perfed.studies.papers import protocol
from perfed.training import catalog

KINDS = {
    "methods": lambda: {name: _line(entry) for name, entry in catalog.methods().items()},
    "datasets": datasets,
    "partitions": partitions,
    "scenarios": scenarios,
    "models": models.networks,
    "engines": engines.engines,
    "wire": wire.treatments,
    "tables": lambda: {name: protocol.find(name).title for name in protocol.names()},
}


def list_(
    kind: Annotated[
        str, typer.Argument(help="methods, datasets, partitions, scenarios, models, engines, wire or tables")
    ] = "methods",
    json: Json = False,
) -> None:
    """List what there is to choose from."""
    if kind not in KINDS:
        raise Problem(f"there is no list of '{kind}'{nearest(kind, KINDS)}")
    listed: Any = KINDS[kind]()
    width = max(14, *map(len, listed))
    lines = [f"{name:<{width}} {meaning}" for name, meaning in listed.items()]
    if json and kind == "methods":
        listed = [_details(entry) for entry in catalog.methods().values()]
    answer(json, {kind: listed}, lines)


def _line(entry: catalog.Entry) -> str:
    """Return what a method is, and whether it is made after descriptions of it."""
    return entry.summary + " (after its description)" * entry.described


def _details(entry: catalog.Entry) -> dict[str, Any]:
    """Return everything there is to know of a method, in plain values; what it sends is measured."""
    from perfed.studies.method_costs import bytes_sent  # imports torch

    fields = [
        {"name": name, "type": field.type, "default": field.default, "range": field.range, "meaning": field.meaning}
        for name, field in entry.fields.items()
    ]
    about = {"name": entry.name, "title": entry.title, "summary": entry.summary, "paper": entry.paper}
    about |= {"described": entry.described}
    about |= {"category": entry.category, "evaluates": entry.evaluates, "vectorised": entry.vectorised}
    return {**about, **bytes_sent(entry), "hyperparameters": fields}
