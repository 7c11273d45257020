"""Optimisers as pure functions: (theta, state, gradient) to (theta, state), with PyTorch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sgd(
    theta: Tensor, velocity: Tensor, g: Tensor, lr: Any, momentum: float = 0.0, nesterov: bool = False
) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD's step; the velocity starts at 0."""
    if not momentum:
        return _down(theta, g, lr), velocity
    velocity = torch.add(g, velocity, alpha=momentum)
    return _down(theta, torch.add(g, velocity, alpha=momentum) if nesterov else velocity, lr), velocity


def _down(theta: Tensor, direction: Tensor, lr: Any) -> Tensor:
    # One pass over the numbers instead of two, where the rate is a plain number.
    return theta - lr * direction if isinstance(lr, Tensor) else torch.sub(theta, direction, alpha=lr)


def adam(
    theta: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    lr: Any,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """torch.optim.Adam's step; the state (first moment, second moment, step count) starts at 0."""
    m, v, t = state
    t = t + 1
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = (v / (1 - betas[1] ** t)).sqrt() + eps
    return theta - lr * (m / (1 - betas[0] ** t)) / denominator, (m, v, t)


def adam_start(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's state before its first step."""
    zero = torch.zeros_like(theta)
    return zero, zero, torch.zeros_like(theta[0])
