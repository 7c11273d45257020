"""Which launch parameters are chosen, and when; the kernels here only count."""

import weakref

import pytest
import torch

from perfed.accel import autotune

CPU = torch.device("cpu")


class Kernel:
    """What `tuning` asks of a compiled kernel."""

    arg_names, do_not_specialize = ("out", "SPLIT", "BM"), ["SPLIT"]

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *args, grid, **options):
        self.compiled.append((args[1:3], options))

    def __getitem__(self, grid):
        return lambda *args, **options: (self.launched.append(args[1:3]), args[0].fill_(1))


@pytest.fixture
def kernel(monkeypatch):
    choices = [{"SPLIT": s, "BM": b, "warps": 2} for s, b in ((2, 16), (4, 16), (2, 32))]
    monkeypatch.setattr(autotune, "CANDIDATES", {"forward": choices})
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr(
        autotune, "undecided", lambda kind, shape, _: autotune._key(kind, shape) not in autotune._chosen
    )
    monkeypatch.setattr(autotune, "_save", lambda _: None)
    monkeypatch.setattr(autotune, "_time", lambda call, _: {(2, 16): 3.0, (4, 16): 1.0, (2, 32): 2.0}[call.args[1:]])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return Kernel()


def launch(kernel, shape):
    out = torch.full((2,), 7.0)
    call = lambda c: autotune.Call(kernel, (1,), (out, c["SPLIT"], c["BM"]), {"num_warps": c["warps"]})
    autotune.run("forward", shape, call, CPU, (out,))
    return out


def test_the_fastest_is_chosen_once(kernel):
    assert launch(kernel, (25, 8)).tolist() == [1.0, 1.0]
    assert kernel.launched == [(4, 16)]
    assert sorted(args[1] for args, _ in kernel.compiled) == [16, 32]  # SPLIT is no other code
    launch(kernel, (10, 8))  # another number of clients is no other shape
    assert kernel.launched == [(4, 16)] * 2
    assert len(kernel.compiled) == 2


def test_shapes_that_are_met_together_run_only_when_all_are_timed(kernel):
    runs = []

    def run():
        runs.append([launch(kernel, (3, 8)), launch(kernel, (3, 9))])
        return runs[-1]

    first, second = autotune.prepared(run)
    assert len(runs) == 2
    assert [t.tolist() for t in runs[0]] == [[0.0, 0.0]] * 2  # nothing ran, and nothing is left as it was found
    assert first.tolist() == second.tolist() == [1.0, 1.0]
    assert len(autotune._chosen) == 2
    autotune.prepared(run)
    assert len(runs) == 3  # all is known: once is enough


def test_nobody_takes_zeros_for_results(kernel):
    with autotune.shapes_only(), pytest.raises(AssertionError, match="zeros for results"):
        autotune.prepared(lambda: launch(kernel, (3, 8)))
    assert not autotune._chosen


def test_where_only_shapes_are_of_use_nothing_is_timed(kernel):
    with autotune.shapes_only():
        assert launch(kernel, (3, 8)).tolist() == [0.0, 0.0]
    assert not autotune._chosen
    assert not kernel.compiled
    assert launch(kernel, (3, 8)).tolist() == [1.0, 1.0]


def test_an_error_leaves_nothing_waiting(kernel):
    def run():
        launch(kernel, (3, 8))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        autotune.prepared(run)
    assert not kernel.compiled
    launch(kernel, (3, 8))
    assert kernel.launched == [(4, 16)]


class Full:
    """A memory with room for so many tensors of a kind."""

    def __init__(self, room):
        self.room, self.kept = room, weakref.WeakSet()

    def take(self):
        if len(self.kept) >= self.room:
            raise torch.OutOfMemoryError("full")
        tensor = torch.zeros(1)
        self.kept.add(tensor)
        return tensor


def scratch(kernel, memory, shape):
    """A launch that needs memory of its own for each candidate."""
    out = torch.zeros(2)
    call = lambda c: autotune.Call(kernel, (1,), (out, c["SPLIT"], c["BM"], memory.take()), {})
    autotune.run("forward", shape, call, CPU, (out,))


@pytest.mark.parametrize(("room", "chosen"), [(6, (4, 16)), (3, (4, 16)), (2, (2, 16))])
def test_where_memory_is_short(kernel, monkeypatch, room, chosen):
    """All at once, one by one, or not at all: then the first candidate will do."""
    memory, seen = Full(room), []
    monkeypatch.setattr(autotune, "_time", lambda call, _: {(2, 16): 3.0, (4, 16): 1.0, (2, 32): 2.0}[call.args[1:3]])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(len(memory.kept)))
    with autotune.shapes_only() as met:
        scratch(kernel, memory, (3, 8))
        scratch(kernel, memory, (3, 9))
    autotune.decide(met)
    assert not any(seen), "what did not fit must be let go before anything is tried again"
    assert len(seen) == {6: 0, 3: 1, 2: 3}[room]
    assert [(c["SPLIT"], c["BM"]) for c in autotune._chosen.values()] == [chosen] * 2


def test_what_does_not_fit_while_shapes_are_met_runs_as_it_goes(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    memory = Full(1)

    def run():
        for shape in ((3, 8), (3, 9)):
            kept = memory.take()
            out = torch.zeros(2)
            call = lambda c, kept=kept, out=out: autotune.Call(kernel, (1,), (out, c["SPLIT"], c["BM"]), {})
            autotune.run("forward", shape, call, CPU, (out,))
            del kept, call
        return out

    assert autotune.prepared(run).tolist() == [1.0, 1.0]
    assert len(autotune._chosen) == 2
