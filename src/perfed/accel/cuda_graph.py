"""Launches recorded as a CUDA graph, and the queues in which that happens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def queue(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Always the same one: libraries keep memory for every queue that they have seen."""
    return torch.cuda.Stream(device, priority=priority)


def capture(run: Callable[[], None], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `run` launches, in a queue of high priority: what runs beside it takes what it leaves free.

    Not `torch.cuda.graph`, which every time collects garbage and hands all free memory back: dozens of times a run.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(queue(device, -1)):
        graph.capture_begin(pool=pool)
        try:
            run()
        except BaseException:  # what happened is more telling than that it cannot be ended
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
