"""Launch parameters of the kernels: chosen by timing once for each shape, kept on disk for the next run."""

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
        """Make its kernel ready without running it."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.options)

    def each(self) -> list[Call]:
        """It and what it entails."""
        return [self] if self.after is None else [self, *self.after.each()]

    def form(self) -> tuple[Any, ...]:
        """Calls of the same form are compiled to the same code."""
        free = set(self.kernel.do_not_specialize)
        named = zip(self.kernel.arg_names, self.args, strict=False)
        kinds = [a.dtype if isinstance(a, Tensor) else a for name, a in named if name not in free]
        return (self.kernel, *kinds, *sorted(self.options.items()))


Launch = Callable[[Choice], Call]


class _Met(NamedTuple):
    """A shape that has still to be timed."""

    kind: str
    launch: Launch
    device: torch.device


def _grid(names: str, *rows: tuple[int, ...]) -> list[Choice]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# Few, because each but SPLIT is compiled once (about half a second): those that won in a wide search on one H200.
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
_later: dict[Any, _Met] | None = None  # inside `together`: shapes by their keys
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
    """Whether launches of this shape have still to be timed."""
    _load(device)
    return device.type == "cuda" and _key(kind, shape) not in _chosen and not torch.cuda.is_current_stream_capturing()


def choice(kind: str, shape: tuple[Any, ...], device: torch.device) -> Choice:  # noqa: ARG001
    """What was chosen; the first candidate where nothing was timed."""
    return _chosen.get(_key(kind, shape), CANDIDATES[kind][0])


@contextlib.contextmanager
def together() -> Iterator[dict[Any, _Met]]:
    """Shapes that are met in here are timed at its end, all of them: then the compiler has work for every core.

    Meanwhile their kernels do not run, and give zeros: what is computed in here is of no use but for its shapes.
    """
    global _later
    assert _later is None, "nobody else may take zeros for results"
    _later = {}
    try:
        yield _later
        met = _later
    finally:
        _later = None
    if met:
        decide(met)


def fits(run: Callable[[], Any]) -> bool:
    """Run it; whether the memory was enough. What it held is given back only once its error is gone, so by then."""
    try:
        run()
    except torch.OutOfMemoryError:
        pass
    else:
        return True
    torch.cuda.empty_cache()
    return False


def prepared(run: Callable[[], Any]) -> Any:
    """What `run` returns; all its shapes are timed first, or where they do not fit into memory at once, as it goes."""
    out: list[Any] = []

    def whole() -> None:
        with together() as met:
            out.append(run())
        if met:  # of no use
            out.clear()

    return out[0] if fits(whole) and out else run()


def decide(met: dict[Any, _Met]) -> None:
    """Time every candidate of these shapes and keep the fastest of each."""
    global seconds
    began = time.monotonic()
    if not fits(lambda: _decide(met)):  # what each of them needs is held at the same time
        for key, one in met.items():
            if not fits(lambda some={key: one}: _decide(some)):
                _chosen[key] = CANDIDATES[one.kind][0]
                _untimed.add(key)
    seconds += time.monotonic() - began


def _decide(met: dict[Any, _Met]) -> None:
    device = next(iter(met.values())).device
    calls = {key: [one.launch(c) for c in CANDIDATES[one.kind]] for key, one in met.items()}
    forms = {call.form(): call for some in calls.values() for whole in some for call in whole.each()}
    enter = lambda: torch.cuda.set_device(device)  # a thread begins with the first one
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), initializer=enter) as pool:  # the compiler is not Python
        list(pool.map(Call.compile, forms.values()))
    for key, one in met.items():
        times = [(_time(call, device), at) for at, call in enumerate(calls[key])]
        _chosen[key] = CANDIDATES[one.kind][min(times)[1]]
    _save(device)


def run(kind: str, shape: tuple[Any, ...], launch: Launch, device: torch.device, into: Sequence[Tensor]) -> None:
    """Launch with the best parameters known, finding them first where there are none; `into` is what it writes."""
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
