"""Which launch parameters are chosen, and when; the kernels here only count."""

import pytest
import torch

from perfed.core import tuning

CPU = torch.device("cpu")


class Kernel:
    """What `tuning` asks of a compiled kernel."""

    arg_names, do_not_specialize = ("out", "SPLIT", "BM"), ["SPLIT"]

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *args, grid, **options):
        self.compiled.append((args[1:], options))

    def __getitem__(self, grid):
        return lambda *args, **options: (self.launched.append(args[1:]), args[0].fill_(1))


@pytest.fixture
def kernel(monkeypatch):
    choices = [{"SPLIT": s, "BM": b, "warps": 2} for s, b in ((2, 16), (4, 16), (2, 32))]
    monkeypatch.setattr(tuning, "CANDIDATES", {"forward": choices})
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "undecided", lambda kind, shape, _: tuning._key(kind, shape) not in tuning._chosen)
    monkeypatch.setattr(tuning, "_save", lambda _: None)
    monkeypatch.setattr(tuning, "_time", lambda call, _: {(2, 16): 3.0, (4, 16): 1.0, (2, 32): 2.0}[call.args[1:]])
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return Kernel()


def launch(kernel, shape):
    out = torch.full((2,), 7.0)
    call = lambda c: tuning.Call(kernel, (1,), (out, c["SPLIT"], c["BM"]), {"num_warps": c["warps"]})
    tuning.run("forward", shape, call, CPU, (out,))
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

    first, second = tuning.prepared(run)
    assert len(runs) == 2
    assert [t.tolist() for t in runs[0]] == [[0.0, 0.0]] * 2  # nothing ran, and nothing is left as it was found
    assert first.tolist() == second.tolist() == [1.0, 1.0]
    assert len(tuning._chosen) == 2
    tuning.prepared(run)
    assert len(runs) == 3  # all is known: once is enough


def test_what_is_met_within_is_timed_by_whoever_began(kernel):
    with tuning.together():
        tuning.prepared(lambda: launch(kernel, (3, 8)))
        assert not kernel.compiled
    assert len(tuning._chosen) == 1


def test_an_error_leaves_nothing_waiting(kernel):
    def run():
        launch(kernel, (3, 8))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        tuning.prepared(run)
    assert not kernel.compiled
    launch(kernel, (3, 8))
    assert kernel.launched == [(4, 16)]


def test_where_memory_is_short_they_are_timed_one_by_one(kernel, monkeypatch):
    decide, tried = tuning._decide, []

    def short(met):
        tried.append(len(met))
        if len(met) > 1:
            raise torch.OutOfMemoryError("full")
        decide(met)

    monkeypatch.setattr(tuning, "_decide", short)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with tuning.together():
        launch(kernel, (3, 8))
        launch(kernel, (3, 9))
    assert tried == [2, 1, 1]
    assert len(tuning._chosen) == 2
