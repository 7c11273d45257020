"""A network with one hidden layer."""

from __future__ import annotations

import math

from torch import Tensor, nn

from perfed.training.config import ModelConfig


class MLP(nn.Module):
    """All features, a hidden layer, classes."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc1(x.flatten(1)).relu())


def network(shape: tuple[int, ...], classes: int, config: ModelConfig) -> MLP:
    """For samples of any shape."""
    return MLP(math.prod(shape), config.hidden, classes)
