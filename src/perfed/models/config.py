"""The settings of the section `model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfed.core.fields import checked, hyper


@dataclass(frozen=True)
class ModelConfig:
    """Say which network every client trains."""

    name: str = hyper("", "network: see `perfed list models`, or path.py:factory (default: what suits the data)")
    head: str = hyper("", "module that is the head (default: the last one with parameters)")
    hidden: int = hyper(64, "width of the hidden layer of 'mlp'", at_least=1, at_most=100_000)
    norm: Literal["batch", "group"] = hyper("group", "normalisation of 'resnet'")

    def __post_init__(self) -> None:
        checked(self, "model")
