"""A network with the preparation of its samples in front, so that it takes the rows of a table as they are."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from perfed.data.preparation import Preparation
from perfed.data.records import from_frame, is_frame
from perfed.models.predictor import dtype_of


class OnRawRows(nn.Module):
    """A client's network, and what becomes of a row before the network sees it."""

    def __init__(self, network: nn.Module, preparation: Preparation):
        super().__init__()
        self.network, self.preparation = network, preparation

    def extra_repr(self) -> str:
        """Say which columns a row has."""
        return f"rows: {', '.join(column.name for column in self.preparation.columns)}"

    def forward(self, rows: Any) -> Tensor:
        """Return logits.

        Args:
            rows: [n, columns], NaN where a value is missing, of a text its place in its column's texts; or a DataFrame.
        """
        if is_frame(rows):
            values, notes = self.preparation.align(from_frame(rows), "the input")
            for note in notes:
                warnings.warn(note, stacklevel=2)
            rows = torch.from_numpy(values)
        tensor = next(iter([*self.network.parameters(), *self.network.buffers()]))
        return self.network(self.preparation.apply(rows.to(tensor.device)).to(dtype_of(self.network)))
