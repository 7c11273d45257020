"""The user's own network: path.py:factory."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from perfed.core.errors import Problem, nearest


def load(name: str, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Run the file and return its factory, bound to (shape, classes) unless it takes no arguments."""
    place, colon, function = name.rpartition(":")
    if not colon or not function:
        raise Problem(f"model.name '{name}' must name a function too: path.py:factory")
    path = Path(place).expanduser()
    if not path.is_file():
        raise Problem(f"model.name: there is no file '{place}'")
    spec = importlib.util.spec_from_file_location(f"perfed_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise Problem(f"model.name: '{place}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and other tools look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Problem(f"model.name: running '{place}' raised {type(error).__name__}: {error}") from error
    factory: Callable[..., nn.Module] | None = getattr(module, function, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Problem(f"model.name: '{place}' has no function '{function}'{nearest(function, functions)}")
    if inspect.signature(factory).parameters:
        return lambda: factory(shape, classes)
    return lambda: factory()
