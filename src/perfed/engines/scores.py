"""Scores of an evaluation: model, then split, then metric, one number per client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.tree import tree_map

PERSONAL = "personal"  # the model that a method is judged by


@dataclass(frozen=True)
class ModelScores:
    """Scores of one of the models that a method evaluates for every client."""

    splits: dict[str, dict[str, Tensor]]  # split -> metric -> [m]; NaN where a client has no samples in the split

    def mean(self, split: str, metric: str = "accuracy") -> float | None:
        """Return the unweighted mean over the clients that have samples in the split; None without any."""
        known = self.splits.get(split)
        return None if known is None else plain(known[metric].nanmean().item())


@dataclass(frozen=True)
class Scores:
    """Scores of every model that a method evaluates."""

    models: dict[str, ModelScores]

    @classmethod
    def of(cls, tables: dict[str, dict[str, dict[str, Tensor]]]) -> Scores:
        """Make scores of plain dicts: model -> split -> metric -> [m]."""
        return cls({model: ModelScores(splits) for model, splits in tables.items()})

    @classmethod
    def joined(cls, pieces: Sequence[Scores]) -> Scores:
        """Put the scores of several groups of clients one after another."""
        if len(pieces) == 1:
            return pieces[0]
        return cls.of(tree_map(lambda *parts: torch.cat(parts), *(piece.tables for piece in pieces)))

    @property
    def tables(self) -> dict[str, dict[str, dict[str, Tensor]]]:
        """The scores as plain dicts."""
        return {model: scores.splits for model, scores in self.models.items()}

    def __getitem__(self, model: str) -> dict[str, dict[str, Tensor]]:
        return self.models[model].splits

    def on_host(self) -> Scores:
        """Return the scores in the host's memory."""
        return Scores.of(tree_map(torch.Tensor.cpu, self.tables))

    def means(self, split: str = "test", metric: str = "accuracy") -> dict[str, float | None]:
        """Return each model's unweighted mean over the clients with samples in the split."""
        return {model: scores.mean(split, metric) for model, scores in self.models.items()}

    def by_client(self) -> list[dict[str, Any]]:
        """Return plain numbers, one dict per client: model -> split -> metric; None where there is no score."""
        tables = tree_map(torch.Tensor.tolist, self.tables)  # all at once: there may be very many clients
        count = len(next(iter(next(iter(tables[PERSONAL].values())).values())))
        return [tree_map_lists(lambda numbers, row=row: plain(numbers[row]), tables) for row in range(count)]


def tree_map_lists(fn: Any, tables: dict[str, Any]) -> dict[str, Any]:
    """Apply `fn` to the lists at the ends of nested dicts."""
    return {key: tree_map_lists(fn, value) if isinstance(value, dict) else fn(value) for key, value in tables.items()}


def plain(value: float) -> float | None:
    """Return a number for JSON, which has no NaN: a client without samples has no score."""
    return None if value != value else value
