"""Clients that fail: some never answer in a round, some have finished only a part of their work when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from perfed.core.errors import Problem
from perfed.core.random import DROPOUT, STRAGGLE, derive, uniform

if TYPE_CHECKING:
    from perfed.training.config import RunConfig


class Answers(NamedTuple):
    """What becomes of a round's clients."""

    ids: list[int]  # whose work reaches the server
    lost: list[int]  # whose does not
    done: list[int] | None = None  # epochs that each of `ids` finishes; None: all finish all


@dataclass(frozen=True)
class Faults:
    """How often clients fail, and what becomes of what stragglers have done."""

    dropout: float = 0.0  # share of a round's clients that never answer
    stragglers: float = 0.0  # share of the others that finish 1 to E of their E epochs
    discard: bool = False  # their work is lost, too

    def draw(self, seed: int, round: int, ids: list[int], epochs: int) -> Answers:
        """What happens in a round: a function of seed, round and clients, the same for every method and engine."""
        lost = some(derive(seed, DROPOUT, round), ids, self.dropout)
        left = [id for id in ids if id not in lost]
        key = derive(seed, STRAGGLE, round)
        late = some(key, left, self.stragglers)
        if self.discard:
            return Answers([id for id in left if id not in late], [id for id in ids if id in lost or id in late])
        if not late:
            return Answers(left, sorted(lost))
        drawn = 1 + derive(key, torch.tensor(left), 1) % epochs
        done = [int(e) if id in late else epochs for id, e in zip(left, drawn, strict=True)]
        return Answers(left, sorted(lost), done)


def some(key: torch.Tensor, ids: list[int], share: float) -> set[int]:
    """A share of the clients, drawn by their numbers; a part of a client is rounded at random, right on average."""
    if not share or not ids:
        return set()
    count = int(share * len(ids) + float(uniform(key, (1,), torch.float64)))
    first = derive(key, torch.tensor(ids), 0).argsort(stable=True)[:count]
    return {ids[at] for at in first.tolist()}


def faults_of(run: RunConfig) -> Faults:
    """The faults that a run asks for."""
    return Faults(run.dropout, run.stragglers, run.straggler_work == "discard")


def refuse_pointless(faults: Faults, name: str, epochs: int) -> None:
    """With one epoch a straggler would be like everybody else."""
    if faults.stragglers and not faults.discard and epochs == 1:
        raise Problem(
            f"stragglers finish a part of the local epochs, but {name} has only 1: set --epochs to 2 or more, "
            "or --straggler-work to discard"
        )


def tally(lines: list[dict[str, Any]]) -> dict[str, int]:
    """How often clients failed in a run, from its log of rounds."""
    took, lost = sum(len(line["cohort"]) for line in lines), sum(len(line["lost"]) for line in lines)
    late, empty = sum(len(line["late"]) for line in lines), sum(line["unchanged"] for line in lines)
    return {"asked": took + lost, "lost": lost, "late": late, "rounds": len(lines), "unchanged": empty}


def in_words(found: dict[str, int]) -> str:
    """The same for people."""
    said = f"{found['lost']} of {found['asked']} answers lost"
    if found["late"]:
        said += f", {found['late']} after a part of the epochs"
    if found["unchanged"]:
        said += f"; {found['unchanged']} of {found['rounds']} rounds had no answer and left the server as it was"
    return said
