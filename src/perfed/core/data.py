"""One client's samples as a method sees them, and the only loop over them.

`fold` runs optimiser steps, `mean` an exact average. A method calls them for ONE client; the engine decides whether
that is a plain loop or one batched computation for a block of clients.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perfed.core.context import HIDDEN
from perfed.core.errors import Problem
from perfed.core.random import derive, mix
from perfed.core.tree import leaves, tree_map

CHUNK = 512  # samples per piece of an exact mean
BELOW = 1 - 1e-12  # what a share of steps is multiplied with before it is rounded up


@dataclass(frozen=True)
class Plan:
    """Say how a fold walks through the data: which batches, how many steps."""

    batch_size: int
    epochs: float | None  # a part of one for a client that ends within it
    steps: int | None  # in place of epochs
    draws: int = 1  # batches handed to each step
    stream: int = 0  # equal streams have equal batches

    def batches(self, size: int) -> int:
        """Return the batches of one epoch of `size` samples; a client below one batch still has one."""
        return -(-size // self.batch_size)

    def total(self, size: int) -> int:
        """Return the steps that a client with `size` samples takes."""
        if self.steps is not None:
            return self.steps if size else 0
        return up(self.batches(size) * (self.epochs or 0))

    def shortened(self, done: float, of: int) -> Plan:
        """Return the plan of a client that ends after `done` of `of` epochs; other lengths shrink in proportion.

        After whole epochs, whole epochs stay of every other length, rounded up; where a client ends within an epoch
        (after 1.5 of 5), that share of all steps, rounded up.
        """
        if done == of:
            return self
        if done == int(done):
            cut = lambda whole: None if whole is None else part(whole, int(done), of)
            return replace(self, epochs=cut(self.epochs), steps=cut(self.steps))
        epochs = None if self.epochs is None else self.epochs * done / of
        return replace(self, epochs=epochs, steps=None if self.steps is None else up(self.steps * done / of))

    def samples(self, size: int, total: int) -> int:
        """Return how many samples `total` steps of a client with `size` samples look at."""
        whole, rest = divmod(total, max(self.batches(size), 1))
        return whole * size + min(rest * self.batch_size, size)

    def key(self, key: Tensor, draw: int, mix: Callable[[Tensor], Tensor] = mix) -> Tensor:
        """Derive the key of one draw of this stream."""
        return derive(key, self.stream, draw, mix=mix)


def part(whole: Any, done: Any, of: int) -> Any:
    """Return `done` parts in `of` of a number of epochs or steps, rounded up: whoever begins does something."""
    return -(-whole * done // of)


def up(steps: float) -> int:
    """Round a number of steps up, but for what rounding has put on top of a whole one."""
    return steps if isinstance(steps, int) else math.ceil(steps * BELOW)


def order_key(key: Tensor, epoch: Tensor | int) -> Tensor:
    """Derive the key that an epoch's order is drawn from."""
    return derive(key, 0, epoch)


def step_key(key: Tensor, step: Tensor | int) -> Tensor:
    """Derive the key that a step's dropout is drawn from."""
    return derive(key, 1, step)


@dataclass
class Meter:
    """Count the samples that a client's steps look at: its own, and public ones."""

    samples: Tensor


