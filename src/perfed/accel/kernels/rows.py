"""Sums, products and copies of all clients' rows, and the samples of their batches."""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.kernels import next_two, precision
from perfed.core.augment import BORDER
from perfed.core.clients import Split


@triton.jit
def _weighted(x, share, out, M, N, G, BLOCK: tl.constexpr):
    """Add rows in order, with weights, in double precision."""
    g = tl.program_id(1)
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    place = x + column
    for m in range(M):
        weight = tl.load(share + m * G + g)
        end = tl.where(weight != 0, N, 0)  # a row of weight 0 may hold NaN
        total += weight * tl.load(place, mask=column < end, other=0.0).to(tl.float64)
        place += N
    tl.store(out + g.to(tl.int64) * N + column, total, mask=column < N)


def weighted_sum(share: Tensor, rows: Tensor) -> Tensor:
    """Sum rows [m, ...] with weights [m, groups] in float64, reading each number once: [groups, ...].

    A row of weight 0 counts as one of zeros.
    """
    flat, weights = rows.reshape(len(rows), -1).contiguous(), share.double().contiguous()
    (m, n), groups = flat.shape, weights.shape[1]
    out = torch.empty(groups, n, dtype=torch.float64, device=rows.device)
    if n:
        _weighted[(triton.cdiv(n, 1024), groups)](flat, weights, out, m, n, groups, 1024)
    return out.view(groups, *rows.shape[1:])


@triton.jit(do_not_specialize=["B"])
def _columns(x, out, B, O, BB: tl.constexpr, BN: tl.constexpr):
    c = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), out.dtype.element_ty)
    for first in range(0, B, BB):
        b = first + tl.arange(0, BB)
        ok = (b < B)[:, None] & (n < O)[None, :]
        total += tl.sum(tl.load(x + (c * B + b)[:, None] * O + n[None, :], mask=ok, other=0.0), axis=0)
    tl.store(out + c * O + n, total, mask=n < O)


def column_sum(x: Tensor, keep: bool = False) -> Tensor:
    """Sum over the middle of [clients, batch, columns], as a bias's gradient does; PyTorch is several times slower."""
    C, B, O = x.shape
    out = x.new_empty(C, O)
    bn = min(32, next_two(O))
    _columns[(triton.cdiv(O, bn), C)](x, out, B, O, max(1, min(64, next_two(B))), bn)
    return out[:, None] if keep else out


