"""LSTM: two recurrent layers of width model.hidden, as LEAF has them for Shakespeare (there 256): tokens or series."""

from __future__ import annotations

from torch import nn

from perfed.models.config import ModelConfig
from perfed.models.recurrent import Recurrent


def network(shape: tuple[int, ...], classes: int, config: ModelConfig) -> Recurrent:
    """Make the network for tokens [length] or series [channels, length].

    Args:
        shape: the shape of a sample.
        classes: how many outputs there are; of tokens, how many there are.
        config: hidden, the width of the layers.

    Returns:
        The network, with random weights.
    """
    return Recurrent("lstm", nn.LSTM, 2, shape, config.hidden, classes)
