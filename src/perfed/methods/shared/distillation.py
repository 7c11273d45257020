"""What methods share whose models learn from outputs that others gave for samples."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from perfed.core.model import Batch, Loss, Model, average


def of_outputs(model: Model, distance: Callable[[Tensor, Tensor], Tensor], wanted: Tensor) -> Loss:
    """Return a loss: how far a model's outputs are from those that are wanted, in the mean over a batch.

    Args:
        model: whose loss it is.
        distance: (outputs, what is wanted in their place) to a number for each sample.
        wanted: a row for each sample, by its number.
    """

    def loss(theta: Tensor, batch: Batch, train: bool) -> tuple[Tensor, Tensor]:
        out, fresh = model.apply(theta, batch.x, train, batch.weight, batch.key)
        return average(distance(out, wanted[batch.index]), batch.weight), fresh

    return loss
