"""The small federation of the contract: networks, ragged clients, clients who disagree, and methods set up for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.rates import Rates
from perfed.core.task import IGNORED, Binary, Multilabel, NextToken, Regression, Task
from perfed.engines.base import Job
from perfed.training.catalog import Entry
from perfed.wire.base import Transform
from perfed.wire.identity import Identity

FEATURES, CLASSES = 6, 3
TOKENS, LENGTH = 7, 5
TASKS = (Binary(), Multilabel(4), Regression(2, (1.0, -30.0), (2.0, 10.0)), NextToken(TOKENS))  # beside classification
SIZES = (23, 7, 41, 3, 12)  # less than a batch, not a multiple of it, and more
BATCH = 5
PUBLIC = 13  # samples that are nobody's
COHORTS = ((0, 2, 3), (1, 2, 4), (0, 1, 3))  # partial participation: everybody once, nobody always
# Settings under which everything is in use.
SETTINGS = dict(lr=0.05, momentum=0.5, weight_decay=0.01, epochs=2, batch_size=BATCH)
MakeMethod = Callable[..., Method]


def plain_net(outputs: int = CLASSES) -> nn.Module:
    """Return a small network of two linear layers."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, outputs))


def norm_net() -> nn.Module:
    """Return a small network with BatchNorm and Dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def conv_net(outputs: int = CLASSES) -> nn.Module:
    """Return a small network of convolutions, BatchNorm and Dropout, for methods that look into them."""
    block = nn.Sequential(nn.Conv2d(8, 8, (1, 2)), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 1), nn.Tanh(), block, nn.Flatten(), nn.Linear(32, outputs)
    )


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds a network with its first parameter frozen, as a backbone's is."""

    def frozen_net() -> nn.Module:
        net = build()
        next(net.parameters()).requires_grad_(False)
        return net

    return frozen_net


