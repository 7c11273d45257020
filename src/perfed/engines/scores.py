"""Scores of an evaluation: model, then split, then metric, one number per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.core.tree import tree_map

PERSONAL = "personal"  # the model that a method is judged by

Table = dict[str, dict[str, dict[str, Tensor]]]  # model -> split -> metric -> [clients]


@dataclass(frozen=True)
class ModelScores:
    """Scores of one of the models that a method evaluates for every client."""

    splits: dict[str, dict[str, Tensor]]  # split -> metric -> [m]; NaN where a client has no samples in the split

    def mean(self, split: str, metric: str = "") -> float | None:
        """Return the unweighted mean over the clients that have samples in a split.

        Args:
            split: train, val or test.
            metric: loss, or a score of the task; by default the first one. Those that need all outputs of a client are
                there where they were asked for, such as balanced_accuracy.

        Returns:
            The mean; None if the split was not evaluated or no client has samples in it.
        """
        metrics = self.splits.get(split)
        if metrics is None:
            return None
        scores = metrics[metric or next(name for name in metrics if name != "loss")]
        return plain(scores.nanmean().item())


@dataclass(frozen=True)
class Scores:
    """Scores of every model that a method evaluates.

    Example:
        >>> accuracy = torch.tensor([1.0, 0.5, torch.nan])  # the last client has no test samples
        >>> scores = Scores.of({"personal": {"test": {"accuracy": accuracy}}})
        >>> scores.means("test")
        {'personal': 0.75}
        >>> scores.by_client()[2]
        {'personal': {'test': {'accuracy': None}}}
    """

    models: dict[str, ModelScores]

    @classmethod
    def of(cls, table: Table) -> Scores:
        """Return scores from plain dicts: model -> split -> metric -> [m]."""
        return cls({model: ModelScores(splits) for model, splits in table.items()})

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Return the scores of several groups of clients, one group after another."""
        return parts[0] if len(parts) == 1 else cls.of(concatenate([part.tables for part in parts]))

    @property
    def tables(self) -> Table:
        """The scores as plain dicts."""
        return {model: scores.splits for model, scores in self.models.items()}

    def __getitem__(self, model: str) -> dict[str, dict[str, Tensor]]:
        return self.models[model].splits

    def on_host(self) -> Scores:
        """Return the scores in the host's memory."""
        return Scores.of(tree_map(torch.Tensor.cpu, self.tables))

    def means(self, split: str = "test", metric: str = "") -> dict[str, float | None]:
        """Return each model's unweighted mean over the clients that have samples in a split.

        Args:
            split: train, val or test.
            metric: loss, or a score of the task; by default the first one.

        Returns:
            A mean for each model; None where there is none.
        """
        return {model: scores.mean(split, metric) for model, scores in self.models.items()}

    def by_client(self) -> list[dict[str, Any]]:
        """Return plain numbers, one dict per client: model -> split -> metric; None where there is no score."""
        table = tree_map(torch.Tensor.tolist, self.tables)  # all at once: there may be very many clients
        count = len(next(iter(next(iter(table[PERSONAL].values())).values())))
        return [map_lists(lambda numbers, row=row: plain(numbers[row]), table) for row in range(count)]


def concatenate(trees: Sequence[Any]) -> Any:
    """Return one tree of tensors from several, their rows one after another."""
    return tree_map(lambda *tensors: torch.cat(tensors), *trees)


def map_lists(fn: Callable[[list[float]], Any], table: dict[str, Any]) -> dict[str, Any]:
    """Apply `fn` to the lists at the ends of nested dicts."""
    return {key: map_lists(fn, value) if isinstance(value, dict) else fn(value) for key, value in table.items()}


def plain(value: float) -> float | None:
    """Return a number for JSON, which has no NaN: a client without samples has no score."""
    return None if value != value else value
