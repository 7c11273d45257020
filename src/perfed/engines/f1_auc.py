"""Scores that need all predictions for a client at once, for many clients together: balanced accuracy, F1, two AUCs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.tree import send


def full_scores(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Return balanced accuracy, macro-F1, and AUC both micro-averaged (`auc`) and macro-averaged, of many clients.

    Args:
        out: the network's outputs [n, classes], client after client.
        y: the right classes [n].
        size: samples of each client, n in all.

    Returns:
        `balanced_accuracy`, `macro_f1`, `auc` and `macro_auc`, one number per client; NaN for a client without samples.

    Example:
        >>> out, y = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> scores = full_scores(out, y, [3, 0])  # two clients, the second without samples
        >>> {name: [round(value, 3) for value in values.tolist()] for name, values in scores.items()}
        {'balanced_accuracy': [0.75, nan], 'macro_f1': [0.667, nan], 'auc': [0.722, nan], 'macro_auc': [0.75, nan]}
    """
    count = send(torch.tensor(size), y.device)
    client = torch.arange(len(size), device=y.device).repeat_interleave(count, output_size=len(y))
    return {
        "balanced_accuracy": balanced_accuracy(out, y, client, len(size)),
        "macro_f1": macro_f1(out, y, client, len(size)),
        "auc": micro_auc(out, y, client, count),
        "macro_auc": macro_auc(out, y, client, len(size)),
    }


def balanced_accuracy(out: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the mean over a client's classes of the share of their samples that is predicted rightly.

    Args:
        out: the network's outputs [n, classes].
        y: the right classes [n].
        client: whose sample it is [n].
        clients: number of clients.

    Returns:
        One number per client; NaN without samples.
    """
    classes = out.shape[1]
    group, right = client * classes + y, out.argmax(1) == y
    count = torch.bincount(group, minlength=clients * classes).view(clients, classes)
    hits = torch.bincount(group, right.double(), minlength=clients * classes).view(clients, classes)
    return (hits / count.clamp_min(1)).sum(1) / (count > 0).sum(1)


def macro_auc(out: Tensor, y: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the mean over a client's classes of the chance that a sample of the class is given it more than another.

    Each class is ranked by itself, by its probability among the client's samples: a network that always prefers the
    frequent class has 0.5, where the micro-averaged AUC is close to 1.

    Args:
        out: the network's outputs [n, classes].
        y: the right classes [n].
        client: whose sample it is [n].
        clients: number of clients.

    Returns:
        One number per client; NaN where a client has samples of one class alone, or an output is NaN.
    """
    classes = out.shape[1]
    value = out.double().log_softmax(1).float().flatten()  # what is equal but for rounding is equal
    group = (client[:, None] * classes + torch.arange(classes, device=y.device)).flatten()
    right = torch.zeros_like(out, dtype=torch.bool).scatter(1, y[:, None], True).flatten()
    group, right, rank = _ranked(value, group, right)
    count = torch.bincount(group, minlength=clients * classes)
    n = torch.bincount(group[right], minlength=clients * classes).double()
    total = torch.zeros_like(n).index_add(0, group[right], (rank - (count.cumsum(0) - count)[group])[right])
    each = ((total - n * (n - 1) / 2) / (n * (count - n))).view(clients, classes)
    unknown = torch.zeros(clients, dtype=n.dtype, device=n.device).index_add(0, client, out.isnan().any(1).double()) > 0
    return each.nanmean(1).where(~unknown, torch.nan)  # 0 / 0: all of a client's samples are of the class, or none


def _ranked(value: Tensor, owner: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort values within each owner, owner by owner; equal values share the mean of their ranks.

    Args:
        value: [n].
        owner: [n], whole numbers from 0.
        right: [n], sorted with them.

    Returns:
        The owners, what came with the values, and ranks from 0 on over all owners; whole or half, so sums are exact.
    """
    order = value.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]  # owner by owner, each from its lowest value to its highest
    value, owner, right = value[order], owner[order], right[order]
    new = torch.ones_like(right)
    new[1:] = (value[1:] != value[:-1]) | (owner[1:] != owner[:-1])
    tie = new.cumsum(0) - 1
    rank = torch.arange(len(value), device=value.device)[new] + (tie.bincount().double() - 1) / 2
    return owner, right, rank[tie]


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
    classes = out.shape[1]
    right = torch.zeros_like(out, dtype=torch.bool).scatter(1, y[:, None], True).flatten()
    owner, right, rank = _ranked(out.flatten(), client.repeat_interleave(classes), right)
    rank = rank - ((count.cumsum(0) - count) * classes)[owner]  # from 0 for each client
    total = torch.zeros_like(count, dtype=torch.float64).index_add(0, owner[right], rank[right])
    unknown = torch.zeros_like(total).index_add(0, client, out.isnan().any(1).double()) > 0
    n = count.double()
    return ((total - n * (n - 1) / 2) / (n * n * (classes - 1))).where(~unknown, torch.nan)
