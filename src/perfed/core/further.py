"""Further networks of a method, such as a generator: models as its own one is, vectors and pure functions of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakSet

from torch import nn

from perfed.core.model import Model

_MADE: WeakSet[cached_property[Any]] = WeakSet()  # an ordinary property each: compilers know no other kind


def further_model(build: Callable[[Any], nn.Module]) -> cached_property[Model]:
    """Make a further network of a method one of its models.

    The function builds the network, anew for every seed; it may read settings and what is known of the samples,
    `self.model.inputs`, `self.model.representation` and `self.model.outputs`. `self.NAME` is then a `Model` as
    `self.model` is, with the same type of numbers, device and kernels; its theta may be in any state or message.

    Args:
        build: a method of the class that takes nothing else.

    Example:
        >>> from dataclasses import dataclass
        >>> from perfed.contract.toy import plain_net
        >>> from perfed.methods.fedavg import FedAvg
        >>> @dataclass(frozen=True)
        ... class Generates(FedAvg):
        ...     @further_model
        ...     def generator(self):
        ...         return nn.Linear(4, self.model.outputs)
        >>> Generates(Model(plain_net).taking((6,))).generator.P  # an engine says what its samples are like
        15
    """

    def make(method: Any) -> Model:
        others = [method.model, *(vars(method)[name] for name in _names(method) if name in vars(method))]
        return method.model.like(lambda: build(method), apart={other.width for other in others})

    made = cached_property(make)
    made.__doc__ = build.__doc__
    _MADE.add(made)
    return made


def models_of(method: Any) -> dict[str, Model]:
    """Return all models of a method by name: `model`, then the further ones."""
    return {name: getattr(method, name) for name in ("model", *_names(method))}


def _names(method: Any) -> list[str]:
    own = [vars(kind).items() for kind in reversed(type(method).__mro__)]
    return [name for items in own for name, value in items if isinstance(value, cached_property) and value in _MADE]
