"""What may happen to an upload between a client and the server: a treatment is a file with a class from `Transform`.

Importing this needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest, refuse_file
from perfed.discover import load_member, members

if TYPE_CHECKING:
    from perfed.wire.base import Transform


def treatments() -> dict[str, str]:
    """Return the treatments there are, by name, and what each does.

    >>> treatments()["identity"]
    'uploads travel as they are'
    """
    return members(Path(__file__).parent, "Transform")


def check(name: str) -> None:
    """Refuse a treatment that does not exist.

    Args:
        name: what a configuration says.
    """
    refuse_file(name, "run.wire")
    if name not in treatments():
        raise Problem(f"run.wire: there is no treatment of uploads '{name}'{nearest(name, treatments())}")


def treatment(name: str) -> Transform:
    """Return a treatment by its name.

    Args:
        name: that of its file.

    Returns:
        An instance of the class that the file derives from Transform; of the last one, where it has several.
    """
    from perfed.wire.base import Transform  # imports torch

    check(name)
    module = load_member(__name__, name)
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Transform)]
    return [kind for kind in kinds if kind.__module__ == module.__name__][-1]()
