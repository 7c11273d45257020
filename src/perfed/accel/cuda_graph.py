"""Launches recorded as a CUDA graph, and the queues in which that happens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def queue(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Return the queue of this priority, always the same one: libraries keep memory for every queue that they see."""
    return torch.cuda.Stream(device, priority=priority)


def capture(run: Callable[[], None], device: torch.device, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record what `run` launches, in a queue of high priority: what runs beside it takes what it leaves free.

    This is done by hand because `torch.cuda.graph` collects garbage and hands all free memory back every time.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(queue(device, -1)):
        graph.capture_begin(pool=pool)
        try:
            run()
        except BaseException:  # this error tells more than that of ending the recording
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph
