"""Launch parameters of the kernels: chosen by timing once for each shape, and kept on disk for the next run."""

# Kernels are called through brackets with plain numbers, and arguments of a traced node can be anything.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.accel.cuda_graph import capture

Choice = dict[str, int]


class Call(NamedTuple):
    """Hold one launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, int]
    after: Call | None = None  # the launch that follows it

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)
        if self.after is not None:
            self.after()

    def compile(self) -> None:
        """Compile the kernel without running it."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)

    def each(self) -> list[Call]:
        """Return this launch and those that follow it."""
        return [self] if self.after is None else [self, *self.after.each()]

    def form(self) -> tuple[Any, ...]:
        """Return what the compiled code depends on: calls of one form share it."""
        free = set(self.kernel.do_not_specialize)
        named = zip(self.kernel.arg_names, self.args, strict=False)
        kinds = [a.dtype if isinstance(a, Tensor) else a for name, a in named if name not in free]
        return (self.kernel, *kinds, *sorted(self.options.items()))


Launch = Callable[[Choice], Call]


class _Met(NamedTuple):
    """Remember a shape that has still to be timed."""

    kind: str
    launch: Launch
    device: torch.device


def _grid(names: str, *rows: tuple[int, ...]) -> list[Choice]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# The winners of a wide search on one H200. They are few, because each but SPLIT is compiled, in about half a second.
CANDIDATES: dict[str, list[Choice]] = {
    "forward": _grid("BM BN BK warps stages", (128, 64, 16, 2, 3), (128, 64, 32, 2, 3), (256, 64, 32, 2, 2)),
    "weights": _grid(
        "BM BK SPLIT TURNED FUSED warps stages",
        (32, 64, 2, 0, 0, 2, 3), (32, 64, 16, 0, 0, 2, 3), (32, 128, 8, 0, 0, 2, 3), (32, 128, 16, 0, 0, 2, 3),
        (16, 128, 16, 1, 0, 2, 3), (16, 128, 32, 1, 0, 2, 3), (32, 64, 16, 0, 1, 2, 3), (32, 128, 16, 0, 1, 2, 3),
    ),
    "inputs": _grid("BM BO warps stages", (64, 64, 4, 3), (256, 16, 4, 3)),
}  # fmt: skip

_chosen: dict[tuple[Any, ...], Choice] = {}
_loaded: set[Path] = set()
_untimed: set[tuple[Any, ...]] = set()  # chosen because memory was short: not for the next run
_later: dict[Any, _Met] | None = None  # inside `shapes_only`: the shapes that have been met, by their keys
seconds = 0.0  # spent on tuning in this process


def _key(kind: str, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return (kind, *shape[1:])  # whatever the number of clients: they come and go


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
    _loaded.discard(path)
    _load(device)  # what another process has written since
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [[list(key), choice] for key, choice in _chosen.items() if key not in _untimed]
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(rows))
        new.replace(path)
    except OSError:
        pass  # a read-only home: tuned anew next time


def undecided(kind: str, shape: tuple[Any, ...], device: torch.device) -> bool:
    """Return True if launches of this shape have still to be timed."""
    _load(device)
    return device.type == "cuda" and _key(kind, shape) not in _chosen and not torch.cuda.is_current_stream_capturing()


def choice(kind: str, shape: tuple[Any, ...], device: torch.device) -> Choice:  # noqa: ARG001
    """Return what was chosen; the first candidate where nothing was timed."""
    return _chosen.get(_key(kind, shape), CANDIDATES[kind][0])


@contextlib.contextmanager
def shapes_only() -> Iterator[dict[Any, _Met]]:
    """Launch nothing that has still to be timed: such kernels give zeros, and results are good for their shapes alone.

    Yields the shapes that have been met.
    """
    global _later
    before, _later = _later, {}
    try:
        yield _later
    finally:
        _later = before


def fits(run: Callable[[], Any]) -> bool:
    """Run a function, and return True if the memory was enough; if not, what it used has been given back."""
    try:
        run()
    except torch.OutOfMemoryError:
        pass
    else:
        return True
    torch.cuda.empty_cache()  # only here: until its error is gone, what the function used is in use
    return False


def prepared(run: Callable[[], Any]) -> Any:
    """Run a function whose shapes are all timed first; where they do not fit into memory at once, as it goes.

    They are timed together, because then the compiler has work for every core.
    """
    assert _later is None, "nobody else may take zeros for results"
    out: list[Any] = []

    def whole() -> None:
        with shapes_only() as met:
            out.append(run())
        if met:  # then kernels have not run
            out.clear()
            decide(met)

    return out[0] if fits(whole) and out else run()


def decide(met: dict[Any, _Met]) -> None:
    """Time every candidate of these shapes and keep the fastest of each."""
    global seconds
    began = time.monotonic()
    if not fits(lambda: _decide(met)):  # all of them need their memory at the same time
        for key, shape in met.items():
            if not fits(lambda single={key: shape}: _decide(single)):
                _chosen[key] = CANDIDATES[shape.kind][0]
                _untimed.add(key)
    seconds += time.monotonic() - began


def _decide(met: dict[Any, _Met]) -> None:
    device = next(iter(met.values())).device
    calls = {key: [shape.launch(c) for c in CANDIDATES[shape.kind]] for key, shape in met.items()}
    forms = {call.form(): call for candidates in calls.values() for first in candidates for call in first.each()}
    enter = lambda: torch.cuda.set_device(device)  # a thread begins with the first one
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), initializer=enter) as pool:  # the compiler is not Python
        list(pool.map(Call.compile, forms.values()))
    for key, shape in met.items():
        times = [(_time(call, device), place) for place, call in enumerate(calls[key])]
        _chosen[key] = CANDIDATES[shape.kind][min(times)[1]]
    _save(device)


def run(kind: str, shape: tuple[Any, ...], launch: Launch, device: torch.device, into: Sequence[Tensor]) -> None:
    """Launch a kernel with the best parameters, finding them first where none are known.

    Args:
        kind: which of the `CANDIDATES`.
        shape: what the best parameters depend on; its first number, the clients, is not looked at.
        launch: makes the launch from parameters.
        device: where it runs.
        into: the tensors that it writes.
    """
    if undecided(kind, shape, device):
        key, met = _key(kind, shape), _Met(kind, launch, device)
        if _later is not None:
            _later.setdefault(key, met)
            for tensor in into:
                tensor.zero_()
            return
        decide({key: met})
    launch(choice(kind, shape, device))()


def _time(call: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Return milliseconds of some launches, from a recorded graph: a small kernel is done before its launch is."""
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
