"""Tiers of clients, from the fastest to the slowest, and how often each of them is drawn (TiFL)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.random import choose_by
from perfed.core.rounds import Known

FIVE = [0.7, 0.1, 0.1, 0.05, 0.05]  # the odds of the policy `random`


def first_odds(policy: str, tiers: int) -> Tensor:
    """Return the odds of each tier before any accuracy is known: [tiers].

    Args:
        policy: fast, slow, random, or else: all alike.
        tiers: how many there are.
    """
    if policy == "random" and tiers != len(FIVE):
        raise Problem(f"tifl's policy random has odds for {len(FIVE)} tiers, and tiers is {tiers}")
    rest = [0.0] * (tiers - 1)
    odds = {"fast": [1.0, *rest], "slow": [*rest, 1.0], "random": FIVE}.get(policy, [1 / tiers] * tiers)
    return torch.tensor(odds, dtype=torch.float64)


def odds_by_accuracy(accuracy: Tensor, credits: Tensor) -> Tensor:
    """Return odds of tiers by rank: the lower its accuracy, the higher; 0 where a tier has no credits.

    Args:
        accuracy: [tiers].
        credits: [tiers].

    Example:
        >>> odds_by_accuracy(torch.tensor([0.5, 0.9, 0.7]), torch.tensor([1, 0, 1]))
        tensor([0.6667, 0.0000, 0.3333], dtype=torch.float64)
    """
    n = int((credits > 0).sum())
    ranked = accuracy.where(credits > 0, math.inf).argsort(stable=True)[:n]
    share = 2 * torch.arange(n, 0, -1, dtype=torch.float64, device=credits.device) / max(n * (n + 1), 1)
    return share.new_zeros(len(credits)).index_copy(0, ranked, share)


def seconds_of(info: Known, round: int, timeout: float) -> Tensor:
    """Return how long each client took in a round: [clients]; without a clock, its number of samples.

    Who did not answer counts like the slowest, or as `timeout`.

    Args:
        info: what is known of the clients.
        round: the round's number, the last one.
        timeout: the most that counts; 0: whatever they took.
    """
    answered, seconds = info.answered == round, info.seconds
    if answered.any() and seconds[answered].isnan().all():
        if timeout:
            raise Problem("tifl's timeout needs a simulated clock: set speed, latency or bandwidth of [system]")
        seconds = torch.tensor(info.sizes, dtype=torch.float64)
    seconds = seconds.where(answered, timeout or float(seconds.where(answered, 0).max()))
    return seconds.clamp_max(timeout or math.inf)


def sorted_into(tiers: int, latency: Tensor, able: Sequence[int], most: float) -> Tensor:
    """Return the tier of each client, -1 for who is in none: [clients]; tiers' sizes differ by 1 at most.

    Args:
        tiers: how many.
        latency: [clients], how long each took.
        able: those that are sorted.
        most: who took as long is left out; 0: nobody.
    """
    took, limit = latency.tolist(), (1 - 1e-9) * most or math.inf  # a sum of equal numbers may be a little less
    ids = [id for id in able if took[id] < limit]
    if not ids:
        raise Problem("tifl's timeout leaves out every client: set it higher")
    order = torch.tensor(ids, device=latency.device)[latency[ids].argsort(stable=True)]
    tier = torch.full_like(latency, -1, dtype=torch.int64)
    for number, part in enumerate(order.tensor_split(tiers)):
        tier[part] = number
    return tier


def credits_of(tiers: int, most: int, latency: Tensor, tier: Tensor, by_speed: bool) -> Tensor:
    """Return how often each tier may be drawn: [tiers].

    Args:
        tiers: how many there are.
        most: how often the fastest; 0: any number.
        latency: [clients], how long each took.
        tier: [clients], the tier of each.
        by_speed: a tier has the fewer, the slower its slowest client is; else all have as many.
    """
    if not most:
        return latency.new_full((tiers,), math.inf)
    slowest = torch.stack([latency.where(tier == number, 0).max() for number in range(tiers)])
    share = slowest[0] / slowest.clamp_min(slowest[0]) if by_speed else torch.ones_like(slowest)
    return (most * share).ceil()


def drawn_tier(key: Tensor, odds: Tensor, credits: Tensor, there: Tensor) -> tuple[int, Tensor]:
    """Draw a tier by its odds, out of those with credits and with clients who can be asked.

    Where no tier has a credit, each gets one. Where the odds of all that are left are 0, they do not count; nor do
    credits, where nobody with any can be asked.

    Args:
        key: one key.
        odds: [tiers].
        credits: [tiers].
        there: the tiers of those who can be asked; -1 is none.

    Returns:
        The tier, and the credits that are left; tier 0 where nobody can be asked.
    """
    credits = credits if credits.any() else torch.ones_like(credits)
    able = (there == torch.arange(len(odds), device=odds.device)[:, None]).any(1).to(odds)
    paid = able * (credits > 0)
    drawn = next((choose_by(key, 1, weights) for weights in (paid * odds, paid, able) if weights.any()), [])
    left = credits.clone()
    left[drawn] = (left[drawn] - 1).clamp_min(0)
    return (drawn or [0])[0], left
