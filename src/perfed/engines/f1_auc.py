"""Scores that need all predictions for a client at once: macro-F1 and micro-averaged AUC, for many clients together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.tree import send


def full_scores(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Both, one number per client: `out` [n, classes] and `y` [n] hold `size[i]` samples of each client in turn.

    >>> found = full_scores(torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1]), [3, 0])
    >>> {name: [round(value, 3) for value in values.tolist()] for name, values in found.items()}
    {'macro_f1': [0.667, nan], 'auc': [0.722, nan]}
    """
    count = send(torch.tensor(size), y.device)
    client = torch.arange(len(size), device=y.device).repeat_interleave(count, output_size=len(y))
    return {"macro_f1": macro_f1(out, y, client, len(size)), "auc": micro_auc(out, y, client, count)}


def macro_f1(out: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """The mean of 2 tp / (2 tp + fp + fn) over the classes that a client has or predicts; NaN without samples."""
    said, classes = out.argmax(1), out.shape[1]
    count = lambda label, of: torch.bincount(of * classes + label, minlength=clients * classes).view(clients, classes)
    hit, both = count(y[said == y], client[said == y]), count(y, client) + count(said, client)
    return (2 * hit.double() / both.clamp_min(1)).sum(1) / (both > 0).sum(1)


def micro_auc(out: Tensor, y: Tensor, client: Tensor, count: Tensor) -> Tensor:
    """The chance that a right output exceeds a wrong one, ties half, among all outputs for a client; NaN without any.

    Every sample is a question for each class, and all these questions are one ranking (one-vs-rest, pooled). Outputs
    are the network's own, before softmax, as in the code of the PGFed paper.
    """
    n, classes = out.shape
    right = torch.zeros_like(out, dtype=torch.bool).scatter(1, y[:, None], True).flatten()
    value, whose = out.flatten(), client.repeat_interleave(classes)
    order = value.argsort(stable=True)
    order = order[whose[order].argsort(stable=True)]  # client by client, each from its lowest output to its highest
    value, whose, right = value[order], whose[order], right[order]
    new = torch.ones_like(right)
    new[1:] = (value[1:] != value[:-1]) | (whose[1:] != whose[:-1])
    tie = new.cumsum(0) - 1
    place = torch.arange(n * classes, device=out.device)[new] + (tie.bincount().double() - 1) / 2  # equal ones share it
    place = place[tie] - ((count.cumsum(0) - count) * classes)[whose]  # from 0 for each client
    total = torch.zeros_like(count, dtype=torch.float64).index_add(0, whose[right], place[right])  # halves: exact
    unknown = torch.zeros_like(total).index_add(0, client, out.isnan().any(1).double()) > 0
    n = count.double()
    return ((total - n * (n - 1) / 2) / (n * n * (classes - 1))).where(~unknown, torch.nan)
