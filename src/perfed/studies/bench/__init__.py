"""Speed, measured against a plain PyTorch loop in the same run. Ratios travel between machines; seconds do not.

A benchmark is a module here with `measure(repeats, quick, say) -> dict` and `report(dict) -> lines`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from perfed.core.errors import Problem, nearest


def find(name: str) -> Any:
    """Import the benchmark of this name."""
    known = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "plain"]
    if name not in known:
        raise Problem(f"there is no benchmark '{name}'{nearest(name, known)}")
    return importlib.import_module(f"{__name__}.{name}")
