"""GRU: one recurrent layer of width model.hidden: which token comes next, or what a series of measurements is."""

from __future__ import annotations

from torch import nn

from perfed.models.config import ModelConfig
from perfed.models.recurrent import Recurrent


def network(shape: tuple[int, ...], classes: int, config: ModelConfig) -> Recurrent:
    """Make the network for tokens [length] or series [channels, length].

    Args:
        shape: the shape of a sample.
        classes: how many outputs there are; of tokens, how many there are.
        config: hidden, the width of the layer.

    Returns:
        The network, with random weights.
    """
    return Recurrent("gru", nn.GRU, 1, shape, config.hidden, classes)
