"""A toy method on every engine: ragged clients, stragglers, partial participation, and a run that is saved half way."""

import functools

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation
from perfed.training import files


def _fail(notice):
    raise AssertionError(notice)


def _recorded(*job):
    pytest.importorskip("triton", reason="recorded steps need Triton")
    return Vectorised(*job, fast=True, notice=_fail)


ENGINES = {
    "vectorised": Vectorised,
    "vectorised in blocks": lambda *job: Vectorised(*job, block=2, sizes=(2, 3)),
    "compiled": lambda *job: Vectorised(*job, compile="eager", sizes=(3,), notice=_fail),
    "recorded": _recorded,
    "workers": lambda *job: Workers(*job, workers=2),
    "resumed": Sequential,
}
SIZES = (11, 7, 9, 3, 12)  # less than a batch, not a multiple of it, and more
SLOW = ("compiled",)
everywhere = pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ENGINES]
)


def toy_model(network="plain", dtype=torch.float64):
    return Model(toy.NETWORKS[network], dtype=dtype)


def run(make, engine=Sequential, clients=None, rounds=2, saved=None):
    """Train a few rounds in which some clients end early, and evaluate; the state goes through the file `saved`."""
    clients = clients or toy.toy_clients(SIZES)
    start = lambda **more: Federation(engine(Job(make(), clients, seed=5)), faults=Faults(stragglers=0.5), **more)
    federation, cohorts = start(), toy.COHORTS[:rounds]
    if saved is not None:
        federation.step(cohorts[0])
        states = {str(id): state for id, state in checks.states_of(federation).items()}
        files.save_tree(saved, {"server": federation.server, "states": states})
        loaded = files.load_tree(saved)
        known, extension = federation.known.save(), federation.engine.save_extension(0)
        federation = start(server=loaded["server"], round=1, traffic=federation.traffic)
        federation.known.restore(known)
        federation.engine.restore_extension(0, extension)
        federation.engine.states[0].update((int(id), state) for id, state in loaded["states"].items())
        cohorts = cohorts[1:]
    return checks.play(federation.engine, cohorts, federation)


def agrees(make, engine, tmp_path, tolerance=1e-12, **how):
    """Assert that an engine gives what the sequential one does."""
    saved = tmp_path / "state.safetensors" if engine == "resumed" else None
    checks.compare(run(make, ENGINES[engine], saved=saved, **how), _expected(make, **how), engine, tolerance)


@functools.cache
def _expected(make, **how):
    return run(make, **how)
