"""GroupNorm of a whole cohort and its gradient."""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.kernels import next_two
from perfed.accel.kernels.conv import channels_first, channels_last


@triton.jit(do_not_specialize=["B"])
def _norm(
    x, w, b, y, mean, scale, eps, B,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Bring every group of channels of one sample to mean 0 and variance 1, then apply weight and bias."""
    r = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = CHANNELS // GROUPS
    n = tl.arange(0, CHANNELS)
    place = tl.arange(0, BP)
    offset = r * PIXELS * CHANNELS + place[:, None] * CHANNELS + n[None, :]
    ok = (place < PIXELS)[:, None]
    v = tl.reshape(tl.load(x + offset, mask=ok, other=0.0), (BP, GROUPS, EACH))
    m = tl.sum(tl.sum(v, axis=2), axis=0) / (PIXELS * EACH)
    d = tl.where((place < PIXELS)[:, None, None], v - m[None, :, None], 0.0)
    s = 1.0 / tl.sqrt(tl.sum(tl.sum(d * d, axis=2), axis=0) / (PIXELS * EACH) + eps)
    c = r // B * CHANNELS
    out = tl.reshape(d * s[None, :, None], (BP, CHANNELS)) * tl.load(w + c + n)[None, :] + tl.load(b + c + n)[None, :]
    tl.store(y + offset, out, mask=ok)
    group = tl.arange(0, GROUPS)
    tl.store(mean + r * GROUPS + group, m)
    tl.store(scale + r * GROUPS + group, s)


@triton.jit(do_not_specialize=["B"])
def _norm_grad(
    g, x, w, mean, scale, dx, dw, db, B,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = CHANNELS // GROUPS
    n = tl.arange(0, CHANNELS)
    place = tl.arange(0, BP)
    offset = r * PIXELS * CHANNELS + place[:, None] * CHANNELS + n[None, :]
    ok = (place < PIXELS)[:, None]
    group = tl.arange(0, GROUPS)
    m = tl.load(mean + r * GROUPS + group)
    s = tl.load(scale + r * GROUPS + group)
    inside = (place < PIXELS)[:, None, None]
    v = tl.reshape(tl.load(x + offset, mask=ok, other=0.0), (BP, GROUPS, EACH))
    unit = tl.where(inside, (v - m[None, :, None]) * s[None, :, None], 0.0)
    grad = tl.load(g + offset, mask=ok, other=0.0)
    tl.store(dw + r * CHANNELS + n, tl.sum(grad * tl.reshape(unit, (BP, CHANNELS)), axis=0))
    tl.store(db + r * CHANNELS + n, tl.sum(grad, axis=0))
    h = tl.reshape(grad * tl.load(w + r // B * CHANNELS + n)[None, :], (BP, GROUPS, EACH))
    first = tl.sum(tl.sum(h, axis=2), axis=0) / (PIXELS * EACH)
    second = tl.sum(tl.sum(h * unit, axis=2), axis=0) / (PIXELS * EACH)
    out = (h - first[None, :, None] - unit * second[None, :, None]) * s[None, :, None]
    tl.store(dx + offset, tl.reshape(out, (BP, CHANNELS)), mask=ok)


def can_normalise(groups: int, channels: int, high: int, wide: int) -> bool:
    """Return True if one sample fits into one program, and its numbers of channels are powers of two."""
    two = lambda n: n & (n - 1) == 0
    return channels % 4 == 0 and two(channels) and two(groups) and channels * high * wide <= 2**15


def normalise(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return GroupNorm of every row's images, and each group's mean and scale for the gradient."""
    xl = channels_last(x)
    C, B, H, W, I = xl.shape
    y, mean, scale = torch.empty_like(xl), xl.new_empty(C, B, groups), xl.new_empty(C, B, groups)
    block = next_two(H * W)
    _norm[(C * B,)](
        xl, w.contiguous(), b.contiguous(), y, mean, scale, eps, B, H * W, I, groups, block, num_warps=_warps(block * I)
    )
    return channels_first(y, I), mean, scale


def _warps(numbers: int) -> int:
    return min(16, max(1, numbers // 2048))


def normalise_grad(
    g: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    gl, xl = channels_last(g), channels_last(x)
    C, B, H, W, I = xl.shape
    dx, dw, db = torch.empty_like(xl), xl.new_empty(C, B, I), xl.new_empty(C, B, I)
    block = next_two(H * W)
    rest = [t.contiguous() for t in (w, mean, scale)]  # under a client's own vmap, rows may be one row, shown often
    _norm_grad[(C * B,)](gl, xl, *rest, dx, dw, db, B, H * W, I, groups, block, num_warps=_warps(block * I))
    return channels_first(dx, I), dw.sum(1), db.sum(1)
