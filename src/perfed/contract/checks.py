"""The checks of what follows from the rules: engines agree, training goes on after saving, a method learns.

No check knows a method: each takes a method's catalog entry, makes instances with various settings, runs a few rounds
on the toy federation in float64, and compares. Where something is wrong, it raises AssertionError with a sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from perfed.contract.toy import (
    CLASSES,
    COHORTS,
    NETWORKS,
    SIZES,
    TASKS,
    disagreeing_clients,
    job,
    maker,
    networks,
    task_clients,
    task_maker,
    toy_clients,
)
from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.networks import Networks
from perfed.core.rates import Rates
from perfed.core.tree import leaves
from perfed.engines.base import Engine, Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate, step
from perfed.federation.optimizers import ServerOptimizer
from perfed.training import files
from perfed.training.catalog import Entry, methods

CLOSE = 1e-9
MakeEngine = Callable[..., Engine]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that a short training ends with."""

    server: Any
    states: Any
    models: dict[int, dict[str, Tensor]]
    scores: Any
    traffic: Any


def play(engine: Engine, cohorts: Any = COHORTS, federation: Federation | None = None) -> Outcome:
    """Train a few rounds, evaluate, and close the engine.

    Args:
        engine: whoever trains; its first run is played.
        cohorts: the clients of each round.
        federation: a server to go on from; None: a new one.

    Returns:
        Everything that the training ends with.
    """
    federation = federation or Federation(engine)
    try:
        for cohort in cohorts:
            federation.step(cohort)
        models: dict[int, dict[str, Tensor]] = {}
        scores = federation.evaluate(models.__setitem__)
    finally:
        engine.close()
    states = {str(id): state for id, state in states_of(federation).items()}
    return Outcome(federation.server, states, models, scores.tables, dataclasses.asdict(federation.traffic))


def states_of(federation: Federation) -> dict[int, Any]:
    """Return the states of the clients that have taken part."""
    return dict(federation.engine.states[federation.run])


def difference(a: Any, b: Any) -> float:
    """Return the largest relative difference between two trees of tensors.

    Args:
        a: a tree.
        b: the tree that it is compared with.

    Returns:
        The largest difference of two tensors, over the norm of that in `b`; infinite if the trees' forms differ.
    """
    left, right = leaves(a), leaves(b)
    if len(left) != len(right):
        return math.inf
    worst = 0.0
    for p, q in zip(left, right, strict=True):
        if isinstance(p, Tensor) != isinstance(q, Tensor):
            return math.inf
        if not isinstance(p, Tensor):
            worst = max(worst, 0.0 if p == q else math.inf)
        elif p.shape != q.shape or not torch.equal(p.isnan(), q.isnan()):
            return math.inf
        elif p.numel():
            p, q = p.double().nan_to_num(), q.double().nan_to_num()
            worst = max(worst, float((p - q).norm() / q.norm().clamp_min(1e-12)))
    return worst


def compare(outcome: Outcome, expected: Outcome, title: str, tolerance: float = CLOSE) -> None:
    """Assert that two outcomes agree in server, clients, models, scores and bytes.

    Args:
        outcome: what was found.
        expected: what it has to be.
        title: what the outcome is of, for the sentence.
        tolerance: largest relative difference; 0: the same bits.
    """
    for field in dataclasses.fields(Outcome):
        worst = difference(getattr(outcome, field.name), getattr(expected, field.name))
        assert worst <= tolerance, f"{title} differs in {field.name} by {worst:.1e} (relative)"


JOBS: dict[str, Callable[[Job], Engine]] = {
    "workers": lambda job: Workers(job, workers=2),
    "vectorised": Vectorised,
    "vectorised in blocks": lambda job: Vectorised(job, block=2, sizes=(2, 3)),
}
ENGINES: dict[str, MakeEngine] = {  # each takes a method, clients, and perhaps what happens to uploads
    name: lambda *about, make=make: make(job(*about)) for name, make in JOBS.items()
}


