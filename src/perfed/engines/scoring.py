"""Scores that an engine computes itself, with the samples of many clients at once.

A method scores models of a client's own client by client (`Method.score`). One model that all clients share is scored
here in large pieces, and so are scores such as macro-F1 and AUC, which need all predictions for a client at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfed.core.clients import Clients
from perfed.core.data import CHUNK
from perfed.core.method import Method
from perfed.core.model import Batch
from perfed.core.tree import integers, rows, tree_map
from perfed.engines.scores import Table, concatenate

ON_GPU = 1 << 14  # samples that a model is given at once

Rate = Callable[[Method, Batch, dict[str, Tensor]], Any]


class Piece(NamedTuple):
    """Clients next to each other, whose samples of a split lie side by side."""

    split: str
    first: int  # client
    last: int  # the client behind the last one


@dataclass(frozen=True)
class Scorer:
    """Models of one run's method on the samples of its clients."""

    method: Method
    clients: Clients
    splits: tuple[str, ...]
    rate: Rate  # how the engine calls `method.rate`
    key: Tensor  # of the batches
    own: Callable[[int], Method]  # the method with a client's own network

    @cached_property
    def samples_at_once(self) -> int:
        """Samples that a model is given at once."""
        return ON_GPU if self.clients.train.y.is_cuda else CHUNK

    def pieces(self) -> list[Piece]:
        """Cut every split into pieces of neighbours who together have enough samples to keep the device busy."""
        enough, pieces = ON_GPU if self.clients.train.y.is_cuda else 8 * CHUNK, []
        for split in self.splits:
            first, samples = 0, 0
            for id, size in enumerate(self.clients.split(split).size):
                samples += size
                if samples >= enough:
                    pieces.append(Piece(split, first, id + 1))
                    first, samples = id + 1, 0
            if samples:
                pieces.append(Piece(split, first, len(self.clients)))
            elif first < len(self.clients):  # the last clients have no samples: they go with those before them
                pieces[-1] = pieces[-1]._replace(last=len(self.clients))
        return pieces

    def piece(self, models: dict[str, Any], full: bool, piece: Piece) -> dict[str, dict[str, Tensor]]:
        """Score models that all clients share on one piece.

        Args:
            models: the models by name.
            full: also macro-F1 and AUC.
            piece: which clients, and which of their samples.

        Returns:
            model -> metric -> one number for each client of the piece.
        """
        source = self.clients.split(piece.split)
        begin, sizes = source.start[piece.first], source.size[piece.first : piece.last]
        end, counts = begin + sum(sizes), integers(sizes, source.y.device)
        rates = []
        for start in range(begin, end, self.samples_at_once):
            part = slice(start, min(start + self.samples_at_once, end))
            batch = Batch(self.clients.ready(source.x[part], self.method.model.dtype), source.y[part], None, self.key)
            rates.append(self.rate(self.method, batch, models))

        def mean(*parts: Tensor) -> Tensor:
            total = torch.segment_reduce(torch.cat(parts).double(), "sum", lengths=counts, unsafe=True)
            return (total / counts).to(parts[0].dtype)  # NaN for a client without samples

        task, means = self.method.model.task, tree_map(mean, *rates)
        scores = {name: task.finish(each) for name, each in means.items()}
        if full:
            for name, model in models.items():
                outputs = torch.cat(self._outputs(model, piece.split, begin, end))
                scores[name] = scores[name] | task.full(outputs, source.y[begin:end], sizes)
        return scores

    def joined(
        self, names: Iterable[str], pieces: Sequence[Piece], scores: Sequence[dict[str, dict[str, Tensor]]]
    ) -> Table:
        """Return one table of all clients.

        Args:
            names: the models.
            pieces: all pieces.
            scores: what `piece` returned for each of them.
        """
        table: Table = {name: {} for name in names}
        for name, splits in table.items():
            for split in self.splits:
                parts = [each[name] for piece, each in zip(pieces, scores, strict=True) if piece.split == split]
                splits[split] = concatenate(parts)
        return table

    def full_scores(self, ids: Sequence[int], models: dict[str, Any]) -> Table:
        """Return scores such as macro-F1 and AUC of clients' own models.

        Args:
            ids: the clients.
            models: the models by name, each a tree with a row for each client.
        """
        table: Table = {name: {} for name in models}
        for split in self.splits:
            source = self.clients.split(split)
            spans = [(source.start[id], source.start[id] + source.size[id]) for id in ids]
            y = torch.cat([source.y[first:last] for first, last in spans])
            for name, stacked in models.items():
                outputs = []
                for row, (id, (first, last)) in enumerate(zip(ids, spans, strict=True)):
                    outputs += self._outputs(rows(stacked, row), split, first, last, self.own(id))
                nobody = torch.zeros(0, 1, dtype=self.method.model.dtype, device=y.device)  # nobody here has samples
                whole, sizes = torch.cat(outputs or [nobody]), [last - first for first, last in spans]
                table[name][split] = self.method.model.task.full(whole, y, sizes)
        return table

    def _outputs(self, model: Any, split: str, first: int, last: int, method: Method | None = None) -> list[Tensor]:
        """Return a model's outputs for the samples from `first` to before `last`, in pieces."""
        x, method = self.clients.split(split).x, method or self.method
        outputs, dtype = [], method.model.dtype
        for begin in range(first, last, self.samples_at_once):
            samples = x[begin : min(begin + self.samples_at_once, last)]
            outputs.append(method.predict(model, self.clients.ready(samples, dtype)))
        return outputs
