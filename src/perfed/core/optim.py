"""Optimisers as pure functions: (theta, state, gradient) to (theta, state), with PyTorch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sgd(
    theta: Tensor, velocity: Tensor, g: Tensor, lr: Any, momentum: float = 0.0, nesterov: bool = False
) -> tuple[Tensor, Tensor]:
    """Take the step of torch.optim.SGD.

    Args:
        theta: the model.
        velocity: of the steps before, 0 at first; without momentum it is not looked at.
        g: the gradient.
        lr: the learning rate.
        momentum: how much of the velocity is kept.
        nesterov: use Nesterov momentum.

    Returns:
        Theta and velocity after the step.
    """
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
    """Take the step of torch.optim.Adam.

    Args:
        theta: the model.
        state: first moment, second moment and step count, see `adam_start`.
        g: the gradient.
        lr: the learning rate.
        betas: how much of each moment is kept.
        eps: added to the denominator.

    Returns:
        Theta and state after the step.
    """
    m, v, t = state
    t = t + 1
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = (v / (1 - betas[1] ** t)).sqrt() + eps
    return theta - lr * (m / (1 - betas[0] ** t)) / denominator, (m, v, t)


def adam_start(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state of Adam before its first step."""
    zero = torch.zeros_like(theta)
    return zero, zero, torch.zeros_like(theta[0])
