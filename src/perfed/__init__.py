"""perfed: personalised federated learning. Many clients train together; each ends with a model of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfed.api import load as load
    from perfed.api import personalise as personalise
    from perfed.api import run as run
    from perfed.core.errors import Problem as Problem
    from perfed.core.fields import hyper as hyper
    from perfed.core.messages import Cohort as Cohort
    from perfed.core.messages import Down as Down
    from perfed.core.messages import Up as Up
    from perfed.core.method import Method as Method
    from perfed.core.model import Model as Model
    from perfed.core.rounds import Phase as Phase
    from perfed.core.rounds import Selection as Selection
    from perfed.training.results import Run as Run

__version__ = "0.2.0"

_HOME = {
    "load": "perfed.api",
    "personalise": "perfed.api",
    "run": "perfed.api",
    "Problem": "perfed.core.errors",
    "hyper": "perfed.core.fields",
    "Cohort": "perfed.core.messages",
    "Down": "perfed.core.messages",
    "Up": "perfed.core.messages",
    "Method": "perfed.core.method",
    "Model": "perfed.core.model",
    "Phase": "perfed.core.rounds",
    "Selection": "perfed.core.rounds",
    "Run": "perfed.training.results",
}
__all__ = [
    "Cohort",
    "Down",
    "Method",
    "Model",
    "Phase",
    "Problem",
    "Run",
    "Selection",
    "Up",
    "hyper",
    "load",
    "personalise",
    "run",
]


def __getattr__(name: str) -> Any:  # lazily: `perfed --help` and wrong settings need no torch
    if name not in _HOME:
        raise AttributeError(f"module 'perfed' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
