"""A generator: a network that makes a representation of noise and a label."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perfed.core.model import Model
from perfed.core.random import uniform

NOISE, HIDDEN = 32, 256  # numbers that are drawn for a representation, and the width of the hidden layer


def network(classes: int, shape: Sequence[int]) -> nn.Module:
    """Return a generator with one hidden layer.

    Args:
        classes: how many labels there are.
        shape: that of a representation.
    """
    first, last = nn.Linear(NOISE + classes, HIDDEN), nn.Linear(HIDDEN, math.prod(shape))
    return nn.Sequential(first, nn.BatchNorm1d(HIDDEN), nn.ReLU(), last)


def generate(model: Model, G: Tensor, y: Tensor, key: Tensor, train: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Draw noise, and make representations of it.

    Args:
        model: of a generator's network.
        G: its theta.
        y: [samples], the labels.
        key: what the noise is drawn from.
        train: use the statistics of this batch.

    Returns:
        The noise [samples, NOISE], the representations [samples, numbers], and G with fresh statistics.
    """
    classes = model.shapes["0.weight"][1] - NOISE
    eps = uniform(key, (len(y), NOISE), G.dtype)
    one_hot = (y[:, None] == torch.arange(classes, device=y.device)).to(G.dtype)
    return eps, *model.apply(G, torch.cat([eps, one_hot], 1), train)


def likeness(eps: Tensor, z: Tensor) -> Tensor:
    """Return exp(-mean of |eps - eps'|^2 |z - z'|) over all pairs, those of one with itself among them.

    Both distances are means over the coordinates. It is 1 where all z are equal, and smaller where they differ.

    Args:
        eps: the noise [samples, numbers].
        z: what was made of it [samples, numbers].
    """
    apart = ((eps[:, None] - eps) ** 2).mean(2) * (z[:, None] - z).abs().mean(2)
    return (-apart.mean()).exp()
