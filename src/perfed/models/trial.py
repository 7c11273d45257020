"""Trials of a network before it trains: what does not fit is found before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from perfed.core.clients import Clients
from perfed.core.errors import Problem
from perfed.core.layers import swap
from perfed.core.model import Model
from perfed.core.random import derive


def refuse_unfit(make: Callable[[], nn.Module], name: str, clients: Clients) -> None:
    """Make a network once and give it a sample: refuse what cannot train on these clients' samples.

    Args:
        make: makes the network.
        name: what messages call it.
        clients: those who train it.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the trial must not change what is drawn later
        try:
            model = make()
        except Problem:
            raise
        except Exception as error:
            raise Problem(f"model.name '{name}' raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise Problem(f"model.name '{name}' returned {type(model).__name__}, not a torch.nn.Module")
        sample = clients.ready(clients.train.x[:1], torch.float32).cpu()
        try:
            logits = model.eval()(sample)
            seeded, before = swap(model).train(), torch.get_rng_state()
            seeded(torch.cat([sample, sample]))
            random = not torch.equal(before, torch.get_rng_state())
        except Exception as error:
            raise Problem(
                f"model.name '{name}' cannot take a sample of shape {clients.shape}: {type(error).__name__}: {error}"
            ) from error
    if random:
        raise Problem(
            f"model.name '{name}' draws random numbers of its own in training, which no seed of a run reaches: "
            "use nn.Dropout as a module"
        )
    if not isinstance(logits, Tensor) or logits.shape != (1, clients.classes):
        returned = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Problem(
            f"model.name '{name}' must return one number for each of {clients.classes} classes: {(1, clients.classes)} "
            f"for one sample, not {returned}"
        )


def refuse_mixing(make: Callable[[], nn.Module], clients: Clients) -> None:
    """Refuse a network whose output for one sample depends on the samples beside it, other than through BatchNorm.

    In a block, the filling of a partial batch stands beside real samples; only our own layers know to ignore it.

    Args:
        make: makes the network.
        clients: those who train it.
    """
    model = Model(make)
    theta, x = model.init(0), clients.ready(clients.train.x[:1], torch.float32).cpu()
    pair = torch.cat([x, 2 * x + 1])
    with torch.no_grad():
        alone = model.apply(theta, x, train=True, weight=torch.ones(1), key=derive(0))[0]
        beside = model.apply(theta, pair, train=True, weight=torch.tensor([1.0, 0.0]), key=derive(0))[0]
    if not torch.allclose(alone[0], beside[0], rtol=1e-3, atol=1e-4):
        raise Problem("the network mixes the samples of a batch other than through BatchNorm: use --engine workers")
