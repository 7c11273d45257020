"""A conditional GAN: a network that makes samples of a class, and one that tells them from real ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.core.augment import distorted
from perfed.core.model import Batch, Model
from perfed.core.optim import adam, adam_start
from perfed.core.random import derive, normal, pick

NOISE, HIDDEN = 64, 256  # numbers that are drawn for a sample, and the width of hidden layers
BATCH, BETAS = 64, (0.5, 0.999)  # samples of a step, and Adam's memory


def generator_network(classes: int, shape: Sequence[int] | None) -> nn.Module:
    """Return a network that makes samples, numbers from -1 to 1, of noise and labels."""
    assert shape is not None  # it is known from `init_server` on
    layers = nn.Linear(NOISE + classes, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(2 * HIDDEN, math.prod(shape)), nn.Tanh(), nn.Unflatten(1, tuple(shape)))


def critic_network(classes: int, shape: Sequence[int] | None) -> nn.Module:
    """Return a network that says of samples with their labels how real they look: a logit."""
    assert shape is not None
    return nn.Sequential(nn.Linear(math.prod(shape) + classes, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1))


def labelled(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Return samples as vectors, with their labels behind them as one number for each class."""
    return torch.cat([x.flatten(1), (y[:, None] == torch.arange(classes, device=y.device)).to(x.dtype)], 1)


def make(generator: Model, G: Tensor, noise: Tensor, y: Tensor, extent: Tensor) -> Tensor:
    """Return samples of some classes, with numbers of the extent that real ones have.

    Args:
        generator: its model.
        G: its theta.
        noise: [samples, NOISE].
        y: the classes [samples].
        extent: the smallest and the largest number.
    """
    low, high = extent
    return low + (generator.apply(G, labelled(noise, y, _classes(generator)))[0] + 1) / 2 * (high - low)


def pool_of(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return what `duel` is given of real samples, drawn class by class alike; and their extent, as `make` wants it."""
    low, high = x.min(), x.max()
    return (2 * (x - low) / (high - low).clamp_min(1e-9) - 1, y, 1 / y.bincount()[y]), torch.stack([low, high])


def _classes(generator: Model) -> int:
    return generator.shapes["0.weight"][1] - NOISE


def start(generator: Model, critic: Model, seed: int) -> Any:
    """Return both networks and the states of their optimisers before the first step."""
    return [(theta, adam_start(theta)) for theta in (generator.init(seed), critic.init(seed))]


def duel(generator: Model, critic: Model, carry: Any, batch: Batch, given: Any) -> Any:
    """Take a step of both networks, with the loss that does not saturate.

    Args:
        generator: its model.
        critic: its model.
        carry: what `start` returned, or this function.
        batch: whose key all draws follow from.
        given: real samples of numbers from -1 to 1, their labels, how often each is drawn; and both networks' rate.
    """
    ((G, G_state), (D, D_state)), (x, y, weight, lr) = carry, given
    rows, classes = pick(derive(batch.key, 1), BATCH, weight), _classes(generator)
    y, keys = y[rows], derive(derive(batch.key, 2), torch.arange(BATCH, device=y.device))
    real = labelled(distorted(x[rows], keys), y, classes)
    noise = labelled(normal(derive(batch.key, 3), (BATCH, NOISE), G.dtype), y, classes)

    def judged(D: Tensor, made: Tensor) -> Tensor:
        return critic.apply(D, labelled(made, y, classes))[0]

    def tell(D: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        made = generator.apply(G, noise)[0]
        return F.softplus(-critic.apply(D, real)[0]).mean() + F.softplus(judged(D, made)).mean(), D

    D, D_state = adam(D, D_state, critic.grad(D, batch, tell)[0], lr, BETAS)
    fool = lambda G, *_: (F.softplus(-judged(D, generator.apply(G, noise)[0])).mean(), G)
    return [adam(G, G_state, generator.grad(G, batch, fool)[0], lr, BETAS), (D, D_state)]
