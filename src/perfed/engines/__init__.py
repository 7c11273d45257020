"""How a round is carried out. All engines compute the same function; they differ in speed."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed.core.discover import constants, describe, parse
from perfed.core.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfed.engines.base import Engine, Job
    from perfed.training.config import RunConfig

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


def pick_device(wanted: str) -> str:
    """The device a run uses."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise Problem(f"run.device must be auto, cpu or cuda, not '{wanted}'") from None
    if device.type not in ("cpu", "cuda"):
        raise Problem(f"run.device must be auto, cpu or cuda, not '{wanted}'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Problem("run.device is cuda, but this machine has no usable GPU")
    if device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise Problem(f"run.device is '{wanted}', but this machine's GPUs end at {torch.cuda.device_count() - 1}")
        torch.cuda.set_device(device)  # kernels run on the current one
    return wanted


def pick_engine(run: RunConfig, device: str, cohort: int) -> str:
    """The engine that suits: batched on a GPU, processes on several cores."""
    import os

    from perfed.engines.workers import cores

    if run.engine == "workers" and not device.startswith("cpu"):
        raise Problem("the engine 'workers' trains on the CPU: use --device cpu, or --engine vectorised on a GPU")
    if run.engine == "workers" and not hasattr(os, "fork"):
        raise Problem(
            "the engine 'workers' needs processes that fork, which this system lacks: use --engine sequential"
        )
    if run.engine != "auto":
        return run.engine
    if device.startswith("cuda"):
        return "vectorised"
    return "workers" if hasattr(os, "fork") and min(run.workers or cores(), cohort) > 1 else "sequential"


def can_record(run: RunConfig, device: str) -> bool:
    """Whether steps are recorded and use kernels of our own: on a GPU, with Triton, unless switched off."""
    return device.startswith("cuda") and run.fast and not run.compile and find_spec("triton") is not None


def make_engine(name: str, jobs: Sequence[Job], run: RunConfig) -> Engine:
    """An engine for one method in one or more runs."""
    from perfed.engines.local import Sequential
    from perfed.engines.vectorised import Vectorised
    from perfed.engines.workers import Workers

    device = jobs[0].method.model.device
    usual: dict[str, Any] = {"train_scores": run.train_scores, "memory": budget(run.state_memory, device)}
    if name == "workers":
        return Workers(*jobs, workers=run.workers, **usual)
    if name == "vectorised" and jobs[0].method.vectorised:
        few = tuple(2**power for power in range(13)) if run.compile else ()  # every number of rows compiles anew
        fast = can_record(run, str(device))
        return Vectorised(*jobs, block=run.block, compile=run.compile, sizes=few, fast=fast, **usual)
    return Sequential(*jobs, **usual)


def budget(megabytes: int, device: Any) -> tuple[int | None, ...]:
    """Bytes of clients' states on each device: half of what a GPU has free, then the host's."""
    import torch

    host = megabytes * 10**6 or None
    return (torch.cuda.mem_get_info(device)[0] // 2, host) if device.type == "cuda" else (host,)
