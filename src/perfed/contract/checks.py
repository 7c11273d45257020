"""The checks of the contract, one function each.

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
from typing import Any, get_args

import torch
from torch import Tensor

from perfed.contract.toy import CLASSES, COHORTS, SIZES, disagreeing_clients, maker, networks, toy_clients
from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.tree import leaves, tree_map
from perfed.engines.base import Engine, EvaluationRequest, Job, Work
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate, step
from perfed.training import files
from perfed.training.catalog import RUN_SETS, Entry, methods

CLOSE = 1e-9
MakeEngine = Callable[[Method, Clients], Engine]


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


ENGINES: dict[str, MakeEngine] = {
    "workers": lambda method, clients: Workers(Job(method, clients, seed=5), workers=2),
    "vectorised": lambda method, clients: Vectorised(Job(method, clients, seed=5)),
    "vectorised in blocks": lambda method, clients: Vectorised(Job(method, clients, seed=5), block=2, sizes=(2, 3)),
}


def reference(method: Method, clients: Clients | None = None) -> Outcome:
    """Train a method with the sequential engine: the outcome that all others are compared with.

    Args:
        method: an instance.
        clients: whom it is trained with; None: those of the toy federation.
    """
    return play(Sequential(Job(method, clients or toy_clients(), seed=5)))


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
            engine = Vectorised(Job(method, toy_clients(), seed=5), compile=backend, sizes=(3,))
            expected = play(Sequential(Job(method, toy_clients(), seed=5)), COHORTS[:2])
            compare(play(engine, COHORTS[:2]), expected, f"compiled by {backend}")


def check_together(entry: Entry) -> None:
    """Compare runs with different seeds and learning rates, trained in one batch, with each of them alone."""
    settings: list[dict[str, Any]] = [{"seed": 0}, {"seed": 3}, {"seed": 7, "lr": 0.02}]
    clients, rounds = toy_clients(), 2
    make = lambda changed: maker(entry, "norm")(epochs=1, **changed)  # each with a Model of its own, as runs have
    if not make({}).vectorised:
        return
    jobs = lambda: [Job(make(changed), clients, seed=changed["seed"]) for changed in settings]
    alone, engine = [Federation(Vectorised(job)) for job in jobs()], Vectorised(*jobs())
    batched = [Federation(engine, run) for run in range(len(settings))]
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
            worst, title = difference(*pair), f"the run with seed {federation.method.seed} in a batch of several"
            assert worst <= CLOSE, f"{title} differs in {name} by {worst:.1e} (relative)"
    servers = [leaves(federation.server) for federation in alone]
    assert not servers[0] or difference(servers[0], servers[1]) > 0, "another seed changes nothing"


def check_statistics(entry: Entry) -> None:
    """Check that running statistics of BatchNorm move and stay finite."""
    make = maker(entry, "norm")
    method, outcome = make(), reference(make())
    model = method.model
    buffers = model.everything.mask & ~model.weights.mask
    client = dataclasses.replace(method, population=len(SIZES)).init_client()
    before = method.init_server(len(SIZES)), client, model.init(method.seed)
    start = model.init(method.seed)[buffers]
    assert len(leaves(before)), "a method without any tensors"
    moved = [thetas["personal"][buffers] for thetas in outcome.models.values()]
    assert any(difference(m, start) > 1e-6 for m in moved), "BatchNorm statistics never moved"
    assert all(m.isfinite().all() for m in moved), "BatchNorm statistics are not finite"


def _copied(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)


def check_pure(entry: Entry) -> None:
    """Check that none of the six functions writes into what it is given."""
    make = maker(entry, "norm")

    class Guard(Sequential):
        def _work(self, work: Work) -> Any:
            given = work.states, work.down.shared, work.down.own
            before = _copied(given)
            results = super()._work(work)
            assert difference(given, before) == 0, f"{type(work.task).__name__.lower()} changed its inputs in place"
            return results

    method = make()
    federation = Federation(Guard(Job(method, toy_clients(), seed=5)))
    for cohort in COHORTS:
        before = _copied(federation.server)
        server = federation.server
        federation.step(cohort)
        assert difference(server, before) == 0, "broadcast or aggregate changed the server's state in place"
    server, states = _copied(federation.server), states_of(federation)
    federation.evaluate()
    assert difference((federation.server, states_of(federation)), (server, states)) == 0, "personalise changed a state"


def check_repeatable(entry: Entry) -> None:
    """Check that equal seeds give equal bits, and another seed does not."""
    make = maker(entry)
    assert difference(reference(make()).models, reference(make()).models) == 0, "two equal runs differ"
    other = play(Sequential(Job(make(), toy_clients(), seed=6)))
    assert difference(reference(make()).models, other.models) > 0, "another seed changes nothing"


def check_saved(entry: Entry) -> None:
    """Check that training goes on unchanged after its state was saved and loaded."""
    make = maker(entry, "norm")
    expected = reference(make())
    half = Federation(Sequential(Job(make(), toy_clients(), seed=5)))
    half.step(COHORTS[0])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        files.save_tree(
            path, {"server": half.server, "states": {str(id): state for id, state in states_of(half).items()}}
        )
        loaded = files.load_tree(path)
    engine = Sequential(Job(make(), toy_clients(), seed=5))
    rest = Federation(engine, server=loaded["server"], round=1, traffic=half.traffic)
    engine.states[0].update((int(id), state) for id, state in loaded["states"].items())
    compare(play(engine, COHORTS[1:], rest), expected, "a run that was saved and loaded", tolerance=0)


def check_stable(entry: Entry) -> None:
    """Check that the forms of server and client states do not change between rounds."""
    method = maker(entry)()
    federation = Federation(Sequential(Job(method, toy_clients(), seed=5)))
    kind = lambda t: (tuple(t.shape), str(t.dtype)) if isinstance(t, Tensor) else type(t).__name__
    form = lambda tree: tree_map(kind, tree)
    server = form(federation.server)
    for cohort in COHORTS:
        federation.step(cohort)  # refuses a client's state of another form
        assert form(federation.server) == server, "the server's state changes its form"


def check_global(entry: Entry) -> None:
    """Check that a method which says that it evaluates one global model gives every client that one.

    Such clients are scored together.
    """
    method = maker(entry, "norm")()
    if not method.one_for_all:
        return
    engine = Sequential(Job(method, toy_clients(), seed=5))
    federation = Federation(engine)
    for cohort in COHORTS:
        federation.step(cohort)
    ids = list(range(len(SIZES)))
    ask = lambda id: EvaluationRequest(0, federation.round, [id], federation.show([id]), keep=True, score=False)
    each = [engine.evaluate([ask(id)])[0].models for id in ids]
    same = all(difference(models, each[0]) == 0 for models in each)
    assert same, "it says evaluates = 'global', but clients have different models"


def other_values(kind: Any, now: Any) -> list[Any]:
    """Return values of a hyper-parameter other than the one it has.

    Args:
        kind: its type.
        now: its value.
    """
    if get_args(kind):
        return [value for value in get_args(kind) if value != now]
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [now + 1, now + 2]
    if isinstance(now, float):
        return [now * 0.5 + 0.1, now * 0.5, now * 1.5, now + 1.0, now * 0.01]  # the last: a limit, made to bite
    return [part for part in ("head", "body", "none") if part != now]  # text names a part of the model


def check_settings(entry: Entry) -> None:
    """Check that changing any hyper-parameter changes the result, or is refused with a reason."""
    make = maker(entry)
    short = lambda method: play(Sequential(Job(method, toy_clients(), seed=5)), COHORTS[:2])
    before = short(make())
    for name, field in entry.fields.items():
        if name in RUN_SETS:
            continue
        outcomes = []
        for value in other_values(field.kind, getattr(make(), name)):
            try:
                after = short(make(**{name: value}))
            except Problem:
                outcomes.append("refused")
                continue
            pairs = ((getattr(after, part), getattr(before, part)) for part in ("models", "server", "traffic"))
            outcomes.append(max(difference(*pair) for pair in pairs))
            if outcomes[-1] > 0:
                break
        assert outcomes, f"no other value of '{name}' is known to try"
        assert any(o == "refused" or o > 0 for o in outcomes), f"hyper-parameter '{name}' changes nothing"


def disagreeing_accuracy(entry: Entry, network: str, seed: int) -> float:
    """Return the mean test accuracy after eight rounds with clients who contradict each other.

    Args:
        entry: the method.
        network: plain, norm or conv.
        seed: of the initial model.
    """
    clients = disagreeing_clients()
    train = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 3, "cohort": len(clients), "seed": seed}
    outcome = play(Sequential(Job(maker(entry, network)(**train), clients)), [range(len(clients))] * 8)
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
