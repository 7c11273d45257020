"""The rules that a method keeps for itself, one function each; whether engines then agree is the business of `checks`.

Each check breaks a rule's temptation open: it gives other test samples, fills batches up, looks at what is left behind.
What is wrong is said with the rule, not with what follows from it: an AssertionError with a sentence, or a Problem.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from perfed.contract.checks import CLOSE, Outcome, difference, play, reference
from perfed.contract.toy import COHORTS, SIZES, MakeMethod, frozen, job, maker, networks, toy_clients
from perfed.core.clients import SPLITS, Clients
from perfed.core.data import Plan
from perfed.core.errors import Problem
from perfed.core.fields import Evaluates
from perfed.core.messages import Cohort, Down, is_single
from perfed.core.method import Method
from perfed.core.model import Batch, Model
from perfed.core.tree import leaves, tree_map
from perfed.engines.base import EvaluationRequest, Reply, Training, Work
from perfed.engines.local import ClientData, Sequential
from perfed.engines.trees import paths
from perfed.federation import reduce
from perfed.federation.federation import Federation
from perfed.training.catalog import Entry

FILLING = 3  # rows that are no samples, behind every batch
ROUNDS, FEW = 4, (0, 1, 4)  # in which, with these clients, a server with momentum overshoots
FAINT = 0.01  # scale of inputs whose variances are far below the 1 that BatchNorm begins with


def trained(method: Method, clients: Clients | None = None) -> Sequential:
    """Return the sequential engine for a method, and the toy federation's clients or others."""
    return Sequential(job(method, clients))


def check_runs(entry: Entry) -> None:
    """Check that a method trains and predicts, and that no client loses its turn."""
    method = maker(entry, networks(entry)[0])()
    federation = Federation(trained(method))
    for cohort in COHORTS:
        federation.step(cohort)
        for refusal in federation.look():
            tensor = f", {refusal.tensor}" if refusal.tensor else ""
            raise AssertionError(f"client {refusal.client} of the toy federation{tensor}: {refusal.reason}")
    models: dict[int, Any] = {}
    federation.evaluate(models.__setitem__)
    for named in models.values():
        for name, model in named.items():
            finite = all(bool(leaf.isfinite().all()) for leaf in leaves(model))
            assert finite, f"personalise returns '{name}' with numbers that are not finite"


# ---------------------------------------------------------------------- what a method leaves behind


def check_keeps_nothing(entry: Entry) -> None:
    """Check that a method keeps nothing on itself, on its class or in its file: there it is no client's and no run's.

    A tensor that is kept under vmap is a wrapper besides, and whatever is kept is lost when a run is resumed.
    """
    after: dict[str, str] = {}

    class Watched(Sequential):
        def _work(self, work: Work) -> Any:
            results = super()._work(work)
            after.update(_kept(work.task.method))
            return results

    engine = Watched(job(maker(entry, networks(entry)[0])()))
    federation, before = Federation(engine), _kept(engine.method)
    for cohort in COHORTS[:2]:
        federation.step(cohort)
    federation.evaluate()
    after |= _kept(engine.method)
    own = [name for name, content in after.items() if content != before.get(name) or content == TENSOR]
    assert not own, (
        f"it keeps {'a tensor' if after[own[0]] == TENSOR else 'something'} in {own[0]}: what a client remembers "
        "belongs into the state that `local` returns, what a step needs goes through `given`, and what the server "
        "remembers into its state"
    )


TENSOR = "a tensor"


