"""Discover the members of a room: methods, data sets, partition schemes, networks, ... one file each.

Files are read as text, so that a list of members needs no torch and runs nobody's code. The first line of a member's
docstring introduces it: `Title: what it is.`
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from contextlib import suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from perfed.core.errors import Problem

MOST = 10_000_000  # bytes of a Python file


def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file; a file that is not Python is a Problem."""
    if path.stat().st_size > MOST:
        raise Problem(f"'{path}' is not Python code that anybody has written: it is larger than {MOST:,} bytes")
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Problem(f"'{path}' is not valid Python{where}") from None


def describe(docstring: str | None) -> str:
    """Return what the first line of a docstring says after the title."""
    title, colon, meaning = (docstring or "").strip().partition("\n")[0].partition(": ")
    return (meaning if colon else title).rstrip(".")


def constants(body: list[ast.stmt]) -> dict[str, Any]:
    """Return the plain values that a file or a class gives names to; what must be computed is left out."""
    values = {}
    for line in body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            with suppress(ValueError, TypeError):
                values[line.targets[0].id] = ast.literal_eval(line.value)
    return values


@cache
def members(folder: Path, *marks: str) -> dict[str, str]:
    """Name and describe the members in a folder, in alphabetical order.

    A member is a file that defines one of the functions `marks`, or a class derived from one of the classes `marks`,
    directly or through other classes of the room.
    It is called like its file, with dashes for underscores.
    """
    trees = {path: parse(path) for path in sorted(folder.glob("*.py"))}
    marks = _with_derived(list(trees.values()), marks)
    return {
        path.stem.replace("_", "-"): describe(ast.get_docstring(tree))
        for path, tree in trees.items()
        if any(_has_mark(node, _called(tree, marks)) for node in tree.body)
    }


def _with_derived(trees: list[ast.Module], marks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the marks with every class of a room that derives, through however many others, from one of them."""
    classes = [(node, tree) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    while more := {node.name for node, tree in classes if _has_mark(node, _called(tree, marks))} - set(marks):
        marks = (*marks, *more)
    return marks


def _called(tree: ast.Module, marks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the marks with the names that a file gives them: `from ... import Transform as T`."""
    names = [name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    return (*marks, *(name.asname for name in names if name.asname and name.name in marks))


def _has_mark(node: ast.stmt, marks: tuple[str, ...]) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in marks
    if isinstance(node, ast.ClassDef):  # `base.Transform` is a Transform
        return any(ast.unparse(base).rpartition(".")[2] in marks for base in node.bases)
    return isinstance(node, ast.Assign) and any(ast.unparse(name) in marks for name in node.targets)


def load_member(package: str, name: str) -> ModuleType:
    """Import the member of this name from a room."""
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")


class _Text(SourceFileLoader):
    """Runs what a file says: bytecode beside it, which may say something else, is neither read nor written."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_file(path: Path) -> ModuleType:
    """Import a user's Python file; what it raises becomes one sentence."""
    name = f"perfed_user_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Text(name, str(path)))
    if path.suffix != ".py" or path.stat().st_size > MOST or spec is None or spec.loader is None:
        raise Problem(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Problem(f"'{path}' cannot be loaded: {type(error).__name__}: {str(error)[:300]}") from error
    return module
