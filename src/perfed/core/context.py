"""Where in a run a method's function is called: what the run decides, and no setting of the method says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from perfed.core.networks import Networks


@dataclass(frozen=True)
class Context:
    """Say where in a run a function is called; in a method it is `self.context`.

    Attributes:
        seed: the run's seed; initial models and a method's own draws follow from it.
        round: the round that goes on, from 1; before the first 0, and between two the one that is done.
        exchange: the exchange of the round, from 0.
        phase: the name of the round's phase, see `Method.phase`; between two rounds there is none.
        population: number of clients in all.
        cohort: number of clients that a round is meant to have.
        rounds: number of rounds of the whole run, over which a method may stretch what changes.
        longest: most training samples that a client has: rows of what `data.map` makes of its own.
        public: number of public samples, where the method needs such.
        networks: the networks of the clients and who has which; None: all have the same one.
        network: the number of the client's own network, in a function that runs for ONE client.
    """

    seed: int = 0
    round: int = 0
    exchange: int = 0
    phase: str = ""
    population: int = 0
    cohort: int = 0
    rounds: int = 1
    longest: int = 0
    public: int = 0
    networks: Networks | None = None
    network: int = 0


class Hidden:
    """Stand for the context inside a step: steps are recorded once and replayed in every round."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copying asks for
            raise AttributeError(name)
        raise RuntimeError(
            f"a step reads context.{name}, but a step is the same in every round: hand what differs over through "
            "`given`, as a tensor"
        )


HIDDEN = Hidden()
