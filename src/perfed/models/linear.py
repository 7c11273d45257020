"""Linear: one linear layer: least squares where numbers are predicted, logistic regression for labels and classes."""

from __future__ import annotations

import math

from perfed.models.config import ModelConfig
from perfed.models.mlr import MLR


def network(shape: tuple[int, ...], classes: int, _config: ModelConfig) -> MLR:
    """Make the network for samples of any shape.

    Args:
        shape: the shape of a sample.
        classes: how many outputs there are: classes, labels or targets.

    Returns:
        The network, with random weights.
    """
    return MLR(math.prod(shape), classes)
