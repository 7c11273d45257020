"""What a method sees of one client's samples, and the only loop over them.

`fold` runs optimiser steps, `mean` an exact average. A method calls them for ONE client; the engine decides whether
that is a plain loop (`ClientData`, the reference) or one batched computation for a block of clients.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perfed.core.random import derive
from perfed.core.tree import leaves, tree_map

CHUNK = 512  # samples per piece of an exact mean


@dataclass(frozen=True)
class Plan:
    """How a fold walks through the data: which batches, how many steps."""

    batch_size: int
    epochs: int | None
    steps: int | None
    draws: int = 1  # batches handed to each step
    stream: int = 0  # same stream, same batches

    def batches(self, size: int) -> int:
        """Batches of one epoch; the last, partial one is kept, so a client below one batch still trains."""
        return -(-size // self.batch_size)

    def total(self, size: int) -> int:
        """Steps that a client with `size` samples takes."""
        return self.batches(size) * (self.epochs or 0) if self.steps is None else self.steps if size else 0

    def shortened(self, done: int, of: int) -> Plan:
        """The plan of who ends after `done` of `of` epochs; what has another length is shortened in proportion."""
        some = lambda whole: None if whole is None else part(whole, done, of)
        return self if done == of else replace(self, epochs=some(self.epochs), steps=some(self.steps))

    def samples(self, size: int, total: int) -> int:
        """Samples that so many steps look at."""
        whole, rest = divmod(total, max(self.batches(size), 1))
        return whole * size + min(rest * self.batch_size, size)

    def key(self, key: Tensor, draw: int) -> Tensor:
        """The key of one draw of this stream."""
        return derive(key, self.stream, draw)


def part(whole: Any, done: Any, of: int) -> Any:
    """`done` parts in `of` of a number of epochs or steps, rounded up: whoever begins does something."""
    return -(-whole * done // of)


def order_key(key: Tensor, epoch: Tensor | int) -> Tensor:
    """What an epoch's order is drawn from."""
    return derive(key, 0, epoch)


def step_key(key: Tensor, step: Tensor | int) -> Tensor:
    """What a step's dropout is drawn from."""
    return derive(key, 1, step)


class Data(ABC):
    """One client's samples."""

    size: Tensor  # number of training samples, as a tensor: under vmap every client has its own

    def __init__(self, batch_size: int, epochs: int, done: Any = None):
        self.batch_size, self.epochs = batch_size, epochs
        self.done = done  # epochs that a straggler finishes, a number or a tensor; None: all of them

    def fold(
        self,
        step: Callable[..., Any],
        carry: Any,
        given: Any = (),
        *,
        epochs: int | None = None,
        steps: int | None = None,
        draws: int = 1,
        stream: int = 0,
    ) -> Any:
        """`carry = step(carry, batch, given)` for every batch of `epochs` epochs (or for `steps` batches).

        `step` is a method of the class and a pure function of its arguments; what else it needs goes through `given`.
        """
        check_step(step)
        if not all(isinstance(leaf, Tensor) for leaf in leaves((carry, given))):
            raise TypeError("carry and given hold tensors only; constants are fields of the method")
        return self._fold(step, carry, given, self._plan(epochs, steps, draws, stream))

    def mean(self, fn: Callable[..., Any], given: Any = (), split: str = "train") -> Any:
        """The exact mean over a split of `fn(batch, given)`, which returns means over its batch; NaN for no samples."""
        check_step(fn)
        return self._mean(fn, given, split)

    def steps(self, *, epochs: int | None = None, steps: int | None = None) -> Tensor:
        """How many steps such a fold takes for this client, as a tensor."""
        plan = self._plan(epochs, steps, 1, 0)
        some = lambda whole: whole if self.done is None else part(whole, self.done, self.epochs)
        if plan.steps is not None:
            return torch.where(self.size > 0, some(plan.steps), 0)
        return -(-self.size // self.batch_size) * some(plan.epochs or 0)

    def _plan(self, epochs: int | None, steps: int | None, draws: int, stream: int) -> Plan:
        return Plan(self.batch_size, self.epochs if epochs is None else epochs, steps, draws, stream)

    @abstractmethod
    def count(self, split: str) -> Tensor:
        """Number of samples in a split, as a tensor."""

    @abstractmethod
    def _fold(self, step: Callable[..., Any], carry: Any, given: Any, plan: Plan) -> Any: ...

    @abstractmethod
    def _mean(self, fn: Callable[..., Any], given: Any, split: str) -> Any: ...


def check_step(step: Callable[..., Any]) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """(function, object, fixed arguments) of a step; refuses what could carry a tensor in from outside.

    In a batched engine a tensor from a closure would silently be another client's: it does not pass through the
    engine, which sorts clients and drops those that have finished.
    """
    fixed: tuple[Any, ...] = ()
    if isinstance(step, functools.partial):
        if step.keywords:
            raise TypeError("a step's fixed arguments are given by place, not by name")
        fixed, step = step.args, step.func
    owner, function = getattr(step, "__self__", None), getattr(step, "__func__", None)
    if owner is None or function is None:
        raise TypeError(f"a step must be a method of the class, not {step!r}: what it needs goes through `given`")
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    if any(isinstance(leaf, Tensor) for leaf in leaves([fixed, held])):
        raise TypeError(f"step '{function.__name__}' holds a tensor from outside: hand it over through `given`")
    return function, owner, fixed


def form(tree: Any) -> Any:
    """The structure, shapes and kinds of numbers of a tree."""
    return tree_map(lambda t: (tuple(t.shape), t.dtype), tree)


def refuse_other_form(before: Any, after: Any) -> None:
    """A carry keeps its form, or a batched engine would have to convert it."""
    if before != after:
        raise TypeError(f"step returned a carry of another form than it was given: {after}, not {before}")
