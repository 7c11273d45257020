"""How a round is carried out. All engines compute the same function; they differ in speed."""

from __future__ import annotations

import ast
from pathlib import Path

from perfed.discover import constants, describe, parse

AUTO = "vectorised on a GPU, workers on several cores, else sequential"  # what `pick_engine` decides


def engines() -> dict[str, str]:
    """Name and describe the engines: the files here with a class that has a `name`."""
    described = {"auto": AUTO}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = parse(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and "name" in (values := constants(node.body)):
                described[values["name"]] = describe(ast.get_docstring(tree))
    return described