def _kept(method: Method) -> dict[str, str]:
    """Return what a method, its class and its file hold beside settings: plain values, and where tensors are."""
    kind = type(method)
    places: dict[str, Mapping[str, Any]] = {"self": vars(method)}
    for each in kind.__mro__[: kind.__mro__.index(Method)]:
        places[each.__name__] = vars(each)
        function = next((value for value in vars(each).values() if isinstance(value, FunctionType)), None)
        if function is not None:  # its globals are those of the file as it was when the class was made
            places[Path(function.__code__.co_filename).name] = function.__globals__
    fields = {field.name for field in dataclasses.fields(method)}
    kept = {}
    for place, values in places.items():
        for name, value in values.items():
            if name.startswith("__") or (place == "self" and name in fields):
                continue
            if any(isinstance(leaf, Tensor) for leaf in leaves(value)):
                kept[f"{place}.{name}"] = TENSOR
            elif isinstance(value, bool | int | float | list | dict | set) and name not in kind.computed_once():
                kept[f"{place}.{name}"] = repr(value)
    return kept


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
            name = "local" if isinstance(work.task, Training) else "personalise"
            assert difference(given, before) == 0, f"{name} writes into the state or the message that it is given"
            return results

    federation = Federation(Guard(job(make())))
    for cohort in COHORTS:
        before, server = _copied(federation.server), federation.server
        federation.step(cohort)
        assert difference(server, before) == 0, "broadcast or aggregate writes into the server's state: make a new one"
    server, states = _copied(federation.server), _copied(dict(federation.engine.states[0]))
    federation.evaluate()
    after = federation.server, dict(federation.engine.states[0])
    assert difference(after, (server, states)) == 0, "personalise or show changed a state"


def random_states() -> dict[str, Any]:
    """Return the state of every global source of random numbers."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state(legacy=False)),  # noqa: NPY002 (it is looked at, not drawn from)
        "Python's random": random.getstate(),
    }


def check_repeatable(entry: Entry) -> None:
    """Check that equal seeds give equal bits with no random state touched, and that another seed does not."""
    make, before = maker(entry), random_states()
    first = reference(make())
    touched = [name for name, state in random_states().items() if state != before[name]]
    assert not touched, (
        f"it draws from the global random state of {touched[0]}: the batches (and dropout) bring all randomness, and "
        "perfed.core.random draws from a key"
    )
    assert difference(first.models, reference(make()).models) == 0, (
        "two equal runs differ: what is random has to come from the batches' key, and nothing from a clock or a global"
    )
    other = play(Sequential(job(make(), seed=6)))
    assert difference(first.models, other.models) > 0, "another seed changes nothing"


def check_stable(entry: Entry) -> None:
    """Check that the forms of server and client states do not change between rounds."""
    federation = Federation(trained(maker(entry)()))
    kind = lambda t: (tuple(t.shape), str(t.dtype)) if isinstance(t, Tensor) else type(t).__name__
    form = lambda tree: tree_map(kind, tree)
    before = form(federation.server)
    for number, cohort in enumerate(COHORTS, 1):
        federation.step(cohort)  # refuses a client's state of another form
        after = form(federation.server)
        assert after == before, f"the server's state changes its form: {after} after round {number}, {before} before it"


# ---------------------------------------------------------------------- what it may look at


def check_test_split(entry: Entry) -> None:
    """Check that other test samples change no state and no model: they are there to be scored on."""
    make, clients = maker(entry, networks(entry)[0]), toy_clients()
    other = toy_clients(seed=1).test
    others = dataclasses.replace(clients, test=other)
    played = lambda **changed: [play(trained(make(**changed), each)) for each in (clients, others)]
    try:
        outcomes = played(fine_tune=1)
    except Problem:  # it may refuse that, before or once it has models that are no vectors
        outcomes = played()
    for part, function in {"server": "local", "states": "local", "models": "personalise"}.items():
        assert difference(*(getattr(outcome, part) for outcome in outcomes)) == 0, (
            f"{function} looks at the test samples: other ones change the {part}; a method may read 'train' and 'val'"
        )


class Filled(ClientData):
    """A client's samples in batches that are filled up, as a block of clients needs them."""

    def _batch(self, split: str, part: slice, key: Tensor) -> Batch:
        return _filled(super()._batch(split, part, key))

    def _batches(self, plan: Plan, draw: int) -> Iterator[Batch]:
        yield from map(_filled, super()._batches(plan, draw))


