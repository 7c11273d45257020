"""Balance: from counts of clients' classes, who trains with whom, and how many samples a class is to have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.augment import distorted
from perfed.core.messages import Extension
from perfed.core.model import Batch
from perfed.core.random import derive, uniform


def class_rates(counts: Tensor, low: float, high: float) -> Tensor:
    """Return by how much the samples of each class are multiplied to be less uneven, by Astraea's rule.

    A class whose z-score is below `low`, or above `high`, gets as many samples as a score of the geometric mean of the
    two means; all others stay as they are.

    Args:
        counts: samples of each class [classes].
        low: a threshold, at most 0.
        high: another one, at least 0.

    Returns:
        [classes], 1 where nothing changes.

    Example:
        >>> class_rates(torch.tensor([100.0, 100.0, 400.0]), -0.5, 0.5)
        tensor([1.0694, 1.0694, 0.8290])
    """
    M, S = counts.mean(), counts.std()
    z = (counts - M) / S
    more, fewer = M - S * (z * low).sqrt(), M + S * (z * high).sqrt()
    wanted = torch.where(z < low, more, torch.where(z > high, fewer, counts))
    return torch.where((counts > 0) & (S > 0), wanted / counts, 1)


def unevenness(counts: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of classes' shares from the same share of each.

    Args:
        counts: samples of each class, or anything in proportion to them [..., classes]; nothing at all is even.
    """
    p = counts / counts.sum(-1, keepdim=True).clamp_min(1e-9)
    return torch.xlogy(p, p * p.shape[-1]).sum(-1).clamp_min(0)


def grown(counts: Tensor, team: Sequence[int], among: Sequence[int], size: int) -> list[int]:
    """Return a team that has taken others, always the one with which its pooled classes are nearest to even.

    Args:
        counts: samples of each class of each client [clients, classes].
        team: the clients that are in it already.
        among: those that it may take; of equals the first.
        size: clients of the team in the end, if there are so many.

    Returns:
        The team, in the order in which it took them.
    """
    team, among = list(team), list(among)
    while among and len(team) < size:
        distance = unevenness(counts[team].sum(0) + counts[among])
        team.append(among.pop(int(distance.argmin())))
    return team


def balanced_teams(counts: Tensor, size: int) -> list[list[int]]:
    """Put clients into teams whose pooled classes are near to even, one team after another; see `grown`.

    Args:
        counts: samples of each class of each client [clients, classes].
        size: clients of a team; the last one may have fewer.

    Returns:
        The teams, each with its clients in the order in which it took them.

    Example:
        >>> balanced_teams(torch.tensor([[9.0, 0.0], [8.0, 1.0], [0.0, 9.0], [1.0, 7.0]]), 2)
        [[3, 1], [0, 2]]
    """
    left, teams = range(len(counts)), []
    while left:
        teams.append(grown(counts, (), left, size))
        left = [id for id in left if id not in teams[-1]]
    return teams


def copied(batch: Batch, count: int) -> dict[str, Tensor]:
    """Return copies of each sample, distorted where it is an image; its label, and a draw: for `resampled`.

    Args:
        batch: the samples, in a function of `map`.
        count: copies of each.
    """
    assert batch.index is not None  # a map says them
    keys = derive(batch.key, batch.index)
    copies = [distorted(batch.x, derive(keys, number)) for number in range(1, 1 + count)]
    return {"copies": torch.stack(copies, 1), "y": batch.y, "draw": uniform(keys, (), torch.float64)}


def resampled(copies: Tensor, y: Tensor, draw: Tensor, rate: Tensor, real: Tensor) -> Extension:
    """Return which copies of a client's samples join, and which of its own stay, to have `rate` times as many.

    Under a rate below 1 a sample stays with that chance, but for the first one, where no other would. Above 1 all stay,
    with as many copies as there are whole numbers in the rate beyond 1, and one more with the chance that is left.

    Args:
        copies: several of each sample [n, most, ...].
        y: labels [n].
        draw: a number in [0, 1) for each sample [n].
        rate: of each sample's class [n].
        real: whether it is a sample, and no filling [n].
    """
    most, number = copies.shape[1], torch.arange(max(copies.shape[:2]), device=real.device)
    wanted = (rate - 1).floor() + (draw < rate % 1)
    made = real[:, None] & (number[:most] < wanted[:, None])
    keep = real & (draw < rate)
    keep = keep | ((number[: len(real)] == 0) & ~keep.any())
    return Extension(copies.flatten(0, 1), y[:, None].expand_as(made).flatten(), made.flatten(), keep)
