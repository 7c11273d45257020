"""The small federation of the contract: networks, ragged clients, clients who disagree, and methods set up for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.training.catalog import Entry
from perfed.wire.base import Transform
from perfed.wire.identity import Identity

FEATURES, CLASSES = 6, 3
SIZES = (23, 7, 41, 3, 12)  # less than a batch, not a multiple of it, and more
BATCH = 5
PUBLIC = 13  # samples that are nobody's
COHORTS = ((0, 2, 3), (1, 2, 4), (0, 1, 3))  # partial participation: everybody once, nobody always
# Settings under which everything is in use.
SETTINGS = dict(lr=0.05, momentum=0.5, weight_decay=0.01, epochs=2, batch_size=BATCH)
MakeMethod = Callable[..., Method]


def plain_net() -> nn.Module:
    """Return a small network of two linear layers."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def norm_net() -> nn.Module:
    """Return a small network with BatchNorm and Dropout."""
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def conv_net() -> nn.Module:
    """Return a small network of convolutions, BatchNorm and Dropout, for methods that look into them."""
    block = nn.Sequential(nn.Conv2d(8, 8, (1, 2)), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 1), nn.Tanh(), block, nn.Flatten(), nn.Linear(32, CLASSES)
    )


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return what builds a network with its first parameter frozen, as a backbone's is."""

    def frozen_net() -> nn.Module:
        net = build()
        next(net.parameters()).requires_grad_(False)
        return net

    return frozen_net


NETWORKS = {"plain": plain_net, "norm": norm_net, "conv": conv_net}


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
    return Job(method, clients or toy_clients(), seed, cohort=3, wire=wire)


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


def maker(entry: Entry, network: str = "plain", change: Callable[[Any], Any] = lambda build: build) -> MakeMethod:
    """Return a function that makes instances of a method, with settings under which everything is in use.

    Args:
        entry: the method.
        network: plain, norm or conv; where the method refuses it, another one.
        change: makes another network of what builds this one.

    Returns:
        A function that takes settings to change by name, and returns an instance.
    """
    kind, suited = entry.load(), networks(entry)
    model = Model(change(NETWORKS[network if network in suited else suited[0]]), dtype=torch.float64)
    base: dict[str, Any] = SETTINGS | ({kind.warms_up: 1} if kind.warms_up else {})  # the toy has only a few rounds
    try:
        kind(model, **base)
    except Problem:  # a method may refuse momentum; it must then work without
        base["momentum"] = 0.0

    def make(**changed: Any) -> Method:
        settings = {**base, **changed}
        try:
            return kind(model, **settings)
        except Problem:  # so may another setting, such as adam: this instance alone goes without
            if "momentum" in changed or not base["momentum"]:
                raise
            return kind(model, **{**settings, "momentum": 0.0})

    return make