def _filled(batch: Batch) -> Batch:
    fill = lambda each: torch.cat([each, each[:1].expand(FILLING, *each.shape[1:])])
    x, y, index = fill(batch.x), fill(batch.y), None if batch.index is None else fill(batch.index)
    weight = torch.ones(len(x), dtype=x.dtype)
    weight[-FILLING:] = 0
    return Batch(x, y, weight, batch.key, index)


def check_filling(entry: Entry) -> None:
    """Check that rows of weight 0 count nowhere: batches of a block of clients are filled up with them."""

    class Filling(Sequential):
        def _samples(self, work: Work, id: int, key: Tensor, done: float | None) -> ClientData:
            job = self.jobs[work.run]
            return Filled(job.clients, id, key, job.method, done, work.steps)

    make = maker(entry, networks(entry)[0])
    if not make().vectorised:
        return
    filled = play(Filling(job(make())))
    expected = reference(make())
    for field in dataclasses.fields(Outcome):
        worst = difference(getattr(filled, field.name), getattr(expected, field.name))
        assert worst <= CLOSE, (
            f"the {field.name} depend on rows that only fill a batch up: a loss or a mean of its own forgets "
            "`batch.weight`, which is 0 for them; perfed.core.model.average(each, batch.weight) does not"
        )


# ---------------------------------------------------------------------- what it says of itself


def check_compartments(entry: Entry) -> None:
    """Check that a tensor travels in the compartment that it needs: one of them, and `own` only where rows are read."""
    federation = Federation(trained(maker(entry, networks(entry)[0])()))
    exchanges = []
    for cohort in COHORTS:
        federation.begin(cohort)
        for request in federation.requests():
            (reply,) = federation.engine.exchange([request])
            place = {"round": request.round, "exchange": request.exchange, "phase": request.phase}
            exchanges.append(_Exchange(federation.method.at(**place), federation.server, request.down, reply))
            federation.receive(request, reply)
        federation.end()
    twice = functools.reduce(set.intersection, (each.twice for each in exchanges))
    for first, second in sorted(twice):
        raise AssertionError(f"{first} and {second} are the same numbers: one tensor, one compartment")
    needless = all(each.reads_a_mean_only(federation) for each in exchanges)
    assert not needless, (
        "the server makes nothing of Up.own but a mean over the clients: put it into Up.mean, which it sees only as "
        "that mean"
    )


@dataclasses.dataclass
class _Exchange:
    method: Method
    server: Any
    down: Down
    reply: Reply

    @property
    def twice(self) -> set[tuple[str, str]]:
        """Pairs of tensors in two compartments that hold the same numbers."""
        up, down = self.reply.uploads, self.down
        pairs = {("Up.mean", "Up.own"): (up.mean, up.own), ("Down.shared", "Down.own"): (down.shared, down.own)}
        same = set()
        for names, trees in pairs.items():
            (left, right), count = map(leaves, trees), len(self.reply.ids)
            for first, p in zip(paths(trees[0], names[0]), left, strict=True):
                for second, q in zip(paths(trees[1], names[1]), right, strict=True):
                    rows = p if names[0] == "Up.mean" else p.expand(count, *p.shape)
                    if rows.shape == q.shape and rows[0].numel() > 1 and torch.equal(rows, q):
                        same.add((first, second))
        return same

    def reads_a_mean_only(self, federation: Federation) -> bool:
        """Return True if the server ends with the same state when every row of `own` is replaced by their mean."""
        up, method = self.reply.uploads, self.method
        if not any(leaf.is_floating_point() and leaf[0].numel() > 1 for leaf in leaves(up.own)):
            return False
        cohort = reduce.mean(up, method.groups, federation.engine.weighted_sum)

        def after(cohort: Cohort) -> Any:
            return federation.engine.refine(0, method.context, method.aggregate(self.server, cohort), cohort)

        new, alike = after(cohort), torch.ones_like(up.ids)
        for weight in (up.weight, alike) if is_single(up.weight) else (alike,):
            share = weight.double() / weight.sum()

            def mean(rows: Tensor, share: Tensor = share) -> Tensor:
                if not rows.is_floating_point():
                    return rows
                return torch.tensordot(share.to(rows.dtype), rows, 1).expand_as(rows)

            other: Cohort = dataclasses.replace(cohort, own=tree_map(mean, cohort.own))
            if difference(after(other), new) <= CLOSE:
                return True
        return False


