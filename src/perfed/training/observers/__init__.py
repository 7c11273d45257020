"""What watches a run and never changes it: logs, checkpoints, progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from perfed.engines.scores import Scores
    from perfed.federation.federation import Federation


@dataclass(frozen=True)
class Round:
    """What there is to see after a round."""

    federation: Federation
    cohort: list[int]
    scores: Scores | None  # None where this round was not evaluated
    seconds: float
    last: bool
    stopped: str = ""  # why it is the last one, where rounds were left
    refused: list[dict[str, Any]] = field(default_factory=list)  # uploads that were not used, as far as known by now


class Observer(Protocol):
    """Anything that looks at a round."""

    def see(self, event: Round) -> None:
        """Called after every round."""
