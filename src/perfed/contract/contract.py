"""The contract every method keeps, as checks that run on any method file: `perfed check FILE`.

No check knows a method: each makes instances with various settings, runs a few rounds on a small ragged federation in
float64, and compares. A check raises AssertionError with a sentence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch import Tensor, nn

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.tree import leaves, tree_map
from perfed.engines.base import Asked, Engine
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Together, Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation, evaluate_together, step_together
from perfed.training import files
from perfed.training.catalog import RUN_SETS, Entry

FEATURES, CLASSES = 6, 3
SIZES = (23, 7, 41, 3, 12)  # less than a batch, not a multiple of it, and more
BATCH = 5
COHORTS = ((0, 2, 3), (1, 2, 4), (0, 1, 3))  # partial participation: everybody once, nobody always
CLOSE = 1e-9
MakeMethod = Callable[..., Method]
MakeEngine = Callable[[Method, Clients], Engine]


def plain_net() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def norm_net() -> nn.Module:
    """The same with BatchNorm and Dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def conv_net() -> nn.Module:
    """Convolutions, BatchNorm and Dropout, for methods that look into them."""
    block = nn.Sequential(nn.Conv2d(8, 8, (1, 2)), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 1), nn.Tanh(), block, nn.Flatten(), nn.Linear(32, CLASSES)
    )


NETWORKS = {"plain": plain_net, "norm": norm_net, "conv": conv_net}


