"""Speed, measured against a plain PyTorch loop in the same run. Ratios travel between machines; seconds do not.

A benchmark is a module here with `measure(repeats, quick, say) -> dict` and `report(dict) -> lines`.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
from pathlib import Path
from typing import Any

from perfed.core.errors import Problem, nearest


def find(name: str) -> Any:
    """The benchmark of this name."""
    known = [module.name for module in pkgutil.iter_modules(__path__) if module.name != "plain"]
    if name not in known:
        raise Problem(f"there is no benchmark '{name}'{nearest(name, known)}")
    return importlib.import_module(f"{__name__}.{name}")


def commit() -> str:
    """The commit these sources are from, with a '+' where they differ from it; empty outside a repository."""
    git = lambda *words: subprocess.run(
        ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=False
    )
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else ""
