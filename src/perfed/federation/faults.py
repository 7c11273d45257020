"""Clients that fail: some never answer in a round, some have finished only a part of their work when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from perfed.core.errors import Problem
from perfed.core.random import DROPOUT, STRAGGLE, derive, uniform
from perfed.core.rounds import Chosen


class Answers(NamedTuple):
    """What becomes of a round's clients."""

    ids: list[int]  # whose work reaches the server
    lost: list[int]  # whose does not
    done: list[float] | None = None  # epochs that each of `ids` finishes; None: all finish all
    asked: list[float] | None = None  # epochs that each of `ids` is asked for; None: those of the method

    def limited(self, wanted: Chosen, most: Sequence[float] | None, epochs: int, discard: bool) -> Answers:
        """Return the answers of clients that are asked for a part of the work, or cannot afford all of it.

        Args:
            wanted: who is asked for how much.
            most: epochs that each of `ids` can afford; None: any number.
            epochs: those of the method, which is what clients are asked for where nobody says otherwise.
            discard: who does not finish what it was asked for is lost.
        """
        if wanted.epochs is None and most is None:
            return self
        kept: list[tuple[int, float, float]] = []
        everything: list[float] = [epochs] * len(self.ids)
        for id, *limits in zip(self.ids, self.done or everything, most or everything, strict=True):
            can, asked = min(limits), epochs if wanted.epochs is None else wanted.epochs[id]
            if can < asked and wanted.least is not None:
                does = wanted.least[id] if can >= wanted.least[id] else 0
            else:
                does = 0 if can < asked and discard else min(can, asked)
            if does:
                kept.append((id, whole(does), whole(asked)))
        ids, done, asked = (list(column) for column in zip(*kept, strict=True)) if kept else ([], [], [])
        lost = sorted({*self.lost, *self.ids} - {*ids})
        return Answers(ids, lost, done, None if wanted.epochs is None else asked)

    def late(self, epochs: int) -> dict[int, float]:
        """Return the clients that finish less than they were asked for, and how much; the method has `epochs`."""
        if self.done is None:
            return {}
        asked = self.asked or [epochs] * len(self.ids)
        return {id: done for id, done, wanted in zip(self.ids, self.done, asked, strict=True) if done < wanted}


def whole(epochs: float) -> float:
    """Return a number of epochs, a whole one as a whole number."""
    return int(epochs) if epochs == int(epochs) else epochs


@dataclass(frozen=True)
class Faults:
    """How often clients fail, and what becomes of what stragglers have done."""

    dropout: float = 0.0  # share of a round's clients that never answer
    stragglers: float = 0.0  # share of the others that finish 1 to E of their E epochs
    discard: bool = False  # their work is lost, too

    def draw(self, seed: int, round: int, ids: list[int], epochs: int) -> Answers:
        """Draw what happens in a round: a function of seed, round and clients, alike for every method and engine.

        Args:
            seed: the run's.
            round: the round's number.
            ids: who is asked.
            epochs: E, of which a straggler finishes some.

        Returns:
            Who answers, who does not, and how much of the work is done.
        """
        lost = draw_share(derive(seed, DROPOUT, round), ids, self.dropout)
        left = [id for id in ids if id not in lost]
        key = derive(seed, STRAGGLE, round)
        late = draw_share(key, left, self.stragglers)
        if self.discard:
            return Answers([id for id in left if id not in late], [id for id in ids if id in lost or id in late])
        if not late:
            return Answers(left, sorted(lost))
        drawn = 1 + derive(key, torch.tensor(left), 1) % epochs
        done: list[float] = [int(finished) if id in late else epochs for id, finished in zip(left, drawn, strict=True)]
        return Answers(left, sorted(lost), done)


def draw_share(key: torch.Tensor, ids: list[int], share: float) -> set[int]:
    """Draw a random `share` of the clients, keyed by their ids.

    A fractional count is rounded stochastically, so the expectation is exact.
    """
    if not share or not ids:
        return set()
    count = int(share * len(ids) + float(uniform(key, (1,), torch.float64)))
    rows = derive(key, torch.tensor(ids), 0).argsort(stable=True)[:count]
    return {ids[row] for row in rows.tolist()}


def refuse_pointless(faults: Faults, name: str, epochs: int) -> None:
    """Refuse stragglers that would be like everybody else: with one epoch there is no part to finish."""
    if faults.stragglers and not faults.discard and epochs == 1:
        raise Problem(
            f"stragglers finish a part of the local epochs, but {name} has only 1: set --epochs to 2 or more, "
            "or --straggler-work to discard"
        )


def tally(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Count how often clients failed in a run, from its log of rounds."""
    answered, lost = sum(len(line["cohort"]) for line in lines), sum(len(line["lost"]) for line in lines)
    late, empty = sum(len(line["late"]) for line in lines), sum(line["unchanged"] for line in lines)
    counts = {"asked": answered + lost, "lost": lost, "late": late, "rounds": len(lines), "unchanged": empty}
    return counts | ({"away": sum(line["away"] for line in lines)} if any("away" in line for line in lines) else {})


def in_words(counts: dict[str, int]) -> str:
    """Say for people how often clients failed."""
    text = f"{counts['lost']} of {counts['asked']} answers lost"
    if counts["late"]:
        text += f", {counts['late']} after a part of the epochs"
    if counts.get("away"):
        text += f"; {counts['away'] / counts['rounds']:.1f} clients a round could not be asked"
    if counts["unchanged"]:
        text += f"; {counts['unchanged']} of {counts['rounds']} rounds had no answer and left the server as it was"
    return text
