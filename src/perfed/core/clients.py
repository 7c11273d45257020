"""The data of all clients, held as three long tables: train, validation, test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from perfed.core.task import Classification, Task

SPLITS = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """Hold the samples of all clients one after another: client i owns rows start[i] to start[i] + size[i]."""

    x: Tensor  # [rows, ...], float32, uint8 for images, or int64 for tokens
    y: Tensor  # [rows, ...], as the task has it: see perfed.core.task; classes are int64 [rows]
    size: tuple[int, ...]
    rows: int = 0  # that outputs for the samples of one client have; 0: as many as the largest client has samples
    labelled: bool = True  # False: labels are unknown, or hidden
    first: tuple[int, ...] | None = None  # first row of each client; None: they lie one after another

    @cached_property
    def longest(self) -> int:
        """Return how many rows outputs for one client's samples have, whoever it is."""
        return self.rows or max(self.size, default=0)

    @cached_property
    def start(self) -> tuple[int, ...]:
        """Return the first row of each client."""
        return (0, *accumulate(self.size))[:-1] if self.first is None else self.first

    @property
    def in_order(self) -> Split:
        """Return the samples of all clients one after another."""
        if self.first is None:
            return self
        pairs = zip(self.first, self.size, strict=True)
        rows = torch.cat([torch.arange(first, first + size, device=self.y.device) for first, size in pairs])
        return replace(self, x=self.x[rows], y=self.y[rows], first=None)

    @cached_property
    def sizes(self) -> Tensor:
        """Return the sizes as a tensor, where the samples are."""
        return torch.tensor(self.size, device=self.y.device)

    @cached_property
    def starts(self) -> Tensor:
        """Return the first rows as a tensor, where the samples are."""
        return torch.tensor(self.start, device=self.y.device)


@dataclass(frozen=True, eq=False)
class Clients:
    """Hold every client's samples; clients are numbered from 0, and have names for people.

    Attributes:
        names: one for each client.
        train, val, test: the splits.
        classes: number of classes; 0 where the task is not classification.
        mean, std: of each channel of uint8 images, which become (x / 255 - mean) / std; None: x / 255.
        labels: names of the classes (of labels, targets or tokens in another task), where the data have them.
        columns: names of the columns, in a table.
        partition: how the clients came about and how uneven they are, in plain values.
        notices: sentences that are said before a run begins: what was done to the data, and what looks wrong with them.
        preparation: how rows of a table became these samples, in plain values.
        augment: what happens to the training images of a batch, see `core.augment`; never to those of an exact mean.
        task: what is learned; by default classification of `classes` classes.
        public: samples at the server, or known to everybody, of which no client has one: a single row of `size`.
    """

    names: tuple[str, ...]
    train: Split
    val: Split
    test: Split
    classes: int = 0
    mean: Tensor | None = None
    std: Tensor | None = None
    labels: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    partition: dict[str, Any] | None = None
    notices: tuple[str, ...] = ()
    preparation: dict[str, Any] | None = None
    augment: str = "none"
    public: Split | None = None
    task: Task = None  # pyright: ignore[reportAssignmentType] (`__post_init__` sees to it)

    def __post_init__(self) -> None:
        if self.task is None:
            object.__setattr__(self, "task", Classification(self.classes))

    def __len__(self) -> int:
        return len(self.names)

    def split(self, name: str) -> Split:
        """Return a split by its name: 'train', 'val' or 'test'."""
        return {"train": self.train, "val": self.val, "test": self.test}[name]

    @cached_property
    def public_table(self) -> Clients:
        """Return the public samples as the training samples of a single client."""
        assert self.public is not None
        none = Split(self.public.x[:0], self.public.y[:0], (0,))
        return replace(self, names=("public",), train=self.public, val=none, test=none, public=None, augment="none")

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a single sample."""
        return tuple(self.train.x.shape[1:])

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of x as a network wants them: of its `dtype`, images normalised; tokens stay whole numbers."""
        if x.dtype != torch.uint8:
            return x if x.dtype == torch.int64 else x.to(dtype)
        x = x.to(dtype).div_(255)  # a copy already, so the rest is done in place
        return x if self.mean is None or self.std is None else x.sub_(self.mean.to(dtype)).div_(self.std.to(dtype))

    def to(self, device: torch.device | str) -> Clients:
        """Return these clients with their samples on another device."""
        move = lambda s: replace(s, x=s.x.to(device).contiguous(), y=s.y.to(device).contiguous())
        put = lambda t: None if t is None else t.to(device)
        splits = {name: move(self.split(name)) for name in SPLITS}
        public = None if self.public is None else move(self.public)
        return replace(self, mean=put(self.mean), std=put(self.std), public=public, **splits)