def reference(method: Method, clients: Clients | None = None) -> Outcome:
    """Train a method with the sequential engine: the outcome that all others are compared with.

    Args:
        method: an instance.
        clients: whom it is trained with; None: those of the toy federation.
    """
    return play(Sequential(job(method, clients)))


# ---------------------------------------------------------------------- the checks


def check_engines(entry: Entry, network: str, engine: str) -> None:
    """Compare an engine with the sequential one: server, clients, models, scores and bytes.

    Args:
        entry: the method.
        network: plain, norm or conv.
        engine: a name out of ENGINES.
    """
    make = maker(entry, network)
    if network not in networks(entry) or (engine.startswith("vectorised") and not make().vectorised):
        return
    compare(play(ENGINES[engine](make(), toy_clients())), reference(make()), f"{engine} ({network} network)")


def check_networks(entry: Entry) -> None:
    """Compare all engines with the sequential one where clients have networks that differ."""
    builds = {name: NETWORKS[name] for name in networks(entry)}
    several = Networks.of_one_width(builds, [id % len(builds) for id in range(len(SIZES))], dtype=torch.float64)
    method = dataclasses.replace(maker(entry)(), model=several.models[0]).at(networks=several)
    for name, engine in ENGINES.items():
        if method.vectorised or not name.startswith("vectorised"):
            compare(play(engine(method)), reference(method), f"{name} (networks that differ)")


def _fail(notice: str) -> None:
    """Let a check fail with what an engine has to say: that it ran something else than was asked for."""
    raise AssertionError(notice)


def check_compiled(
    entry: Entry, backend: str = "aot_eager", networks: tuple[str, ...] = ("norm",), twice: bool = False
) -> None:
    """Compare compiled steps of the vectorised engine with plain ones.

    Args:
        entry: the method.
        backend: what torch.compile compiles with.
        networks: names of networks.
        twice: compile the steps of a second instance, with other settings.
    """
    for network in networks:
        make = maker(entry, network)
        if not make().vectorised:
            return
        for method in (make(epochs=1), make(epochs=1, lr=0.02, weight_decay=0.0))[: 1 + twice]:
            engine = Vectorised(job(method), compile=backend, sizes=(3,), notice=_fail)
            expected = play(Sequential(job(method)), COHORTS[:2])
            compare(play(engine, COHORTS[:2]), expected, f"compiled by {backend}")


def check_together(entry: Entry) -> None:
    """Compare runs with different seeds and learning rates, trained in one batch, with each of them alone."""
    rates: dict[int, dict[str, Any]] = {0: {}, 3: {}, 7: {"lr": 0.02}}  # by seed
    clients, rounds = toy_clients(), 2
    make = lambda changed: maker(entry, "norm")(epochs=1, **changed)  # each with a Model of its own, as runs have
    if not make({}).vectorised:
        return
    jobs = lambda: [job(make(changed), clients, seed=seed) for seed, changed in rates.items()]
    alone, engine = [Federation(Vectorised(each)) for each in jobs()], Vectorised(*jobs())
    batched = [Federation(engine, run) for run in range(len(rates))]
    for _ in range(rounds):
        step(batched)
        for federation in alone:
            federation.step()
    for federation, single, scores in zip(batched, alone, evaluate(batched, [None] * len(batched)), strict=True):
        pairs = {
            "its server": (federation.server, single.server),
            "its clients": (states_of(federation), states_of(single)),
            "its scores": (scores.tables, single.evaluate().tables),
            "its traffic": (dataclasses.asdict(federation.traffic), dataclasses.asdict(single.traffic)),
        }
        for name, pair in pairs.items():
            worst, title = difference(*pair), f"the run with seed {federation.seed} in a batch of several"
            assert worst <= CLOSE, f"{title} differs in {name} by {worst:.1e} (relative)"
    servers = [leaves(federation.server) for federation in alone]
    assert not servers[0] or difference(servers[0], servers[1]) > 0, "another seed changes nothing"


