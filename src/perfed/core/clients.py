"""The data of all clients, held as three long tables: train, validation, test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """Rows of all clients one after another: client i owns rows start[i] to start[i] + size[i]."""

    x: Tensor  # [rows, ...], float32, or uint8 for images
    y: Tensor  # [rows], int64
    size: tuple[int, ...]

    @cached_property
    def start(self) -> tuple[int, ...]:
        return (0, *accumulate(self.size))[:-1]

    @cached_property
    def sizes(self) -> Tensor:
        """The sizes where the samples are."""
        return torch.tensor(self.size, device=self.y.device)

    @cached_property
    def starts(self) -> Tensor:
        """First rows, likewise."""
        return torch.tensor(self.start, device=self.y.device)


@dataclass(frozen=True)
class Clients:
    """Every client's samples, with names for people and indices for the machine."""

    names: tuple[str, ...]
    train: Split
    val: Split
    test: Split
    classes: int
    mean: Tensor | None = None  # for uint8 images: x / 255, minus mean, over std, per channel
    std: Tensor | None = None
    labels: tuple[str, ...] | None = None  # what the classes are called, where the data said so
    columns: tuple[str, ...] | None = None  # what the features are called, in a table
    partition: dict[str, Any] | None = None  # how the clients came about and how uneven they are, in plain values

    def __len__(self) -> int:
        return len(self.names)

    def split(self, name: str) -> Split:
        return {"train": self.train, "val": self.val, "test": self.test}[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train.x.shape[1:])

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of x as the network wants them."""
        if x.dtype != torch.uint8:
            return x.to(dtype)
        x = x.to(dtype).div_(255)  # a copy already, so the rest is done in place
        return x if self.mean is None or self.std is None else x.sub_(self.mean.to(dtype)).div_(self.std.to(dtype))

    def to(self, device: torch.device | str) -> Clients:
        """The same data on another device."""
        move = lambda s: replace(s, x=s.x.to(device).contiguous(), y=s.y.to(device).contiguous())
        put = lambda t: None if t is None else t.to(device)
        splits = {name: move(self.split(name)) for name in SPLITS}
        return replace(self, mean=put(self.mean), std=put(self.std), **splits)