class Data(ABC):
    """Give a method one client's samples.

    Attributes:
        size: number of training samples, as a tensor: under vmap every client has its own.
        batch_size, epochs: those of the method.
        done: epochs that a client finishes, or parts of one, as a number or a tensor; None: all of them.
        usual: steps of a loop that says neither epochs nor steps; None: those of `epochs` epochs.
        meter: counts the samples that steps look at, where somebody asks.
    """

    size: Tensor
    meter: Meter | None = None

    def __init__(self, batch_size: int, epochs: int, done: Any = None, usual: int | None = None):
        self.batch_size, self.epochs, self.done, self.usual = batch_size, epochs, done, usual

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
        batch_size: int | None = None,
    ) -> Any:
        """Take optimiser steps: `carry = step(carry, batch, given)` for one batch after another.

        Args:
            step: a method of the class and a pure function of its arguments; a functools.partial may fix the first.
            carry: a tree of tensors that goes from step to step and keeps its form.
            given: a tree of tensors that every step reads.
            epochs: passes over the training samples; None: those of the method, or the steps of the round's phase.
            steps: number of steps, in place of epochs.
            draws: batches that each step gets, as a tuple where there are several.
            stream: equal streams have equal batches.
            batch_size: samples of a batch; None: those of the method.

        Returns:
            The last carry; a client without samples takes no step.
        """
        step = without_context(step)
        if not all(isinstance(leaf, Tensor) for leaf in leaves((carry, given))):
            raise TypeError("carry and given hold tensors only; constants are fields of the method")
        plan = self._plan(epochs, steps, draws, stream, batch_size)
        if self.meter is not None:
            self.meter.samples = self.meter.samples + draws * self._samples(plan)
        return self._fold(step, carry, given, plan)

    def mean(self, fn: Callable[..., Any], given: Any = (), split: str = "train", *, chunk: int | None = None) -> Any:
        """Return an exact mean over all samples of a split.

        Args:
            fn: a method of the class; `fn(batch, given)` returns a tree of means over its batch.
            given: a tree of tensors that `fn` reads.
            split: 'train', 'val' or 'test'.
            chunk: most samples of a client in one batch, where `fn` takes much memory for each; None: some hundred.

        Returns:
            A tree as `fn` returns; NaN where the split is empty.
        """
        refuse_chunk(chunk)
        return self._mean(without_context(fn), given, split, chunk)

    def map(self, fn: Callable[..., Any], given: Any = (), split: str = "train", *, chunk: int | None = None) -> Any:
        """Return what `fn` gives for each sample, in the order of the samples: outputs, features, losses.

        Args:
            fn: a method of the class; `fn(batch, given)` returns a tree of tensors with a row for each sample.
            given: a tree of tensors that `fn` reads.
            split: 'train', 'val' or 'test'.
            chunk: as in `mean`.

        Returns:
            A tree as `fn` returns. Every client's tensors have as many rows as the largest client has samples; those
            behind its own samples are 0, and `mask` tells them apart.
        """
        refuse_chunk(chunk)
        return self._map(without_context(fn), given, split, chunk)

    def mask(self, split: str = "train") -> Tensor:
        """Return for each row of a `map` over this `split` whether it is a sample."""
        return torch.arange(self._longest(split), device=self.size.device) < self.count(split)

    @property
    def public(self) -> Data:
        """The public samples, as this client sees them: with batches of its own, drawn by its own keys."""
        raise Problem(
            "a method whose clients read data.public says so, because sending these samples is traffic: "
            "`sends_public: ClassVar[bool] = True`, beside `public`"
        )

    def steps(self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None) -> Tensor:
        """Return how many steps a fold of so many `epochs` or `steps`, and this `batch_size`, takes, as a tensor."""
        return self._total(self._plan(epochs, steps, 1, 0, batch_size))

    def _total(self, plan: Plan) -> Tensor:
        """Return the steps that this client takes of a plan, as `Plan.shortened` and `Plan.total` say it."""
        length, each = plan.epochs or 0, -(-self.size // plan.batch_size)
        if plan.steps is not None:
            length, each = plan.steps, torch.where(self.size > 0, 1, 0)
        if self.done is None:
            return each * length
        done = torch.as_tensor(self.done, dtype=torch.float64) if isinstance(self.done, float) else self.done
        if not isinstance(done, Tensor) or not done.is_floating_point():
            return each * part(length, done, self.epochs)
        whole = each * part(length, done.long(), self.epochs)
        share = (each * (length * done / self.epochs) * BELOW).ceil().long()
        return torch.where((done == done.floor()).to(share.device), whole, share)

    def _samples(self, plan: Plan) -> Tensor:
        """Return how many samples the steps of a plan look at, as `Plan.samples` says it."""
        total, each = self._total(plan), (-(-self.size // plan.batch_size)).clamp_min(1)
        return total // each * self.size + torch.minimum(total % each * plan.batch_size, self.size)

    def _plan(self, epochs: int | None, steps: int | None, draws: int, stream: int, batch_size: int | None) -> Plan:
        if epochs is None and steps is None:
            steps = self.usual
        epochs, batch_size = (self.epochs if epochs is None else epochs), batch_size or self.batch_size
        return Plan(batch_size, epochs, steps, draws, stream)

    @abstractmethod
    def count(self, split: str) -> Tensor:
        """Return the number of samples in a split, as a tensor."""

    @abstractmethod
    def _fold(self, step: Callable[..., Any], carry: Any, given: Any, plan: Plan) -> Any: ...

    @abstractmethod
    def _mean(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any: ...

    @abstractmethod
    def _map(self, fn: Callable[..., Any], given: Any, split: str, chunk: int | None) -> Any: ...

    @abstractmethod
    def _longest(self, split: str) -> int:
        """Return how many samples the largest of all clients has."""


def check_step(step: Callable[..., Any]) -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """Take a step apart, and refuse one that could carry a tensor in from outside.

    In a batched engine a tensor from a closure would silently be another client's: it does not pass through the
    engine, which sorts clients and drops those that have finished.
    Returns (function, the method that it belongs to, fixed arguments).
    """
    fixed: tuple[Any, ...] = ()
    if isinstance(step, functools.partial):
        if step.keywords:
            raise TypeError("a step's fixed arguments are given by place, not by name")
        fixed, step = step.args, step.func
    owner, function = getattr(step, "__self__", None), getattr(step, "__func__", None)
    if owner is None or function is None:
        raise TypeError(f"a step must be a method of the class, not {step!r}: what it needs goes through `given`")
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    if any(isinstance(leaf, Tensor) for leaf in leaves([fixed, enclosed])):
        raise TypeError(f"step '{function.__name__}' holds a tensor from outside: hand it over through `given`")
    return function, owner, fixed


def without_context(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose method does not know where in the run it is: a record of it is the same in every round."""
    function, owner, fixed = check_step(step)
    owner = copy.copy(owner)
    object.__setattr__(owner, "context", HIDDEN)  # a method is frozen for everybody else
    return functools.partial(types.MethodType(function, owner), *fixed)


def refuse_chunk(chunk: int | None) -> None:
    """Refuse a number of samples that cannot be looked at together."""
    if chunk is not None and chunk < 1:
        raise Problem(f"chunk is the number of samples that are looked at together, at least 1, not {chunk}")


def refuse_other_rows(value: Any, rows: int) -> None:
    """Raise an error if a function of `map` has not returned a row for each of its samples."""
    for leaf in leaves(value):
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != rows:
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"a function of `map` returns a row for each of its {rows} samples, not {shape}")


def form(tree: Any) -> Any:
    """Return the structure, shapes and kinds of numbers of a tree."""
    return tree_map(lambda t: (tuple(t.shape), t.dtype), tree)


def refuse_other_form(before: Any, after: Any) -> None:
    """Raise an error if a step has changed the form of its carry, which a batched engine would have to convert."""
    if before != after:
        raise TypeError(f"step returned a carry of another form than it was given: {after}, not {before}")