def check_evaluates(entry: Entry) -> None:
    """Check that `evaluates` is 'global' where all clients predict with one model, and only there."""
    method = maker(entry, "norm")()
    engine = trained(method)
    federation = Federation(engine)
    for cohort in COHORTS:
        federation.step(cohort)
    ids = list(range(len(SIZES)))
    ask = lambda id: EvaluationRequest(0, federation.round, [id], federation.show([id]), keep=True, score=False)
    each = [engine.evaluate([ask(id)])[0].models for id in ids]
    values = f"{', '.join(map(repr, get_args(Evaluates)))}"
    if method.one_for_all:
        same = all(difference(models, each[0]) == 0 for models in each)
        assert same, f"it says evaluates = 'global', but clients have different models; the values are {values}"
    elif method.evaluates != "global":
        same = all(difference(models["personal"], each[0]["personal"]) == 0 for models in each)
        assert not same, (
            f"all clients predict with the same model: say evaluates = 'global' in place of {method.evaluates!r} (the "
            f"values are {values}), or let defaults be such that clients differ after {len(COHORTS)} rounds"
        )


def thetas_of(model: Model, tree: Any) -> list[Tensor]:
    """Return the thetas in a tree: a client's model may be more than one, or something else."""
    return [leaf for leaf in leaves(tree) if leaf.shape == (model.width,)]


def check_statistics(entry: Entry) -> None:
    """Check that running statistics of BatchNorm move and stay what statistics can be: finite, variances positive."""
    make = maker(entry, "norm")
    _check_moved(make)
    clients = toy_clients()
    faint = {name: dataclasses.replace(clients.split(name), x=clients.split(name).x * FAINT) for name in SPLITS}
    outcome = play(trained(make(), dataclasses.replace(clients, **faint)), [FEW] * ROUNDS)
    model = make().model
    for named in outcome.models.values():
        for theta in thetas_of(model, named):
            for name, values in model.state_dict(theta).items():
                assert not name.endswith("running_var") or bool((values > 0).all()), (
                    f"'{name}' of BatchNorm falls to {float(values.min()):.2g}, and a variance is positive: momentum "
                    "or a step size at the server is for weights, `self.model.weights.only(change)`; running "
                    "statistics take the plain mean"
                )


def check_frozen(entry: Entry) -> None:
    """Check that parameters which the network has frozen stay what they are, in every model of every client."""
    engine = trained(maker(entry, networks(entry)[0], frozen)())
    method, model, outcome = engine.method, engine.method.model, play(engine)
    still, count = model.everything.mask & ~model.moving.mask, getattr(method, method.starts) if method.starts else 1
    seed = method.context.seed
    starts = [model.init(each)[still] for each in (seed, *(seed * count + k for k in range(count)))]
    for named in outcome.models.values():
        for name, theta in ((name, theta) for name, tree in named.items() for theta in thetas_of(model, tree)):
            assert any(difference(theta[still], start) <= CLOSE for start in starts), (
                f"'{name}' has other values where the network is frozen: parts leave frozen parameters out, so a theta "
                "is put together on `self.model.init(self.context.seed)`, not on zeros"
            )


def _check_moved(make: MakeMethod) -> None:
    method, outcome = trained(make()).method, reference(make())  # as an engine knows it: what samples are like
    model = method.model
    buffers = model.everything.mask & ~model.weights.mask
    before = method.init_server(len(SIZES)), method.init_client(), model.init(method.context.seed)
    start = model.init(method.context.seed)[buffers]
    assert len(leaves(before)), "a method without any tensors"
    moved = [theta[buffers] for named in outcome.models.values() for theta in thetas_of(model, named["personal"])]
    if not moved:  # it predicts with something else than networks
        return
    assert any(difference(each, start) > 1e-6 for each in moved), "BatchNorm statistics never moved"
    assert all(each.isfinite().all() for each in moved), "BatchNorm statistics are not finite"
