"""What several networks predict together: a mixture of their probabilities, or the mean of numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.core.task import Task

LEAST = 1e-30  # a weight of 0 has a logarithm far below all others


def blend(task: Task, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return outputs, as a single network gives them, that mean what several networks say with these weights.

    Args:
        task: what outputs mean.
        outputs: [networks, samples, ...].
        weights: [networks], a share of 1 for each.

    Returns:
        [samples, ...]; of classes and tokens logarithms of probabilities, of labels logits, of numbers their mean.
    """
    share = weights.reshape(-1, *[1] * (outputs.dim() - 1))
    if task.kind == "regression":
        return (share * outputs).sum(0)
    log = share.clamp_min(LEAST).log()
    if task.kind in ("binary", "multilabel"):
        yes, no = (torch.logsumexp(log + F.logsigmoid(sign * outputs), 0) for sign in (1, -1))
        return yes - no
    return torch.logsumexp(log + outputs.log_softmax(-1), 0)
