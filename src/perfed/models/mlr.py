"""Multinomial logistic regression."""

from __future__ import annotations

import math

from torch import Tensor, nn

from perfed.training.config import ModelConfig


class MLR(nn.Module):
    """One linear layer on all features."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def network(shape: tuple[int, ...], classes: int, _config: ModelConfig) -> MLR:
    """For samples of any shape."""
    return MLR(math.prod(shape), classes)
