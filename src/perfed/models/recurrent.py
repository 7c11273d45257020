"""Recurrent networks: what `gru` and `lstm` have in common."""

from __future__ import annotations

from torch import Tensor, nn

from perfed.core.errors import Problem

EMBEDDING = 8  # numbers that stand for a token, as in LEAF's network for Shakespeare


class Recurrent(nn.Module):
    """A recurrent layer over a sequence, and a linear head.

    Samples [length] are tokens: the head says for each which is next. Samples [channels, length] are series: the head
    follows the last step.
    """

    def __init__(
        self, name: str, layer: type[nn.GRU | nn.LSTM], layers: int, shape: tuple[int, ...], hidden: int, out: int
    ):
        super().__init__()
        if len(shape) not in (1, 2):
            raise Problem(f"model.name '{name}' needs tokens [length] or series [channels, length], not {list(shape)}")
        self.name, self.tokens = name, len(shape) == 1
        if self.tokens:
            self.embed = nn.Embedding(out, EMBEDDING)
        self.layer = layer(EMBEDDING if self.tokens else shape[0], hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        if not self.tokens:
            return self.head(self.layer(x.transpose(1, 2))[0][:, -1])
        if x.is_floating_point():
            raise Problem(f"model.name '{self.name}' reads tokens or series, and these samples are rows of numbers")
        return self.head(self.layer(self.embed(x))[0])
