"""What a method costs in itself, counted in a tiny federation: what it sends, and the samples it computes with.

Rounds of a warm-up are left out.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim

from perfed.core.clients import Clients, Split
from perfed.core.context import Context
from perfed.core.messages import Cohort
from perfed.core.method import State
from perfed.core.model import Model
from perfed.core.rates import Rates
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.training import catalog
from perfed.training.catalog import Entry

ROUNDS, COHORT, FEATURES, CLASSES, PUBLIC = 2, 4, 300, 10, 20
LONG = 100  # rounds that a run is said to have, so that the first ones are none of its last phase
VALIDATION, TEST = 4, 4  # samples of a client whose passes are counted


def network() -> nn.Module:
    """Make a network with normalisation and a convolution (of a single pixel: a linear layer): no method refuses it."""
    first = (nn.Unflatten(1, (FEATURES, 1)), nn.Conv1d(FEATURES, 64, 1), nn.Flatten())
    return nn.Sequential(*first, nn.GroupNorm(4, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class ClientsAlone(Sequential):
    """The sequential engine, whose `CountingModel` does not count what the server trains."""

    def refine(self, run: int, context: Context, server: State, cohort: Cohort | None) -> State:
        model: Any = self.method.model
        seen = model.seen.copy()
        server = super().refine(run, context, server, cohort)
        model.seen[:] = seen
        return server


def _federation(
    entry: Entry, model: Model, clients: Clients, settings: dict[str, Any], engine: type[Sequential] = Sequential
) -> Federation:
    kind = entry.load()
    settings = settings | ({kind.warms_up: 0} if kind.warms_up else {})
    return Federation(engine(Job(kind(model, **settings), clients, rates=Rates(rounds=LONG))))


def _clients(names: tuple[str, ...], train: Split, val: Split, test: Split) -> Clients:
    """Return clients and some public samples, which a method may need."""
    public = Split(torch.ones(PUBLIC, FEATURES), torch.arange(PUBLIC) % CLASSES, (PUBLIC,))
    return Clients(names, train, val, test, CLASSES, public=public)


def bytes_sent(entry: Entry) -> dict[str, Any]:
    """Measure what a method sends per participant and round, in the last of two rounds.

    Returns:
        `down` and `up`, in multiples of the model's P; `secure_sums`, whether the server needs no more than sums of the
        uploads ('per group' where each group has sums of its own).
    """
    return dict(_sent_by(entry.name)) if entry.shipped else _sent(entry)


@functools.cache
def _sent_by(name: str) -> dict[str, Any]:
    """Return what a method sends that comes with perfed: its file stays as it is."""
    return _sent(catalog.find(name))


def _sent(entry: Entry) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(COHORT * 8, FEATURES, generator=draw)
    split = Split(x, torch.randint(0, CLASSES, (len(x),), generator=draw), (8,) * COHORT)
    clients = _clients(tuple("abcd"), split, split, split)
    federation = _federation(entry, Model(network), clients, {"epochs": 1, "lr": 0.01})
    before = (0, 0)
    for _ in range(ROUNDS):
        before = federation.traffic.down, federation.traffic.up
        federation.step()
    method, sent = federation.method, federation.traffic
    unit = COHORT * method.model.P * 4
    sums = "nothing is sent" if sent.up == 0 else "no" if sent.up_own else "yes" if method.groups == 1 else "per group"
    down, up = sent.down - before[0], sent.up - before[1]
    rounded = lambda share: round(share, 2) or share  # a little is not nothing
    return {"down": rounded(down / unit), "up": rounded(up / unit), "secure_sums": sums}


@functools.lru_cache(maxsize=256)
def passes(method: str, settings: tuple[tuple[str, Any], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the samples that pass through the network in a client's round; the server's own training is not in it.

    Counted in the second round of tiny clients, so what they do once is not in it; the number is a linear function of a
    client's sizes, so three sizes tell all of it. What runs outside `Model` is not looked at (FedAlign's narrow pass),
    nor are further networks of a method.

    Args:
        method: a method's name, or the path of its file.
        settings: its settings, as pairs.

    Returns:
        The passes per training sample, per validation sample, and regardless of both, each as [passes with a gradient,
        forward passes alone].
    """
    entry = catalog.find(method)
    batch = int(dict(settings).get("batch_size", 10))
    sizes = ((batch, VALIDATION), (2 * batch, VALIDATION), (batch, 2 * VALIDATION))
    small, more_train, more_val = (_count(entry, dict(settings), *size) for size in sizes)
    per_train, per_val = (more_train - small) / batch, (more_val - small) / VALIDATION
    return per_train, per_val, small - batch * per_train - VALIDATION * per_val


def _count(entry: Entry, settings: dict[str, Any], train: int, val: int) -> np.ndarray:
    count = 1 + int(settings.get("downloads", 1) or 1)  # a client may ask for the models of others

    def split(size: int) -> Split:
        return Split(torch.ones(count * size, FEATURES), torch.arange(count * size) % CLASSES, (size,) * count)

    clients = _clients(tuple(map(str, range(count))), split(train), split(val), split(TEST))
    own = {key: value for key, value in settings.items() if key in entry.fields}
    parts = {"personal": "head", "module": ""}  # the tiny network has no layers of the run's names
    own |= {key: usual for key, usual in parts.items() if key in own and own[key] not in ("head", "body", "norm")}
    own["lr"] = min(own.get("lr", 0.01), 0.01)
    model = CountingModel(network)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    try:
        declaring = _federation(entry, Model(network), clients, own)
        federation = _federation(entry, model, clients, own, ClientsAlone)
        declaring.step()  # with a specimen of a client, whose passes are nobody's
        federation.engine.declared = declaring.engine.declared
        federation.step()  # looks at the network once, which is nobody's pass either
        model.seen[:] = 0
        federation.step()
    finally:
        torch.set_num_threads(threads)
    return np.maximum(model.seen, 0) / count


class CountingModel(Model):
    """A model that counts the samples it is given, with a gradient and without."""

    def __init__(self, build: Any):
        self.seen, self.silent = np.zeros(2), False
        super().__init__(build)

    def _see(self, kind: int, theta: Tensor, x: Tensor) -> None:
        times = 1
        if is_batchedtensor(theta):  # a stack of models at once
            times = get_unwrapped(theta).shape[maybe_get_bdim(theta)]
        self.seen[kind] += times * len(x)

    def grad(self, theta: Any, batch: Any, loss: Any = None, train: bool = True) -> Any:
        self._see(0, theta, batch.x)
        if loss is not None:  # its own pass belongs to the gradient; any further passes come on top
            self.seen[1] -= len(batch.x)
        self.silent = loss is None
        gradient = super().grad(theta, batch, loss, train)
        self.silent = False
        return gradient

    def grads(self, theta: Any, batch: Any) -> Any:
        self._see(0, theta, batch.x)
        self.silent = True  # it goes through the samples one by one
        gradients = super().grads(theta, batch)
        self.silent = False
        return gradients

    def apply(self, theta: Any, x: Any, *rest: Any, **options: Any) -> Any:
        if not self.silent:
            self._see(1, theta, x)
        return super().apply(theta, x, *rest, **options)
