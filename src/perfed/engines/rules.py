"""What a method's author is told of an error: the rule that was broken, and the line of the file that broke it."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.wire.base import Transform

PERFED = Path(__file__).parent.parent
OWN = (PERFED / "methods", PERFED / "wire")  # where a file of perfed's own is somebody's method or treatment

_MANY = "it runs for many clients at once, and"
_WRITING = "it writes into a tensor: make a new one, with torch.where, `put` or `index_copy` (rule 2 of {docs})"
RULES = {  # words of PyTorch -> what the method did, and what to write in its place
    "data-dependent control flow": f"an `if`, `while`, `and` or `not` over a tensor: {_MANY} each would go its own "
    "way; torch.where(condition, a, b) chooses (rule 1 of {docs})",
    "calling .item()": f"a tensor's number as a plain one (`.item()`, `int`, `float`): {_MANY} each has its own; "
    "keep it a tensor (rule 1 of {docs})",
    "data pointer of Tensor": f"a tensor as numbers of Python or NumPy: {_MANY} each has its own; keep it a tensor "
    "(rule 1 of {docs})",
    "has more elements than `self`": _WRITING,
    "doesn't match the broadcast shape": _WRITING,
    "dynamic shape": f"a shape that depends on numbers (a mask as an index, `nonzero`, `unique`): {_MANY} each would "
    "get another one; torch.where or a weight of 0 leaves entries out (rule 3 of {docs})",
    "random operation": "random numbers of its own: the batches (and dropout) bring theirs (rule 4 of {docs})",
}


def is_own(file: str) -> bool:
    """Return True for a file that somebody wrote a method, a treatment or a network in, not a library's."""
    path, library = Path(file), Path(sysconfig.get_path("stdlib"))
    packaged = "site-packages" in path.parts or path.is_relative_to(library) or path.is_relative_to(PERFED)
    return any(map(path.is_relative_to, OWN)) or not (packaged or file.startswith("<"))


def place(error: BaseException) -> str:
    """Return the line of a method's file that an error comes from, as 'mine.py, line 7'; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


def rule_broken(error: BaseException) -> str:
    """Return the rule that PyTorch's error is about; empty if it is about none."""
    rule = next((rule for words, rule in RULES.items() if words in str(error)), "")
    return rule.format(docs="docs/methods.md")


@contextlib.contextmanager
def rules_told(method: Method) -> Iterator[None]:
    """Tell an error of PyTorch's vmap as the rule that the method broke; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        rule, where = rule_broken(error), place(error)
        if not rule or not where:
            raise
        name = type(method).__name__
        raise Problem(f"{name} ({where}): {rule}; a method may also say `vectorised = False`") from error


def wire_name(wire: Transform) -> str:
    """Return what a treatment of uploads is called: like its file among perfed's own, else like its class."""
    room, _, stem = type(wire).__module__.rpartition(".")
    return stem.replace("_", "-") if room == "perfed.wire" else type(wire).__name__


@contextlib.contextmanager
def treatment_told(wire: Transform, method: Method, kind: type[Exception] = Problem) -> Iterator[None]:
    """Tell an error of a treatment's half with the names of the treatment and of the method whose uploads it has.

    Args:
        wire: the treatment.
        method: the method.
        kind: of the error that is raised; what breaks a rule, or is a Problem already, is one for everybody.
    """
    try:
        yield
    except Exception as error:
        problem, rule, where = isinstance(error, Problem), rule_broken(error), place(error)
        text = rule or ("" if problem else f"{type(error).__name__}: ") + str(error).partition("\n")[0]
        title = f"wire '{wire_name(wire)}', method {type(method).__name__}"
        raise (Problem if problem or rule else kind)(f"{title}{f' ({where})' if where else ''}: {text}") from error
