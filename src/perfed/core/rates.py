"""Learning rates that change from round to round: a factor that every method's `lr` is multiplied by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["constant", "step", "cosine", "linear"]


@dataclass(frozen=True)
class Rates:
    """Say what a method's `lr` is multiplied by in each round.

    Round r is step r - 1 of PyTorch's StepLR, CosineAnnealingLR and LinearLR, so the first round has the whole rate. No
    round has a rate of 0: the `end` of cosine and linear would be that of the round after the last one.

    Attributes:
        schedule: the form.
        rounds: of the whole run, which cosine and linear are stretched over.
        every: rounds between two drops of `step`.
        decay: what `step` multiplies the rate by at each drop.
        end: share of the rate that cosine and linear fall towards.
    """

    schedule: Schedule = "constant"
    rounds: int = 1
    every: int = 10
    decay: float = 0.5
    end: float = 0.0

    def factor(self, round: int) -> float:
        """Return what `lr` is multiplied by in a round, counted from 1; an evaluation before the first is as in it.

        >>> [Rates("step", every=2).factor(round) for round in (1, 2, 3, 5)]
        [1.0, 1.0, 0.5, 0.25]
        >>> [round(Rates("cosine", rounds=4).factor(r), 3) for r in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [Rates("linear", rounds=4, end=0.2).factor(r) for r in (1, 3)]
        [1.0, 0.6]
        """
        done = min(max(round - 1, 0), self.rounds - 1) if self.schedule in ("cosine", "linear") else max(round - 1, 0)
        if self.schedule == "step":
            return self.decay ** (done // self.every)
        if self.schedule == "cosine":
            return self.end + (1 - self.end) * (1 + math.cos(math.pi * done / self.rounds)) / 2
        return 1 - (1 - self.end) * done / self.rounds if self.schedule == "linear" else 1.0