def toy_clients(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Clients:
    """Ragged clients with random samples."""
    draw = torch.Generator().manual_seed(seed)

    def split(counts: list[int]) -> Split:
        x = torch.randn(sum(counts), FEATURES, generator=draw, dtype=torch.float64)
        return Split(x, torch.randint(0, CLASSES, (sum(counts),), generator=draw), tuple(counts))

    names = tuple(f"client_{id}" for id in range(len(sizes)))
    val, test = [max(n // 4, 1) for n in sizes], [n // 3 + 1 for n in sizes]
    return Clients(names, split(list(sizes)), split(val), split(test), CLASSES)


def disagreeing_clients(groups: int = 2, each: int = 3, samples: int = 40) -> Clients:
    """Groups of clients whose labels for the same inputs contradict each other: no single model fits all."""
    draw = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=draw, dtype=torch.float64)

    def split(count: int) -> Split:
        xs, ys = [], []
        for client in range(groups * each):
            y = torch.arange(count) % CLASSES
            xs.append(centres[y] + 0.5 * torch.randn(count, FEATURES, generator=draw, dtype=torch.float64))
            ys.append((y + client % groups) % CLASSES)
        return Split(torch.cat(xs), torch.cat(ys), (count,) * (groups * each))

    names = tuple(f"client_{id}" for id in range(groups * each))
    return Clients(names, split(samples), split(12), split(30), CLASSES)


def networks(entry: Entry) -> list[str]:
    """The networks that a method is checked with: those it accepts, the slow last one where it refuses the others."""
    suited: list[str] = []
    for name, build in NETWORKS.items():
        if name == "conv" and suited:
            break
        try:
            entry.load()(Model(build, dtype=torch.float64))
            suited.append(name)
        except Problem:
            continue
    return suited or list(NETWORKS)  # refused everywhere: the checks then say why


def maker(entry: Entry, network: str = "plain") -> MakeMethod:
    """A function that makes instances of a method for the toy, with settings under which everything is in use."""
    kind = entry.load()
    suited = networks(entry)
    model = Model(NETWORKS[network if network in suited else suited[0]], dtype=torch.float64)
    base = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01, "epochs": 2, "batch_size": BATCH, "cohort": 3}
    if "warmup" in entry.fields:
        base["warmup"] = 1  # rounds before a method's own begin: the toy has only a few

    def make(**changed: Any) -> Method:
        try:
            return kind(model, **{**base, **changed})
        except Problem:  # a method may refuse momentum; it must then work without
            if base["momentum"] == 0 or "momentum" in changed:
                raise
            base["momentum"] = 0.0
            return kind(model, **{**base, **changed})

    return make


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything a short training ends with."""

    server: Any
    states: Any
    models: dict[int, dict[str, Tensor]]
    values: Any
    traffic: Any


def play(engine: Engine, cohorts: Any = COHORTS, federation: Federation | None = None) -> Outcome:
    """A few rounds and an evaluation."""
    federation = federation or Federation(engine)
    try:
        for cohort in cohorts:
            federation.step(cohort)
        models: dict[int, dict[str, Tensor]] = {}
        values = federation.evaluate(lambda id, found: models.update({id: found}))
    finally:
        engine.close()
    states = {str(id): state for id, state in federation.states.items()}
    return Outcome(federation.server, states, models, values, dataclasses.asdict(federation.traffic))


def difference(a: Any, b: Any) -> float:
    """The largest relative difference between two trees of tensors; infinite where their forms differ."""
    one, other = leaves(a), leaves(b)
    if len(one) != len(other):
        return float("inf")
    worst = 0.0
    for p, q in zip(one, other, strict=True):
        if not isinstance(p, Tensor):
            worst = max(worst, 0.0 if p == q else float("inf"))
        elif p.shape != q.shape or not torch.equal(p.isnan(), q.isnan()):
            return float("inf")
        elif p.numel():
            p, q = p.double().nan_to_num(), q.double().nan_to_num()
            worst = max(worst, float((p - q).norm() / q.norm().clamp_min(1e-12)))
    return worst


def compare(found: Outcome, expected: Outcome, who: str, tolerance: float = CLOSE) -> None:
    """Assert that two outcomes agree in server, clients, models, scores and bytes."""
    for field in dataclasses.fields(Outcome):
        worst = difference(getattr(found, field.name), getattr(expected, field.name))
        assert worst <= tolerance, f"{who} differs in {field.name} by {worst:.1e} (relative)"


ENGINES: dict[str, MakeEngine] = {
    "workers": lambda m, c: Workers(m, c, seed=5, workers=2),
    "vectorised": lambda m, c: Vectorised(m, c, seed=5),
    "vectorised in blocks": lambda m, c: Vectorised(m, c, seed=5, block=2, sizes=(2, 3)),
}


def reference(method: Method, clients: Clients | None = None) -> Outcome:
    """What the sequential engine makes of a method."""
    return play(Sequential(method, clients or toy_clients(), seed=5))


# ---------------------------------------------------------------------- the checks


def check_engines(entry: Entry, network: str, engine: str) -> None:
    """Every engine ends with the same server, clients, models, scores and bytes as the sequential one."""
    make = maker(entry, network)
    if network not in networks(entry) or (engine.startswith("vectorised") and not make().vectorised):
        return
    compare(play(ENGINES[engine](make(), toy_clients())), reference(make()), f"{engine} ({network} network)")


def check_compiled(
    entry: Entry, backend: str = "aot_eager", networks: tuple[str, ...] = ("norm",), twice: bool = False
) -> None:
    """The vectorised engine agrees when its steps are compiled; `twice`: also a second instance with other settings."""
    for network in networks:
        make = maker(entry, network)
        if not make().vectorised:
            return
        for method in (make(epochs=1), make(epochs=1, lr=0.02, weight_decay=0.0))[: 1 + twice]:
            engine = Vectorised(method, toy_clients(), seed=5, compile=backend, sizes=(3,))
            expected = play(Sequential(method, toy_clients(), seed=5), COHORTS[:2])
            compare(play(engine, COHORTS[:2]), expected, f"compiled by {backend}")


def check_together(entry: Entry) -> None:
    """Runs with other seeds and another learning rate, trained in one batch, end as each does alone."""
    settings: list[dict[str, Any]] = [{"seed": 0}, {"seed": 3}, {"seed": 7, "lr": 0.02}]
    clients, rounds = toy_clients(), 2
    make = lambda changed: maker(entry, "norm")(epochs=1, **changed)  # each with a Model of its own, as runs have
    if not make({}).vectorised:
        return
    alone, batched = (
        [Federation(Vectorised(make(changed), clients, seed=changed["seed"])) for changed in settings] for _ in range(2)
    )
    together = Together([federation.engine for federation in batched])  # pyright: ignore[reportArgumentType]
    for _ in range(rounds):
        step_together(batched, together)
        for federation in alone:
            federation.step()
    for one, other, values in zip(batched, alone, evaluate_together(batched, together), strict=True):
        who = f"the run with seed {one.method.seed} in a batch of several"
        pairs = {
            "its server": (one.server, other.server),
            "its clients": (dict(one.states), dict(other.states)),
            "its scores": (values, other.evaluate()),
            "its traffic": (dataclasses.asdict(one.traffic), dataclasses.asdict(other.traffic)),
        }
        for what, (found, expected) in pairs.items():
            worst = difference(found, expected)
            assert worst <= CLOSE, f"{who} differs in {what} by {worst:.1e} (relative)"
    servers = [leaves(federation.server) for federation in alone]
    assert not servers[0] or difference(servers[0], servers[1]) > 0, "another seed changes nothing"


def check_statistics(entry: Entry) -> None:
    """Running statistics of BatchNorm move and stay finite."""
    make = maker(entry, "norm")
    method, found = make(), reference(make())
    model = method.model
    buffers = model.everything.mask & ~model.weights.mask
    client = dataclasses.replace(method, population=len(SIZES)).init_client()
    before = method.init_server(len(SIZES)), client, model.init(method.seed)
    start = model.init(method.seed)[buffers]
    assert len(leaves(before)), "a method without any tensors"
    moved = [one["personal"][buffers] for one in found.models.values()]
    assert any(difference(m, start) > 1e-6 for m in moved), "BatchNorm statistics never moved"
    assert all(m.isfinite().all() for m in moved), "BatchNorm statistics are not finite"


def _copied(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)


def check_pure(entry: Entry) -> None:
    """None of the six functions writes into what it is given."""
    make = maker(entry, "norm")

    class Guard(Sequential):
        def train(self, round: int, exchange: int, asked: Asked) -> Any:
            given = asked.states, asked.down.shared, asked.down.own
            before = _copied(given)
            result = super().train(round, exchange, asked)
            assert difference(given, before) == 0, "local changed its inputs in place"
            return result

    method = make()
    federation = Federation(Guard(method, toy_clients(), seed=5))
    for cohort in COHORTS:
        before = _copied(federation.server)
        server = federation.server
        federation.step(cohort)
        assert difference(server, before) == 0, "broadcast or aggregate changed the server's state in place"
    server, states = _copied(federation.server), dict(federation.states)
    federation.evaluate()
    assert difference((federation.server, dict(federation.states)), (server, states)) == 0, (
        "personalise changed a state"
    )


def check_repeatable(entry: Entry) -> None:
    """The same seed gives the same bits; another seed does not."""
    make = maker(entry)
    assert difference(reference(make()).models, reference(make()).models) == 0, "two equal runs differ"
    other = play(Sequential(make(), toy_clients(), seed=6))
    assert difference(reference(make()).models, other.models) > 0, "another seed changes nothing"


def check_saved(entry: Entry) -> None:
    """Training goes on unchanged after its state was saved and loaded."""
    make = maker(entry, "norm")
    expected = reference(make())
    half = Federation(Sequential(make(), toy_clients(), seed=5))
    half.step(COHORTS[0])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        files.save_tree(path, {"server": half.server, "states": {str(k): v for k, v in half.states.items()}})
        loaded = files.load_tree(path)
    engine = Sequential(make(), toy_clients(), seed=5)
    rest = Federation(engine, loaded["server"], round=1, traffic=half.traffic)
    rest.states.update((int(id), state) for id, state in loaded["states"].items())
    compare(play(engine, COHORTS[1:], rest), expected, "a run that was saved and loaded", tolerance=0)


def check_stable(entry: Entry) -> None:
    """The forms of server and client states do not change between rounds."""
    method = maker(entry)()
    federation = Federation(Sequential(method, toy_clients(), seed=5))
    kind = lambda t: (tuple(t.shape), str(t.dtype)) if isinstance(t, Tensor) else type(t).__name__
    form = lambda tree: tree_map(kind, tree)
    server = form(federation.server)
    for cohort in COHORTS:
        federation.step(cohort)  # refuses a client's state of another form
        assert form(federation.server) == server, "the server's state changes its form"


def check_global(entry: Entry) -> None:
    """Where a method says that it evaluates one global model, every client has that one: they are scored together."""
    method = maker(entry, "norm")()
    if not method.one_for_all:
        return
    engine = Sequential(method, toy_clients(), seed=5)
    federation = Federation(engine)
    for cohort in COHORTS:
        federation.step(cohort)
    for found in engine.models(federation.round, federation.show(list(range(len(SIZES))))).values():
        assert bool((found == found[0]).all()), "it says evaluates = 'global', but clients have different models"


def other_values(kind: Any, now: Any) -> list[Any]:
    """Some allowed values of a hyper-parameter other than the one it has."""
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
    """Changing any hyper-parameter changes the result, or is refused with a reason."""
    make = maker(entry)
    short = lambda method: play(Sequential(method, toy_clients(), seed=5), COHORTS[:2])
    before = short(make())
    for name, field in entry.fields.items():
        if name in RUN_SETS:
            continue
        outcomes = []
        for value in other_values(field.kind, getattr(make(), name)):
            try:
                found = short(make(**{name: value}))
            except Problem:
                outcomes.append("refused")
                continue
            models = difference(found.models, before.models)
            outcomes.append(max(models, difference((found.server, found.traffic), (before.server, before.traffic))))
            if outcomes[-1] > 0:
                break
        assert outcomes, f"no other value of '{name}' is known to try"
        assert any(o == "refused" or o > 0 for o in outcomes), f"hyper-parameter '{name}' changes nothing"


def disagreeing_accuracy(entry: Entry, network: str, seed: int) -> float:
    """Mean test accuracy after eight rounds with clients who contradict each other."""
    clients = disagreeing_clients()
    train = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "epochs": 3, "cohort": len(clients), "seed": seed}
    outcome = play(Sequential(maker(entry, network)(**train), clients), [range(len(clients))] * 8)
    return float(outcome.values["test"]["personal"]["accuracy"].mean())


@functools.cache
def shared_accuracy(network: str) -> float:
    """The best that FedAvg's one model reaches there, of three starts."""
    from perfed.training.catalog import methods

    return max(disagreeing_accuracy(methods()["fedavg"], network, seed) for seed in range(3))


def check_learns(entry: Entry) -> None:
    """On a toy whose clients contradict each other a personalised method beats FedAvg; every method beats chance."""
    network = networks(entry)[0]
    shared = shared_accuracy(network)
    needed = 1.1 / CLASSES if entry.evaluates == "global" else shared + 0.1
    found = 0.0
    for seed in range(3):  # up to three starts, as clustering is used: a bad one puts all clients in one cluster
        found = max(found, disagreeing_accuracy(entry, network, seed))
        if found > needed:
            return
    raise AssertionError(
        f"accuracy {found:.2f} where clients disagree, FedAvg's is {shared:.2f}: not above {needed:.2f}"
    )


def check_method(entry: Entry) -> Iterator[tuple[str, str | None]]:
    """(what was checked, what is wrong or None), one after another."""
    torch.set_num_threads(1)
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{engine} equals sequential, {network} network", lambda e=engine, n=network: check_engines(entry, n, e))
        for engine in ENGINES
        for network in networks(entry)
    ]
    checks += [
        ("compiled steps equal plain ones", lambda: check_compiled(entry)),
        ("several runs in one batch equal each alone", lambda: check_together(entry)),
        ("BatchNorm statistics move", lambda: check_statistics(entry)),
        ("nothing is changed in place", lambda: check_pure(entry)),
        ("the same seed gives the same result", lambda: check_repeatable(entry)),
        ("state survives saving and loading", lambda: check_saved(entry)),
        ("states keep their form", lambda: check_stable(entry)),
        ("a global model is the same for all", lambda: check_global(entry)),
        ("every hyper-parameter matters", lambda: check_settings(entry)),
        ("it learns where clients disagree", lambda: check_learns(entry)),
    ]
    for title, test in checks:
        try:
            test()
            yield title, None
        except Problem as problem:
            yield title, str(problem)
        except Exception as error:
            text = " ".join(str(error).split())
            yield title, text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[:300]}"
