"""Scores that need all predictions for a client at once, for many clients together: of classes, labels, and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.tree import send


def of_classes(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Return balanced accuracy, macro-F1, and AUC both micro-averaged (`auc`) and macro-averaged, of many clients.

    Args:
        out: the network's outputs [n, classes], client after client.
        y: the right classes [n].
        size: samples of each client, n in all.

    Returns:
        `balanced_accuracy`, `macro_f1`, `auc` and `macro_auc`, one number per client; NaN for a client without samples.

    Example:
        >>> out, y = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), torch.tensor([0, 1, 1])
        >>> scores = of_classes(out, y, [3, 0])  # two clients, the second without samples
        >>> {name: [round(value, 3) for value in values.tolist()] for name, values in scores.items()}
        {'balanced_accuracy': [0.75, nan], 'macro_f1': [0.667, nan], 'auc': [0.722, nan], 'macro_auc': [0.75, nan]}
    """
    count, client = send(torch.tensor(size), y.device), _client_of_rows(y, size)
    return {
        "balanced_accuracy": balanced_accuracy(out, y, client, len(size)),
        "macro_f1": macro_f1(out, y, client, len(size)),
        "auc": micro_auc(out, y, client, count),
        "macro_auc": macro_auc(out, y, client, len(size)),
    }


def _client_of_rows(y: Tensor, size: Sequence[int]) -> Tensor:
    """Return whose sample each row is."""
    count = send(torch.tensor(size, dtype=torch.int64), y.device)
    return torch.arange(len(size), device=y.device).repeat_interleave(count, output_size=len(y))


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
    right = torch.zeros_like(out, dtype=torch.bool).scatter(1, y[:, None], True)
    return _auc_of_columns(out.double().log_softmax(1), right, client, clients).where(
        ~_unknown(out, client, clients), torch.nan
    )


def _auc_of_columns(value: Tensor, right: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the mean over columns of the chance that a client's right value of a column exceeds a wrong one."""
    columns = value.shape[1]
    group = _groups(client, columns)
    # Rounded: what is equal but for rounding is equal.
    group, flat, rank = _ranked(value.float().flatten(), group, right.flatten())
    count = torch.bincount(group, minlength=clients * columns)
    n = torch.bincount(group[flat], minlength=clients * columns).double()
    total = torch.zeros_like(n).index_add(0, group[flat], (rank - (count.cumsum(0) - count)[group])[flat])
    each = ((total - n * (n - 1) / 2) / (n * (count - n))).view(clients, columns)
    return each.nanmean(1)  # 0 / 0: all of a client's samples are right in the column, or none


def _groups(client: Tensor, columns: int) -> Tensor:
    """Return a number for each client and column, sample after sample."""
    return (client[:, None] * columns + torch.arange(columns, device=client.device)).flatten()


def _unknown(out: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return which clients have an output that is NaN."""
    zero = torch.zeros(clients, dtype=torch.float64, device=out.device)
    return zero.index_add(0, client, out.isnan().any(1).double()) > 0


def _ranked(value: Tensor, owner: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort values within each owner, owner by owner; equal values share the mean of their ranks.

    Args:
        value: [n].
        owner: [n], whole numbers from 0.
        right: [n], sorted with them.

    Returns:
        The owners, what came with the values, and ranks from 0 on over all owners; whole or half, so sums are exact.
    """
    owner, right, tie = _sorted(value, owner, right)
    count = tie.bincount()
    rank = count.cumsum(0) - count + (count.double() - 1) / 2
    return owner, right, rank[tie]


def _sorted(value: Tensor, owner: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort values owner by owner; return the owners, what came along, and a number for each group of equal values."""
    order = value.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]  # owner by owner, each from its lowest value to its highest
    value, owner, right = value[order], owner[order], right[order]
    new = torch.ones_like(right)
    new[1:] = (value[1:] != value[:-1]) | (owner[1:] != owner[:-1])
    return owner, right, new.cumsum(0) - 1


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
    n = count.double()
    value = (total - n * (n - 1) / 2) / (n * n * (classes - 1))
    return value.where(~_unknown(out, client, len(count)), torch.nan)


def of_labels(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Return AUC and average precision of many clients, each the mean over labels (columns).

    A label that all of a client's samples have, or none, has no AUC; one that none has has no average precision. Such a
    label counts nowhere, and a client with no other has no score (NaN).

    Args:
        out: the network's outputs [n, labels], client after client.
        y: 1 where a sample has a label, else 0 [n, labels].
        size: samples of each client, n in all.

    Returns:
        `auc` and `average_precision`, one number per client.

    Example:
        >>> out, y = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([[1.0], [1.0], [0.0]])
        >>> {name: round(value.item(), 3) for name, value in of_labels(out, y, [3]).items()}
        {'auc': 0.5, 'average_precision': 0.833}
    """
    client, clients, right = _client_of_rows(y, size), len(size), y > 0
    known = ~_unknown(out, client, clients)
    scores = {
        "auc": _auc_of_columns(out, right, client, clients),
        "average_precision": _average_precision(out, right, client, clients),
    }
    return {name: value.where(known, torch.nan) for name, value in scores.items()}


def _average_precision(out: Tensor, right: Tensor, client: Tensor, clients: int) -> Tensor:
    """Return the mean over columns of the precision at a client's right values, equal values at once."""
    columns = out.shape[1]
    # Negative: from each owner's highest value to its lowest.
    group, flat, tie = _sorted(-out.float().flatten(), _groups(client, columns), right.flatten())
    count = torch.bincount(group, minlength=clients * columns)
    last, first = tie.bincount().cumsum(0)[tie] - 1, (count.cumsum(0) - count)[group]
    hits = flat.double().cumsum(0)
    before = (hits - flat.double())[first]
    precision = (hits[last] - before) / (last - first + 1)
    n = torch.bincount(group[flat], minlength=clients * columns).double()
    total = torch.zeros_like(n).index_add(0, group[flat], precision[flat])
    return (total / n).view(clients, columns).nanmean(1)


def of_numbers(out: Tensor, y: Tensor, size: Sequence[int]) -> dict[str, Tensor]:
    """Return R^2 of many clients, the mean over targets (columns): 1 - squared error / squared distance from the mean.

    The mean is that of the client's own samples. A target that is the same for all of them counts nowhere, and a
    client with no other has no score (NaN).

    Args:
        out: the network's outputs [n, targets], client after client.
        y: the right numbers [n, targets].
        size: samples of each client, n in all.

    Returns:
        `r2`, one number per client.

    Example:
        >>> out, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [2.0], [3.0]])
        >>> of_numbers(out, y, [3])["r2"].tolist()
        [0.5]
    """
    client, y = _client_of_rows(y, size), y.double()
    zero = torch.zeros(len(size), y.shape[1], dtype=y.dtype, device=y.device)
    total = lambda numbers: zero.index_add(0, client, numbers)
    mean = total(y) / total(torch.ones_like(y))
    wrong, spread = total((out.double() - y) ** 2), total((y - mean[client]) ** 2)
    rows = client[:, None].expand_as(y)
    constant = zero.scatter_reduce(0, rows, y, "amax", include_self=False) == zero.scatter_reduce(
        0, rows, y, "amin", include_self=False
    )
    return {"r2": (1 - wrong / spread).where(~constant, torch.nan).nanmean(1)}
