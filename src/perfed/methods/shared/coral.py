"""CORAL: how far two covariances of representations are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core.model import average


def covariance(z: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the covariance of rows, over n - 1; of a single row it is 0.

    Args:
        z: representations [n, d].
        weight: of each row, 0 for filling [n]; None: all count.
    """
    weight = torch.ones_like(z[:, 0]) if weight is None else weight
    centred = z - average(z, weight)
    return (weight[:, None] * centred).T @ centred / (weight.sum() - 1).clamp_min(1)


def coral(C: Tensor, z: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the squared distance of a covariance and that of rows, over 4 d^2; 0 where there is a single row.

    Args:
        C: the covariance to come near to [d, d].
        z: representations [n, d].
        weight: of each row, 0 for filling [n]; None: all count.
    """
    count = torch.ones_like(z[:, 0]).sum() if weight is None else weight.sum()
    distance = (C - covariance(z, weight)).square().sum() / (4 * z.shape[1] ** 2)
    return torch.where(count > 1, distance, 0.0)