class TokenNet(nn.Module):
    """A small network of sequences: it sees a token, and with convolutions the one before it."""

    def __init__(self, convolutions: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        layers = [nn.Conv1d(8, 8, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 1)] if convolutions else []
        self.body, self.before = nn.Sequential(*layers), int(convolutions)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.pad(self.embed(x).transpose(1, 2), (self.before, 0))
        return self.head(self.body(z).transpose(1, 2).tanh())


NETWORKS = {"plain": plain_net, "norm": norm_net, "conv": conv_net}


def networks_of(task: Task) -> list[Callable[[], nn.Module]]:
    """Return what builds small networks for a task: a plain one, and one with convolutions."""
    if isinstance(task, NextToken):
        return [TokenNet, partial(TokenNet, convolutions=True)]
    return [partial(plain_net, task.outputs), partial(conv_net, task.outputs)]


def toy_clients(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Clients:
    """Return clients of different sizes, with random samples.

    Args:
        sizes: training samples of each client.
        seed: what the samples are drawn from.
    """
    draw = torch.Generator().manual_seed(seed)

    def split(counts: list[int]) -> Split:
        x = torch.randn(sum(counts), FEATURES, generator=draw, dtype=torch.float64)
        return Split(x, torch.randint(0, CLASSES, (sum(counts),), generator=draw), tuple(counts))

    names = tuple(f"client_{id}" for id in range(len(sizes)))
    val, test = [max(n // 4, 1) for n in sizes], [n // 3 + 1 for n in sizes]
    return Clients(names, split(list(sizes)), split(val), split(test), CLASSES, public=split([PUBLIC]))


def task_clients(task: Task) -> Clients:
    """Return clients of different sizes, with random samples of a task.

    Args:
        task: any but classification.
    """
    clients, draw = toy_clients(), torch.Generator().manual_seed(1)

    def labelled(split: Split) -> Split:
        n = len(split.y)
        if isinstance(task, NextToken):
            x, y = torch.randint(TOKENS, (2, n, LENGTH), generator=draw)
            y = y.masked_fill(torch.rand(n, LENGTH, generator=draw) < 0.3, IGNORED)
            return Split(x, y.index_fill(0, torch.tensor([0]), IGNORED), split.size)  # a sample that says nothing
        y = torch.randn(n, task.outputs, generator=draw)
        y = (y if isinstance(task, Regression) else (y > 0).float()).squeeze(1)
        return Split(split.x, y, split.size)

    train, val, test = (labelled(clients.split(name)) for name in SPLITS)
    assert clients.public is not None
    return Clients(clients.names, train, val, test, task=task, public=labelled(clients.public))


def disagreeing_clients(groups: int = 2, each: int = 3, samples: int = 40) -> Clients:
    """Return groups of clients whose labels for the same inputs contradict each other: no single model fits all.

    Args:
        groups: number of groups.
        each: clients in a group.
        samples: training samples of each client.
    """
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
    train, val, test = split(samples), split(12), split(30)
    public = split(PUBLIC)
    public = Split(public.x[:PUBLIC], public.y[:PUBLIC], (PUBLIC,))  # with the labels of the first group
    return Clients(names, train, val, test, CLASSES, public=public)


def job(method: Method, clients: Clients | None = None, wire: Transform = Identity(), seed: int = 5) -> Job:  # noqa: B008 (it has no state)
    """Return the run that the checks carry out: three clients in a round.

    Args:
        method: an instance.
        clients: whom it is trained with; None: those of the toy federation.
        wire: what happens to uploads on their way.
        seed: the run's.
    """
    return Job(method, clients or toy_clients(), seed, cohort=3, wire=wire, rates=Rates(rounds=len(COHORTS)))


def networks(entry: Entry) -> list[str]:
    """Return the names of the networks to check a method with.

    They are those it accepts; the last one, which is slow, only if it refuses the others.
    """
    kind, suited = entry.load(), []
    for name, build in NETWORKS.items():
        if name == "conv" and suited:
            break
        try:
            kind(Model(build, dtype=torch.float64))
            suited.append(name)
        except Problem:
            continue
    return suited or list(NETWORKS)  # refused everywhere: the checks then say why


def toy_settings(kind: type[Method]) -> dict[str, Any]:
    """Return the values of a method's settings that are declared for the small federation."""
    values = {field.name: field.metadata.get("toy") for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def maker(entry: Entry, network: str = "plain", change: Callable[[Any], Any] = lambda build: build) -> MakeMethod:
    """Return a function that makes instances of a method, with settings under which everything is in use.

    Args:
        entry: the method.
        network: plain, norm or conv; where the method refuses it, another one.
        change: makes another network of what builds this one.

    Returns:
        A function that takes settings to change by name, and returns an instance.
    """
    suited = networks(entry)
    return _maker(entry, Model(change(NETWORKS[network if network in suited else suited[0]]), dtype=torch.float64))


def task_maker(entry: Entry, task: Task) -> MakeMethod | Problem:
    """Return a function that makes instances of a method for a task, or the Problem with which it refuses it.

    Args:
        entry: the method.
        task: any but classification.
    """
    refusals = []
    for build in networks_of(task):
        try:
            return _maker(entry, Model(build, dtype=torch.float64, task=task))
        except Problem as problem:
            refusals.append(problem)
    return refusals[-1]


def _maker(entry: Entry, model: Model) -> MakeMethod:
    kind = entry.load()
    base: dict[str, Any] = SETTINGS | ({kind.warms_up: 1} if kind.warms_up else {})  # the toy has only a few rounds
    base |= toy_settings(kind)
    try:
        kind(model, **base)
    except Problem:  # a method may refuse momentum; it must then work without
        base["momentum"] = 0.0
        kind(model, **base)

    def make(**changed: Any) -> Method:
        settings = {**base, **changed}
        try:
            return kind(model, **settings)
        except Problem:  # so may another setting, such as adam: this instance alone goes without
            if "momentum" in changed or not base["momentum"]:
                raise
            return kind(model, **{**settings, "momentum": 0.0})

    return make
