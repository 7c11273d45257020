"""MLP: one hidden layer with ReLU, of width model.hidden."""

from __future__ import annotations

import math

from torch import Tensor, nn

from perfed.models.config import ModelConfig


class MLP(nn.Module):
    """All features, a hidden layer, classes."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc1(x.flatten(1)).relu())


def network(shape: tuple[int, ...], classes: int, config: ModelConfig) -> MLP:
    """Make the network for samples of any shape.

    Args:
        shape: the shape of a sample.
        classes: how many classes there are.
        config: hidden, the width of the hidden layer.

    Returns:
        The network, with random weights.
    """
    return MLP(math.prod(shape), config.hidden, classes)
