"""What watches a run and never changes it: logs, checkpoints, progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from perfed.engines.base import Values
    from perfed.federation.federation import Federation


@dataclass(frozen=True)
class Round:
    """What there is to see after a round."""

    federation: Federation
    cohort: list[int]
    values: Values | None  # None where this round was not evaluated
    seconds: float
    last: bool
    stopped: str = ""  # why it is the last one, where rounds were left


class Observer(Protocol):
    """Anything that looks at a round."""

    def see(self, event: Round) -> None:
        """Called after every round."""
