"""Scores that need all predictions for a client at once: macro-F1 and micro-averaged AUC, for many clients together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.tree import send


def full_scores(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Return macro-F1 and AUC of many clients.

    Args:
        out: the network's outputs [n, classes], client after client.
        y: the right classes [n].
        size: samples of each client, n in all.

    Returns:
        `macro_f1` and `auc`, one number per client; NaN for a client without samples.

    Example:
        >>> out, y = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> scores = full_scores(out, y, [3, 0])  # two clients, the second without samples
        >>> {name: [round(value, 3) for value in values.tolist()] for name, values in scores.items()}
        {'macro_f1': [0.667, nan], 'auc': [0.722, nan]}
    """
    count = send(torch.tensor(size), y.device)
    client = torch.arange(len(size), device=y.device).repeat_interleave(count, output_size=len(y))
    return {"macro_f1": macro_f1(out, y, client, len(size)), "auc": micro_auc(out, y, client, count)}


def macro_f1(out: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the mean of 2 tp / (2 tp + fp + fn) over the classes that a client has or predicts.

    Args:
        out: the network's outputs [n, classes].
        y: the right classes [n].
        client: whose sample it is [n].
        clients: number of clients.

    Returns:
        One number per client; NaN without samples.
    """
    predicted, classes = out.argmax(1), out.shape[1]

    def count(label: Tensor, owner: Tensor) -> Tensor:
        """Return how often each client has each class: [clients, classes]."""
        return torch.bincount(owner * classes + label, minlength=clients * classes).view(clients, classes)

    right = y[predicted == y]
    true_positives = count(right, client[predicted == y])
    both = count(y, client) + count(predicted, client)  # 2 tp + fp + fn
    return (2 * true_positives.double() / both.clamp_min(1)).sum(1) / (both > 0).sum(1)


def micro_auc(out: Tensor, y: Tensor, client: Tensor, count: Tensor) -> Tensor:
    """Return the chance that a right output exceeds a wrong one, ties half, among all outputs for a client.

    Every sample is a question for each class, and all these questions are one ranking (one-vs-rest, pooled). Outputs
    are the network's own, before softmax, as in the code of the PGFed paper.

    Args:
        out: the network's outputs [n, classes], client after client.
        y: the right classes [n].
        client: whose sample it is [n].
        count: samples of each client.

    Returns:
        One number per client; NaN without samples, or where an output is NaN.
    """
    samples, classes = out.shape
    right = torch.zeros_like(out, dtype=torch.bool).scatter(1, y[:, None], True).flatten()
    value, owner = out.flatten(), client.repeat_interleave(classes)
    order = value.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]  # client by client, each from its lowest output to its highest
    value, owner, right = value[order], owner[order], right[order]
    new = torch.ones_like(right)
    new[1:] = (value[1:] != value[:-1]) | (owner[1:] != owner[:-1])
    tie = new.cumsum(0) - 1
    # Equal outputs share the mean of their ranks: a whole number or a half, so sums of them are exact.
    rank = torch.arange(samples * classes, device=out.device)[new] + (tie.bincount().double() - 1) / 2
    rank = rank[tie] - ((count.cumsum(0) - count) * classes)[owner]  # from 0 for each client
    total = torch.zeros_like(count, dtype=torch.float64).index_add(0, owner[right], rank[right])
    unknown = torch.zeros_like(total).index_add(0, client, out.isnan().any(1).double()) > 0
    n = count.double()
    return ((total - n * (n - 1) / 2) / (n * n * (classes - 1))).where(~unknown, torch.nan)