@triton.jit(do_not_specialize=["B", "SPLIT"])
def _thin(
    x, w, out, sw, B, K, N, SPLIT,
    FOUR: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add a slice of weights times samples; so the long side is the one that tensor cores want long."""
    c = tl.program_id(2).to(tl.int64)
    split = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    b = tl.arange(0, BB)
    x += c * B * K
    w += c * (sw * 4 if FOUR else sw)  # a multiple of four that the compiler can see is read 16 bytes at once
    acc = tl.zeros((BN, BB), tl.float32)
    for k0 in range(split * BK, K, SPLIT * BK):
        k = k0 + tl.arange(0, BK)
        wa = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        xa = tl.load(x + b[None, :] * K + k[:, None], mask=(b < B)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(wa, xa, acc, input_precision=PREC)
    row = split.to(tl.int64) * tl.num_programs(2) + c
    tl.store(out + (row * B + b[None, :]) * N + n[:, None], acc, mask=(n < N)[:, None] & (b < B)[None, :])


def thin_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `torch.bmm(a, b)` of a few samples each [clients, batch, inputs] and weights [clients, inputs, outputs].

    Reading the weights takes all the time, and a library's kernel reads them with half of the GPU. Slices of the sum
    are added in a fixed order. In both factors the numbers of an input must lie side by side.
    """
    (C, B, K), N = a.shape, b.shape[2]
    bn, bk = 64, 64
    tiles, most = C * triton.cdiv(N, bn), triton.cdiv(K, bk)
    split = max(1, min(most // 4, triton.cdiv(4 * _processors(a.device), tiles)))
    out = a.new_empty(split, C, B, N)
    far, four = b.stride(0), b.stride(0) % 4 == 0
    _thin[(split, triton.cdiv(N, bn), C)](
        a, b, out, far // 4 if four else far, B, K, N, split, four, bn, max(16, next_two(B)), bk, precision(),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _repeat(x, out, N, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + column, mask=column < N)
    tl.store(out + tl.program_id(1).to(tl.int64) * N + column, v, mask=column < N)


def fill(place: Tensor, value: Tensor) -> None:
    """Do `place.copy_(value)`; a kernel repeats a single row, which PyTorch does at half the speed."""
    numbers = place[0].numel() if place.dim() and len(place) else 0
    alike = value.shape == place.shape and value.dtype == place.dtype and place.is_contiguous()
    if not place.is_cuda or not numbers or not alike or value.stride(0) != 0 or not value[0].is_contiguous():
        place.copy_(value)
    else:
        _repeat[(triton.cdiv(numbers, 1024), len(place))](value, place, numbers, 1024)


@triton.jit(do_not_specialize=["M", "STEPS", "EPOCHS", "BATCH"])
def _batches(order, sizes, totals, out, M, N, STEPS, EPOCHS, BATCH, SLOTS, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = slot // SLOTS
    size = tl.load(sizes + row)
    each = tl.maximum((size + BATCH - 1) // BATCH, 1)
    place = step % each * BATCH + slot % SLOTS
    inside = (step < tl.load(totals + row)) & (place < size) & (slot < STEPS * SLOTS)
    epoch = tl.minimum(step // each, EPOCHS - 1)
    n = tl.load(order + (epoch * M + row) * N + place, mask=inside, other=-1)
    tl.store(out + row * STEPS * SLOTS + slot, n, mask=slot < STEPS * SLOTS)


def batches(order: Tensor, sizes: Tensor, totals: Tensor, batch: int, steps: int, slots: int) -> Tensor:
    """Return samples of every step [rows, steps, slots], -1: none, from all epochs' orders [epochs, rows, samples]."""
    (epochs, rows, first), width = order.shape, min(1024, next_two(steps * slots))
    out = torch.empty(rows, steps, slots, dtype=torch.int64, device=order.device)
    _batches[(rows, triton.cdiv(steps * slots, width))](
        order.contiguous(), sizes, totals, out, rows, first, steps, epochs, batch, slots, width
    )
    return out


@triton.jit
def _gather(
    table, moves, counter, start, source, labels, mean, std, x, y, weight, steps, last,
    SLOTS: tl.constexpr, CHANNELS: tl.constexpr, PAD: tl.constexpr, PIXELS: tl.constexpr, WIDE: tl.constexpr,
    MOVES: tl.constexpr, BORDER: tl.constexpr, NORMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make one sample: its bytes as numbers, channels last; its label; 1 if it is a sample, 0 if it is filling."""
    r = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = (r // SLOTS * steps + tl.load(counter)) * SLOTS + r % SLOTS
    n = tl.load(table + slot)
    sample = tl.minimum(tl.load(start + r // SLOTS) + tl.maximum(n, 0), last)  # a client without samples has no first
    ok = place < PIXELS
    c = tl.arange(0, PAD)
    real = ok[:, None] & (c < CHANNELS)[None, :]
    pixel, there = place, real
    if MOVES:  # what `core.augment.moved` does
        move = tl.load(moves + slot).to(tl.int32)
        i = place // WIDE + move // 2 // (2 * BORDER + 1) - BORDER
        j = tl.where(move % 2 > 0, WIDE - 1 - place % WIDE, place % WIDE) + move // 2 % (2 * BORDER + 1) - BORDER
        pixel = i * WIDE + j
        there = real & ((i >= 0) & (i < PIXELS // WIDE) & (j >= 0) & (j < WIDE))[:, None]
    v = tl.load(source + sample * (CHANNELS * PIXELS) + c[None, :] * PIXELS + pixel[:, None], mask=there, other=0)
    v = v.to(tl.float32) / 255.0
    if NORMAL:
        m = tl.load(mean + c, mask=c < CHANNELS, other=0.0)
        s = tl.load(std + c, mask=c < CHANNELS, other=1.0)
        v = tl.where(real, (v - m[None, :]) / s[None, :], 0.0)
    tl.store(x + (r * PIXELS + place[:, None]) * PAD + c[None, :], v, mask=ok[:, None])
    if tl.program_id(1) == 0:
        tl.store(y + r, tl.load(labels + sample))
        tl.store(weight + r, tl.where(n >= 0, 1.0, 0.0))


def gather(
    source: Split,
    normal: tuple[Tensor, Tensor] | None,
    table: Tensor,
    counter: Tensor,
    start: Tensor,
    rows: int,
    moves: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make the batches of a step from images that are kept as bytes.

    Args:
        source: all clients' images [samples, channels, high, wide], uint8 and contiguous, and labels.
        normal: mean and standard deviation of each channel.
        table: [clients, steps, slots], each client's samples in every step; -1: none.
        counter: the number of the step, on the device.
        start: [clients], the first image of each.
        rows: make batches for the first so many clients.
        moves: [clients, steps, slots], what happens to each image; None: nothing.

    Returns:
        Images [rows, slots, channels, high, wide], labels, and weights: 1, or 0 for filling.
    """
    (_, channels, high, wide), slots = source.x.shape, table.shape[2]
    pad, block = 4, 256  # channels as the convolution wants them
    x = torch.empty(rows, slots, high, wide, pad, device=table.device)
    y = torch.empty(rows, slots, dtype=torch.int64, device=table.device)
    weight = torch.empty(rows, slots, device=table.device)
    mean, std = normal or (x, x)
    _gather[(rows * slots, triton.cdiv(high * wide, block))](
        table, table if moves is None else moves, counter, start, source.x, source.y, mean, std, x, y, weight,
        table.shape[1], len(source.y) - 1, slots, channels, pad, high * wide, wide, moves is not None, BORDER,
        normal is not None, block,
    )  # fmt: skip
    return x[..., :channels].permute(0, 1, 4, 2, 3), y, weight
