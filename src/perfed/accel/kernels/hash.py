"""The hash of `core.random` and what is drawn from it, bit for bit, in one launch each."""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.kernels import next_two


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _derived(key, part):
    """Derive a key of a key, by one part, as `random.derive` does."""
    return _mix(key + (part + 1) * -7046029254386353131)


@triton.jit(do_not_specialize=["first", "second"])
def _uniform(key, out, N, first, second, BLOCK: tl.constexpr):
    """Draw numbers in [0, 1) from keys, bit for bit those of `random.uniform(derive(key, first, second))`."""
    c = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = _derived(_derived(_derived(tl.load(key + c), first.to(tl.int64)), second.to(tl.int64)), place)
    u = ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    tl.store(out + c * N + place, u.to(tl.float32), mask=place < N)


def uniform_rows(key: Tensor, first: int, second: int, count: int) -> Tensor:
    """Return `random.uniform` of a derived key for every row: [rows, count]."""
    out = torch.empty(len(key), count, device=key.device)
    _uniform[(triton.cdiv(count, 1024), len(key))](key.contiguous(), out, count, first, second, 1024)
    return out


@triton.jit
def _step_keys(key, counter, out, M, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    step = tl.load(counter)
    purpose = step * 0 + 1  # a number of 64 bits, as all others
    tl.store(out + c, _derived(_derived(tl.load(key + c, mask=c < M, other=0), purpose), step), mask=c < M)


def step_keys(key: Tensor, counter: Tensor) -> Tensor:
    """Return `data.step_key` of every row, for a step whose number, `counter`, only the device knows."""
    out = torch.empty_like(key)
    _step_keys[(1,)](key, counter, out, len(key), next_two(len(key)))
    return out


@triton.jit
def _mixed(z, out, N, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, _mix(tl.load(z + place, mask=place < N, other=0)), mask=place < N)


def mix(z: Tensor) -> Tensor:
    """Hash every number, as `random.mix` does."""
    z = z.contiguous()
    out = torch.empty_like(z)
    if z.numel():
        _mixed[(triton.cdiv(z.numel(), 1024),)](z, out, z.numel(), 1024)
    return out


@triton.jit(do_not_specialize=["M", "begin"])
def _tickets(key, sizes, out, M, N, begin, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)  # there may be many: the other axes end at 65,535
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    epoch = r // M + begin
    seed = _derived(_derived(tl.load(key + r % M), epoch * 0), epoch)
    ticket = tl.where(place < tl.load(sizes + r % M), _derived(seed, place), 0x7FFFFFFFFFFFFFFF)
    tl.store(out + r * N + place, ticket, mask=place < N)


def tickets(key: Tensor, sizes: Tensor, begin: int, end: int, longest: int) -> Tensor:
    """Return `random.tickets(data.order_key(key, epoch))` of these epochs in turn: [epochs * rows, longest]."""
    rows, width = len(key), min(1024, next_two(longest))
    out = torch.empty((end - begin) * rows, longest, dtype=torch.int64, device=key.device)
    _tickets[(len(out), triton.cdiv(longest, width))](key.contiguous(), sizes, out, rows, longest, begin, width)
    return out
