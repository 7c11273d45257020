"""Which engine carries a run out, and on what device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from perfed.core.errors import Problem
from perfed.engines.base import Engine, Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers, cores
from perfed.training.config import RunConfig

COMPILED_SIZES = tuple(2**power for power in range(13))  # every other number of rows would be compiled anew


def pick_device(wanted: str) -> str:
    """Return the device of a run; `auto` is a GPU where there is one."""
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
        torch.cuda.set_device(device)  # kernels run on the current device
    return wanted


def pick_engine(run: RunConfig, device: str, cohort: int) -> str:
    """Return the name of the engine that suits: batched on a GPU, processes on several cores.

    Args:
        run: what was asked for.
        device: as `pick_device` returns it.
        cohort: clients in a round.
    """
    forks = hasattr(os, "fork")
    if run.engine == "workers" and not device.startswith("cpu"):
        raise Problem("the engine 'workers' trains on the CPU: use --device cpu, or --engine vectorised on a GPU")
    if run.engine == "workers" and not forks:
        raise Problem(
            "the engine 'workers' needs processes that fork, which this system lacks: use --engine sequential"
        )
    if run.engine != "auto":
        return run.engine
    if device.startswith("cuda"):
        return "vectorised"
    return "workers" if forks and min(run.workers or cores(), cohort) > 1 else "sequential"


def is_batched(run: RunConfig) -> bool:
    """Return True if cohorts are batches, which runs that are alike can share."""
    return pick_engine(run, pick_device(run.device), 2) == "vectorised"


def can_record(run: RunConfig, device: str) -> bool:
    """Return True if steps are recorded: on a GPU, with Triton, unless switched off."""
    return device.startswith("cuda") and run.fast and not run.compile and find_spec("triton") is not None


def make_engine(
    name: str, jobs: Sequence[Job], run: RunConfig, notice: Callable[[str], None] = warnings.warn
) -> Engine:
    """Make an engine for a method in one or more runs.

    Args:
        name: as `pick_engine` returns it.
        jobs: the runs.
        run: the settings of engines.
        notice: is told in one line what is not as somebody may expect.
    """
    device = jobs[0].method.model.device
    common: dict[str, Any] = {
        "train_scores": run.train_scores,
        "memory": _state_memory(run.state_memory, device),
        "notice": notice,
    }
    if name == "workers":
        return Workers(*jobs, workers=run.workers, **common)
    if name == "vectorised" and jobs[0].method.vectorised:
        sizes = COMPILED_SIZES if run.compile else ()
        fast = can_record(run, str(device))
        return Vectorised(*jobs, block=run.block, compile=run.compile, sizes=sizes, fast=fast, **common)
    return Sequential(*jobs, **common)


def _state_memory(megabytes: int, device: torch.device) -> tuple[int | None, ...]:
    """Return the bytes of clients' states on each device: half of what a GPU has free, then the host's."""
    host = megabytes * 10**6 or None
    return (torch.cuda.mem_get_info(device)[0] // 2, host) if device.type == "cuda" else (host,)
