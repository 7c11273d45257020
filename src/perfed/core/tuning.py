"""Launch parameters of the kernels: chosen by timing once for each shape, kept on disk for the next run."""

# Kernels are called through brackets with plain numbers, and arguments of a traced node can be anything.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfed.core.capture import capture

Choice = dict[str, int]


class Call(NamedTuple):
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, int]
    after: Call | None = None  # what it entails

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)
        if self.after is not None:
            self.after()

    def compile(self) -> None:
        """Make it ready without running it."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)
        if self.after is not None:
            self.after.compile()


Launch = Callable[[Choice], Call]


def _grid(names: str, *rows: tuple[int, ...]) -> list[Choice]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# Few, because each but SPLIT is compiled once (about half a second): those that won in a wide search on one H200.
CANDIDATES: dict[str, list[Choice]] = {
    "forward": _grid("BM BN BK warps stages", (128, 64, 16, 2, 3), (128, 64, 32, 2, 3), (256, 64, 32, 2, 2)),
    "weights": _grid(
        "BM BK SPLIT TURNED warps stages",
        (32, 64, 2, 0, 2, 3), (32, 64, 16, 0, 2, 3), (32, 128, 8, 0, 2, 3), (32, 128, 16, 0, 2, 3),
        (16, 128, 16, 1, 2, 3), (16, 128, 32, 1, 2, 3),
    ),
    "inputs": _grid("BM BO warps stages", (64, 64, 4, 3), (256, 16, 4, 3)),
}  # fmt: skip

_chosen: dict[tuple[Any, ...], Choice] = {}
_loaded: set[Path] = set()
seconds = 0.0  # spent on tuning in this process


def _key(kind: str, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return (kind, *(s for at, s in enumerate(shape) if at != 0))  # not by the number of clients: they come and go


def _store(device: torch.device) -> Path:
    import triton

    home = Path(os.environ.get("PERFED_CACHE") or Path.home() / ".cache" / "perfed")
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return home / f"kernels-{name}-torch{torch.__version__.split('+')[0]}-triton{triton.__version__}.json"


def _load(device: torch.device) -> None:
    if device.type == "cuda" and (path := _store(device)) not in _loaded:
        _loaded.add(path)
        try:
            for key, choice in json.loads(path.read_text()):
                if choice in CANDIDATES.get(key[0], []):  # else from another version
                    _chosen.setdefault(tuple(key), choice)
        except (OSError, ValueError, TypeError, IndexError):
            pass  # none yet, or not readable: tuned anew


def _save(device: torch.device) -> None:
    path = _store(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [[list(key), choice] for key, choice in _chosen.items()]
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(rows))
        new.replace(path)
    except OSError:
        pass  # a read-only home: tuned anew next time


def undecided(kind: str, shape: tuple[Any, ...], device: torch.device) -> bool:
    """Whether launches of this shape have still to be timed."""
    _load(device)
    return device.type == "cuda" and _key(kind, shape) not in _chosen and not torch.cuda.is_current_stream_capturing()


def choice(kind: str, shape: tuple[Any, ...], device: torch.device) -> Choice:  # noqa: ARG001
    """What was chosen; the first candidate where nothing was timed."""
    return _chosen.get(_key(kind, shape), CANDIDATES[kind][0])


def decide(kind: str, shape: tuple[Any, ...], launch: Launch, device: torch.device) -> None:
    """Time every candidate and keep the fastest."""
    global seconds
    began = time.monotonic()
    calls = [launch(c) for c in CANDIDATES[kind]]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # the compiler is not Python: it runs in parallel
        list(pool.map(Call.compile, calls))
    times = [(_time(call, device), at) for at, call in enumerate(calls)]
    _chosen[_key(kind, shape)] = CANDIDATES[kind][min(times)[1]]
    _save(device)
    seconds += time.monotonic() - began


def run(kind: str, shape: tuple[Any, ...], launch: Launch, device: torch.device) -> None:
    """Launch with the best parameters known, finding them first where there are none."""
    if undecided(kind, shape, device):
        decide(kind, shape, launch, device)
    launch(choice(kind, shape, device))()


def _time(call: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Milliseconds of so many launches, from a recorded graph: a small kernel is done before its launch is."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except OutOfResources:  # more shared memory than this GPU has
        return float("inf")

    def launches() -> None:
        for _ in range(repeats):
            call()

    graph = capture(launches, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
