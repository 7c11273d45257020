"""MLR: multinomial logistic regression: one linear layer."""

from __future__ import annotations

import math

from torch import Tensor, nn

from perfed.models.config import ModelConfig


class MLR(nn.Module):
    """One linear layer on all features."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def network(shape: tuple[int, ...], classes: int, _config: ModelConfig) -> MLR:
    """Make the network for samples of any shape.

    Args:
        shape: the shape of a sample.
        classes: how many classes there are.

    Returns:
        The network, with random weights.
    """
    return MLR(math.prod(shape), classes)
