"""Random streams without state: every draw is a hash of (seed, round, client, purpose, step).

Nothing is stored and nothing depends on the order in which clients run, so a resumed run, another number of workers
and another engine draw the same numbers. The hash is splitmix64 in wrapping int64 arithmetic, which runs under vmap
and on any device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from perfed.core.tree import outside_transformations

GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
TABLE = 1 << 16  # counters that are made once

# Purposes: the first part of a key, so that two uses never share a stream.
COHORT, TRAIN, PERSONALISE, WIRE, SELECT, DROPOUT, STRAGGLE, PUBLIC, REFINE, EXTEND, SYSTEM = range(1, 12)


def mix(z: Tensor) -> Tensor:
    """Hash every number of a tensor."""
    # Python's >> on int64 keeps the sign; the masks make it the unsigned shift of splitmix64.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _mix_number(z: int) -> int:
    """Hash a plain number below 2^64 as `mix` does: what the host knows needs no tensor."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def derive(key: Tensor | int, *parts: Tensor | int, mix: Callable[[Tensor], Tensor] = mix) -> Tensor:
    """Make a new key of a key.

    Args:
        key: a seed or a key; a tensor gives a key for each of its numbers.
        parts: what tells the new key from others; tensors are broadcast against the key.
        mix: computes the hash of this module.

    Returns:
        The key, an int64 tensor.
    """
    for part in parts:
        if isinstance(key, int) and isinstance(part, int):
            key = _mix_number((key + GOLDEN * (part + 1)) % 2**64)
            continue
        key = torch.tensor(_wrap(key)) if isinstance(key, int) else key
        step = _wrap(GOLDEN * (part + 1)) if isinstance(part, int) else GOLDEN * (part + 1)
        key = mix(key + step)
    return torch.tensor(_wrap(key)) if isinstance(key, int) else key


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    with outside_transformations():
        return GOLDEN * (torch.arange(TABLE, device=device) + 1)


def _constant(device: torch.device) -> Tensor:
    # A table, not an arange inside the step: inductor (torch 2.13, CPU) miscompiles hashed aranges under vmap. And one
    # table for all lengths: dynamo refuses a step in which a constant function has returned two tensors.
    return _table(device)


# What torch.compiler.assume_constant_result does; that one imports the whole compiler, which takes a second.
_constant._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _counters(n: int, device: torch.device) -> Tensor:
    """Return GOLDEN times 1 to n."""
    table = _constant(device)
    if n > TABLE:
        begins = (torch.narrow_copy(table, 0, 0, -(-n // TABLE)) - GOLDEN) * TABLE
        table = (begins[:, None] + table).flatten()
    return torch.narrow_copy(table, 0, 0, n)  # dynamo refuses a view of a constant


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers in [0, 1).

    Args:
        key: one key; equal keys draw equal numbers. Several, such as `derive(batch.key, batch.index)`, a key for each
            sample, draw so much each.
        shape: the result's shape; for several keys behind theirs.
        dtype: the result's type.

    Returns:
        Numbers that depend on the key and their position only.
    """
    if key.dim():
        key, shape = key[..., None], (*key.shape, *shape)
        z = mix(key + _counters(math.prod(shape[key.dim() - 1 :]), key.device))
    else:
        z = mix(key + _counters(math.prod(shape), key.device))
    return (((z >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53).to(dtype).reshape(shape)


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers from the standard normal distribution.

    Two and two are made of `uniform` numbers by the rule of Box and Muller, in float64 whatever the result's type is:
    a processor and a GPU differ in the last digits of a float64 at most.

    Args:
        key: one key; equal keys draw equal numbers. In a step take `derive(batch.key, n)`, another n for each use.
            Several draw so much each, as in `uniform`.
        shape: the result's shape; for several keys behind theirs.
        dtype: the result's type.

    Returns:
        Numbers that depend on the key and their position only.

    Example:
        >>> normal(derive(1, 2), (3,))
        tensor([-1.3019,  0.6428,  1.3831])
    """
    count = math.prod(shape)
    radius, angle = uniform(key, (-(-count // 2), 2), torch.float64).unbind(-1)
    radius, angle = (-2 * (1 - radius).log()).sqrt(), 2 * math.pi * angle  # 1 - radius is never 0
    pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    return pairs.flatten(-2)[..., :count].to(dtype).reshape((*key.shape, *shape))


def pick(key: Tensor, count: int, weight: Tensor) -> Tensor:
    """Draw places, each with a chance in proportion to its weight; the same one may come several times.

    Args:
        key: one key, as in `uniform`.
        count: how many are drawn.
        weight: [places], at least 0; True and False draw among those that are True. Where all are 0, it is place 0.

    Returns:
        [count], the places.

    Example:
        >>> pick(derive(1, 2), 6, torch.tensor([0.0, 1.0, 0.0, 3.0])).tolist()
        [3, 3, 3, 1, 3, 1]
    """
    below = weight.double().cumsum(0)
    draw = uniform(key, (count, 1), torch.float64) * below[-1]
    return ((below <= draw) & (below < below[-1])).sum(1)  # rounding may take a draw to the sum itself


def choose(key: Tensor, count: int, among: int) -> list[int]:
    """Return `count` different numbers below `among`, ascending."""
    ticket = mix(key + GOLDEN * (torch.arange(among, device=key.device) + 1))  # all different
    return sorted(ticket.topk(count, largest=False).indices.tolist())


def choose_by(key: Tensor, count: int, odds: Tensor) -> list[int]:
    """Return `count` different numbers, ascending, drawn one after another in proportion to the odds of those left.

    Args:
        key: one key.
        count: how many; if fewer have odds, these.
        odds: [numbers], 0 or more; what has 0 is never drawn.

    Example:
        >>> choose_by(torch.tensor(1), 2, torch.tensor([0.1, 0.0, 5.0, 0.2]))
        [2, 3]
    """
    odds = odds.to(key.device, torch.float64)
    wait = -(1 - uniform(key, odds.shape, torch.float64)).log() / odds  # whoever has waited the shortest is drawn first
    count = min(count, int((odds > 0).sum()))
    return sorted(wait.where(odds > 0, torch.inf).topk(count, largest=False).indices.tolist())


def tickets(key: Tensor, size: Tensor, longest: int) -> Tensor:
    """Return numbers to sort range(size) by, one row per key, all different; what is beyond a row's size comes last."""
    place = torch.arange(longest, device=key.device)
    return mix(key[:, None] + GOLDEN * (place + 1)).where(place < size[:, None], torch.iinfo(torch.int64).max)


def smallest(ticket: Tensor, first: int) -> Tensor:
    """Return the places of the `first` smallest numbers of each row, in ascending order of the numbers."""
    if 2 * first < ticket.shape[1]:  # a few need no sorting of the rest
        return ticket.topk(first, dim=1, largest=False).indices
    return ticket.argsort(dim=1, stable=True)[:, :first]


def shuffle(key: Tensor, size: Tensor, longest: int, first: int | None = None) -> Tensor:
    """Draw a permutation of range(size) for each key: [rows, longest], or the first so many; -1 beyond a row's size."""
    first = longest if first is None else min(first, longest)
    place = torch.arange(first, device=key.device)
    return smallest(tickets(key, size, longest), first).where(place < size[:, None], -1)
