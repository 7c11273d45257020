"""The machines that clients are, as a simulation: who can be asked, what each can afford, and how long it takes.

Everything is drawn by key: a function of seed, client and round, alike for every method and engine; nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from perfed.core.random import SYSTEM, derive, normal, uniform
from perfed.federation.config import SystemConfig

# What is drawn: a client's own numbers, then those of a round.
SPEED, BANDWIDTH, AFFORD, JITTER, AVAILABLE, AFFORD_NOW = range(6)


class System(SystemConfig):
    """Draw what a configuration says of the machines."""

    @property
    def timed(self) -> bool:
        """Return True if there is a simulated clock."""
        return bool(self.speed or self.latency or self.bandwidth)

    @property
    def limits(self) -> bool:
        """Return True if there is work that clients cannot afford."""
        return self.affordable_max > 0

    def available(self, seed: int, round: int, able: Sequence[int]) -> Sequence[int]:
        """Return those of the clients `able` that can be asked in a round."""
        if self.availability == 1:
            return able
        there = _uniform(_keys(seed, AVAILABLE, able, round)) < self.availability
        return [id for id, here in zip(able, there.tolist(), strict=True) if here]

    def affordable(self, seed: int, round: int, ids: Sequence[int]) -> list[float] | None:
        """Return how many epochs each client can afford in a round, in thousandths; None: any number."""
        if not self.limits:
            return None
        share = _uniform(_keys(seed, AFFORD, ids))
        mean = self.affordable_min + (self.affordable_max - self.affordable_min) * share
        now = mean * (1 + self.affordable_spread * normal(_keys(seed, AFFORD_NOW, ids, round), (), torch.float64))
        return [math.floor(epochs * 1000) / 1000 for epochs in now.clamp_min(0).tolist()]

    def seconds(
        self, seed: int, round: int, ids: Sequence[int], samples: Sequence[int], down: float, up: float
    ) -> list[float]:
        """Return how long an exchange takes each client: two messages, unless they are empty, and the training.

        Args:
            seed: the run's.
            round: the round's number.
            ids: the clients.
            samples: how many the training steps of each look at.
            down: bytes that each receives.
            up: bytes that each sends.
        """
        took = torch.full((len(ids),), self.latency * ((down > 0) + (up > 0)), dtype=torch.float64)
        if self.bandwidth:
            took += (down + up) / self.bandwidth * _spread(self.bandwidth_spread, _keys(seed, BANDWIDTH, ids))
        if self.speed:
            slower = _spread(self.speed_spread, _keys(seed, SPEED, ids))
            slower *= _spread(self.jitter, _keys(seed, JITTER, ids, round))
            took += torch.tensor(samples, dtype=torch.float64) / self.speed * slower
        return took.tolist()


def _keys(seed: int, what: int, ids: Sequence[int], *parts: int) -> Tensor:
    """Return a key for each client."""
    return derive(derive(seed, SYSTEM, what, *parts), torch.tensor(ids, dtype=torch.int64))


def _uniform(keys: Tensor) -> Tensor:
    """Return for each key a number in [0, 1)."""
    return uniform(keys, (), torch.float64)


def _spread(deviation: float, keys: Tensor) -> Tensor:
    """Return for each key a factor whose logarithm has this deviation, and the median 1."""
    return (deviation * normal(keys, (), torch.float64)).exp()