def check_options(
    entry: Entry, engine: str = "vectorised", optimizer: ServerOptimizer | None = None, network: str = "norm"
) -> None:
    """Compare an engine with the sequential one under a learning rate that changes, with clipping.

    Args:
        entry: the method.
        engine: a name out of ENGINES.
        optimizer: the server's; None: it has none.
        network: plain, norm or conv.
    """
    make, rates = maker(entry, network), Rates("cosine", rounds=len(COHORTS))
    if engine.startswith("vectorised") and not make().vectorised:
        return

    def outcome(kind: Callable[[Job], Engine]) -> Outcome:
        trained = kind(Job(make(clip=0.5), toy_clients(), seed=5, rates=rates))
        return play(trained, federation=Federation(trained, optimizer=optimizer))

    compare(outcome(JOBS[engine]), outcome(Sequential), f"{engine} with a schedule and clipping")


def check_tasks(entry: Entry) -> None:
    """Check that a method trains on every task, alike on two engines; or that it says which one it is not made for."""
    for task in TASKS:
        make = task_maker(entry, task)
        if isinstance(make, Problem):
            assert task.kind in str(make), f"it does not name the task that it refuses, {task.kind}: {make}"
            continue
        clients, once = task_clients(task), lambda engine: play(engine, COHORTS[:2])
        expected = once(Sequential(job(make(epochs=1), clients)))
        test = expected.scores["personal"]["test"]
        assert test["loss"].isfinite().any(), f"no client has a loss in {task.in_words}"
        if make().vectorised:
            compare(once(Vectorised(job(make(epochs=1), clients))), expected, f"{task.in_words}, vectorised,")


def check_saved(entry: Entry) -> None:
    """Check that training goes on unchanged after its state was saved and loaded."""
    make = maker(entry, "norm")
    expected = reference(make())
    half = Federation(Sequential(job(make())))
    half.step(COHORTS[0])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        files.save_tree(
            path, {"server": half.server, "states": {str(id): state for id, state in states_of(half).items()}}
        )
        loaded = files.load_tree(path)
    engine = Sequential(job(make()))
    rest = Federation(engine, server=loaded["server"], round=1, traffic=half.traffic)
    rest.known.restore(half.known.save())
    engine.restore_extension(0, half.engine.save_extension(0))
    engine.states[0].update((int(id), state) for id, state in loaded["states"].items())
    compare(play(engine, COHORTS[1:], rest), expected, "a run that was saved and loaded", tolerance=0)


def disagreeing_accuracy(entry: Entry, network: str, seed: int) -> float:
    """Return the mean test accuracy after eight rounds with clients who contradict each other.

    Args:
        entry: the method.
        network: plain, norm or conv.
        seed: of the run.
    """
    clients = disagreeing_clients()
    train = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 3}
    outcome = play(Sequential(Job(maker(entry, network)(**train), clients, seed)), [range(len(clients))] * 8)
    return float(outcome.scores["personal"]["test"]["accuracy"].mean())


@functools.cache
def shared_accuracy(network: str) -> float:
    """Return the best accuracy, of three starts, that FedAvg's shared model reaches on contradicting clients."""
    return max(disagreeing_accuracy(methods()["fedavg"], network, seed) for seed in range(3))


def check_learns(entry: Entry) -> None:
    """Check that a method learns where clients contradict each other.

    A personalised method has to beat FedAvg, a global one chance.
    """
    network = networks(entry)[0]
    shared = shared_accuracy(network)
    needed = 1.1 / CLASSES if entry.evaluates == "global" else shared + 0.1
    best = 0.0
    for seed in range(3):  # up to three starts, as clustering is used: a bad one puts all clients in one cluster
        best = max(best, disagreeing_accuracy(entry, network, seed))
        if best > needed:
            return
    raise AssertionError(
        f"accuracy {best:.2f} where clients disagree, FedAvg's is {shared:.2f}: not above {needed:.2f}"
    )
