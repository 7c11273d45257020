"""Mixtures of models, layer by layer, and the weights of a mixture on the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.model import Model


class Mixture:
    """Sums of models (rows of theta) with coefficients `[..., L]`: one for each layer that owns entries of `mask`.

    Entries outside `mask` are not mixed: they are the same in every row. Sums are products of small matrices, one per
    layer, so nothing of the size of all coefficients is made.
    """

    def __init__(self, model: Model, mask: Tensor, shared: bool = False):
        """Prepare the mixture.

        Args:
            model: the network.
            mask: [width], True for entries that are mixed.
            shared: one coefficient for all layers.
        """
        if not mask.any():
            raise Problem("the model has no layer that could be mixed")
        layers, index = model.layer[mask].unique(return_inverse=True)
        self.mask = mask
        self.L = 1 if shared else len(layers)
        self.column = torch.full_like(model.layer, self.L)  # [width], L outside the mask
        self.column[mask] = index.clamp_max(self.L - 1)
        columns, sizes = self.column.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        # Neighbours with the same coefficient: (its column, first entry, entry behind the last).
        self.runs: list[list[int]] = torch.stack([columns, ends - sizes, ends], 1).tolist()

    def spread(self, coefficients: Tensor) -> Tensor:
        """Return each entry's coefficient, `[..., width]`; 1 outside the mask."""
        return torch.nn.functional.pad(coefficients, (0, 1), value=1.0)[..., self.column]

    def blend(self, alpha: Tensor, rows: Tensor) -> Tensor:
        """Return the sum of rows `[R, width]` with coefficients `[R, L]`."""
        return torch.cat([alpha[:, l] @ rows[:, a:b] if l < self.L else rows[0, a:b] for l, a, b in self.runs])

    def slopes(self, rows: Tensor, g: Tensor) -> Tensor:
        """Return the gradient of `alpha`, `[R, L]`, from that of the blend, g: inner products in each layer."""
        each = [sum(rows[:, a:b] @ g[a:b] for k, a, b in self.runs if k == l) for l in range(self.L)]
        return torch.stack(each, 1)  # pyright: ignore[reportArgumentType]


def project(v: Tensor) -> Tensor:
    """Return the nearest point of the simplex, for each column."""
    u = v.sort(0, descending=True)[0]
    over = (u.cumsum(0) - 1) / torch.arange(1, len(v) + 1, device=v.device)[:, None]
    return (v - over.gather(0, (u > over).sum(0, keepdim=True) - 1)).clamp_min(0)


def convex(state: Tensor, simplex: str) -> Tensor:
    """Return the weights that `state` stands for, each column a mixture; equal weights if it is constant."""
    return state.softmax(0) if simplex == "softmax" else state


def convex_step(state: Tensor, slope: Tensor, lr: float, simplex: str) -> Tensor:
    """Take a step of SGD along the weights' gradient.

    Args:
        state: what `convex` makes weights of.
        slope: the gradient of the weights.
        lr: the learning rate.
        simplex: what keeps the weights on it: softmax (the state is its input), projection (after the step), or none.

    Returns:
        The new state.
    """
    if simplex == "softmax":
        alpha = state.softmax(0)
        return state - lr * alpha * (slope - (alpha * slope).sum(0))
    return project(state - lr * slope) if simplex == "projection" else state - lr * slope
