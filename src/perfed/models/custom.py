"""The user's own network: path.py:factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

from torch import nn

from perfed.core.errors import Problem, nearest
from perfed.discover import load_file


def load(name: str, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Run a user's file and return its factory.

    Args:
        name: path.py:factory.
        shape: the shape of a sample.
        classes: how many classes there are.

    Returns:
        The factory, bound to (shape, classes) unless it takes no arguments.
    """
    path, _, function = name.rpartition(":")
    module = load_file(Path(path).expanduser())
    factory: Callable[..., nn.Module] | None = getattr(module, function, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Problem(f"model.name: '{path}' has no function '{function}'{nearest(function, functions)}")
    if inspect.signature(factory).parameters:
        return lambda: factory(shape, classes)
    return lambda: factory()
