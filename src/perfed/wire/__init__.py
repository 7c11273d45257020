"""What may happen to an upload between a client and the server, one file per treatment.

Importing this needs no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest

if TYPE_CHECKING:
    from perfed.wire.base import Transform


def names() -> list[str]:
    """Return the names of the treatments there are.

    >>> names()
    ['identity']
    """
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "base"))


def check(name: str) -> None:
    """Refuse a treatment that does not exist.

    Args:
        name: what a configuration says.
    """
    if name not in names():
        raise Problem(f"run.wire: there is no treatment of uploads '{name}'{nearest(name, names())}")


def treatment(name: str) -> Transform:
    """Return a treatment by its name.

    Args:
        name: that of its file.

    Returns:
        An instance of the class that the file defines.
    """
    check(name)
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return next(kind for kind in classes if kind.__module__ == module.__name__)()
