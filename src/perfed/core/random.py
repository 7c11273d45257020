"""Random streams without state: every draw is a hash of (seed, round, client, purpose, step).

Nothing is stored and nothing depends on the order in which clients run, so a resumed run, another number of workers
and another engine draw the same numbers. The hash is splitmix64 in wrapping int64 arithmetic, which runs under vmap
and on any device.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from perfed.accel.fast import kernels_run

GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer

# Purposes: the first part of a key, so that two uses never share a stream.
COHORT, TRAIN, PERSONALISE, WIRE, SELECT, DROPOUT, STRAGGLE = 1, 2, 3, 4, 5, 6, 7


def _mix(z: Tensor) -> Tensor:
    if z.is_cuda and z.numel() and kernels_run(z):
        from perfed.accel import kernels

        return kernels.mix(z)  # nine small kernels otherwise
    # Python's >> on int64 keeps the sign; the masks make it the unsigned shift of splitmix64.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _mix_number(z: int) -> int:
    """The same for a plain number, below 2^64: no tensor is made of what the host knows."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def derive(key: Tensor | int, *parts: Tensor | int) -> Tensor:
    """A new key (or keys) for `parts` of `key`; tensors broadcast."""
    for part in parts:
        if isinstance(key, int) and isinstance(part, int):
            key = _mix_number((key + GOLDEN * (part + 1)) % 2**64)
            continue
        key = torch.tensor(_wrap(key)) if isinstance(key, int) else key
        step = _wrap(GOLDEN * (part + 1)) if isinstance(part, int) else GOLDEN * (part + 1)
        key = _mix(key + step)
    return torch.tensor(_wrap(key)) if isinstance(key, int) else key


@functools.lru_cache(maxsize=64)
def _table(n: int, device: torch.device) -> Tensor:
    # It outlives whoever asks first: made inside a trace or a transformation, it would be a wrapper of theirs.
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        return GOLDEN * (torch.arange(n, device=device) + 1)


def _counters(n: int, device: torch.device) -> Tensor:
    # A table, not an arange inside the step: inductor (torch 2.13, CPU) miscompiles hashed aranges under vmap.
    return _table(n, device)


# What torch.compiler.assume_constant_result does; that one imports the whole compiler, which takes a second.
_counters._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1), a function of `key` and position only."""
    z = _mix(key + _counters(math.prod(shape), key.device))
    return (((z >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53).to(dtype).reshape(shape)


def choose(key: Tensor, count: int, among: int) -> list[int]:
    """`count` different numbers below `among`, ascending: the first ones of `shuffle`, without sorting the rest."""
    ticket = _mix(key + GOLDEN * (torch.arange(among, device=key.device) + 1))  # all different
    return sorted(ticket.topk(count, largest=False).indices.tolist())


def tickets(key: Tensor, size: Tensor, longest: int) -> Tensor:
    """Numbers to sort range(size) by, one row per key, all different; what is beyond a row's size comes last."""
    place = torch.arange(longest, device=key.device)
    return _mix(key[:, None] + GOLDEN * (place + 1)).where(place < size[:, None], torch.iinfo(torch.int64).max)


def smallest(ticket: Tensor, first: int) -> Tensor:
    """Where the first so many numbers of each row are, in ascending order; a few need no sorting of the rest."""
    if 2 * first < ticket.shape[1]:
        return ticket.topk(first, dim=1, largest=False).indices
    return ticket.argsort(dim=1, stable=True)[:, :first]


def shuffle(key: Tensor, size: Tensor, longest: int, first: int | None = None) -> Tensor:
    """Permutations of range(size), one row per key; -1 beyond a row's size. [rows, longest], or the first so many."""
    first = longest if first is None else min(first, longest)
    place = torch.arange(first, device=key.device)
    return smallest(tickets(key, size, longest), first).where(place < size[:, None], -1)
