"""Principal components: what a few numbers can say of long vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def principal(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean of rows, and the directions in which they differ most.

    It is computed in float64; whether a direction points there or back is a matter of rounding.

    Args:
        rows: [n, d].
        count: how many directions, n - 1 at most: more there are not.

    Returns:
        [d], and [count, d], orthonormal.

    Example:
        >>> mean, directions = principal(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]), 1)
        >>> mean, directions.abs()
        (tensor([2., 1.]), tensor([[1., 0.]]))
    """
    mean = rows.double().mean(0)
    directions = torch.linalg.svd(rows.double() - mean, full_matrices=False)[2][:count]
    return mean.to(rows.dtype), directions.contiguous().to(rows.dtype)


def space_of(rows: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the space of the principal components of all rows but the first, and where all of them lie in it.

    Coordinates of the first row are 0 or above, so that nothing depends on rounding; the mean of all squares is 1.

    Args:
        rows: [1 + n, d].
        count: how many components, n - 1 at most.
    """
    origin, directions = principal(rows[1:], count)
    places = (rows - origin) @ directions.T
    scale = torch.where(places[0] < 0, -1, 1) / places.pow(2).mean().sqrt()
    return {"origin": origin, "directions": directions * scale[:, None]}, places * scale


def coordinates(space: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return where rows [n, d] lie in a `space`: [n, count]."""
    return (rows - space["origin"]) @ space["directions"].T
