"""Convolution layers of a whole cohort, every client with its own weights, as implicit matrix products.

One layer is convolution, bias, ReLU and 2x2 pooling in one kernel. Inside, images are channels-last [C, B, H, W, I] and
weights taps-first [C, k*k*I, O], both padded to a multiple of four channels, so that loads are 16 bytes wide. A pooled
layer takes four products, one for each place in the window, and pools them in its registers. The gradient of the
weights is summed over slices in a fixed order, without atomics, so equal runs give equal bits.

`operators` makes `forward` and `backward` known to PyTorch.
"""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel import autotune
from perfed.accel.kernels import next_two, precision

NONE, MAX, AVG = 0, 1, 2  # pools


class Layer(NamedTuple):
    """Describe a convolution layer, all but its numbers."""

    kernel: int
    stride: int = 1
    padding: int = 0
    relu: bool = False
    pool: int = NONE
    flat: bool = False  # a flattening comes next: then the output's channels come first, as PyTorch's do

    def outer(self, size: int) -> int:
        """Return the pixels along one side after the convolution."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def pooled(self, size: int) -> int:
        """Return the pixels along one side after the pool; an odd last one is left out, as PyTorch does."""
        return self.outer(size) // 2 if self.pool else self.outer(size)


# ---------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _patches(
    x, base, off, iy, ix, ky, kx, ok,
    DY: tl.constexpr, DX: tl.constexpr, H: tl.constexpr, W: tl.constexpr, I: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Load what windows DY pixels below and DX beside these see: one row for each window, one column for each tap."""
    inside = ok
    if PAD > 0:
        yy = iy[:, None] + (ky + DY)[None, :]
        xx = ix[:, None] + (kx + DX)[None, :]
        inside = inside & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
    return tl.load(x + base[:, None] + (off + (DY * W + DX) * I)[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["B"])
def _forward(
    x, w, b, y, which, sw, sb, B,
    H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    REAL_O: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, RELU: tl.constexpr,
    POOL: tl.constexpr, FLAT: tl.constexpr, BIAS: tl.constexpr, WHICH: tl.constexpr, PREC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    M = B * HP * WP
    px = rows % WP
    t = rows // WP
    py = t % HP
    FAR: tl.constexpr = 2 * STRIDE if POOL else STRIDE
    iy = py * FAR - PAD
    ix = px * FAR - PAD
    base = ((t // HP * H + iy) * W + ix) * I
    ok = rows < M
    x += c * B * H * W * I
    w += c * sw
    K: tl.constexpr = KS * KS * I
    acc = tl.zeros((BM, BN), tl.float32)
    if POOL:  # a product for each place in the window
        acc1 = tl.zeros((BM, BN), tl.float32)
        acc2 = tl.zeros((BM, BN), tl.float32)
        acc3 = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + tl.arange(0, BK)
        ky = kk // (KS * I)
        kx = (kk // I) % KS
        off = ky * (W * I) + kk % (KS * I)
        off = tl.max_contiguous(tl.multiple_of(off, 4), 4)
        real = ok[:, None] & (kk < K)[None, :]
        wa = tl.load(w + kk[:, None] * O + n[None, :], mask=(kk < K)[:, None] & (n < O)[None, :], other=0.0)
        xa = _patches(x, base, off, iy, ix, ky, kx, real, 0, 0, H, W, I, PAD)
        acc = tl.dot(xa, wa, acc, input_precision=PREC)
        if POOL:
            xa = _patches(x, base, off, iy, ix, ky, kx, real, 0, STRIDE, H, W, I, PAD)
            acc1 = tl.dot(xa, wa, acc1, input_precision=PREC)
            xa = _patches(x, base, off, iy, ix, ky, kx, real, STRIDE, 0, H, W, I, PAD)
            acc2 = tl.dot(xa, wa, acc2, input_precision=PREC)
            xa = _patches(x, base, off, iy, ix, ky, kx, real, STRIDE, STRIDE, H, W, I, PAD)
            acc3 = tl.dot(xa, wa, acc3, input_precision=PREC)
    if BIAS:  # noqa: SIM108
        bias = tl.load(b + c * sb + n, mask=n < REAL_O, other=0.0)[None, :]
    else:
        bias = tl.zeros((1, BN), tl.float32)
    there = (c * M + rows)[:, None] * O + n[None, :]
    m = ok[:, None] & (n < O)[None, :]
    if POOL == 1:
        v = tl.maximum(acc, acc1, propagate_nan=tl.PropagateNan.ALL)
        v = tl.maximum(v, acc2, propagate_nan=tl.PropagateNan.ALL)
        v = tl.maximum(v, acc3, propagate_nan=tl.PropagateNan.ALL)
        i = tl.where(acc == v, 0, tl.where(acc1 == v, 1, tl.where(acc2 == v, 2, 3)))
        v = v + bias
        if RELU:
            i = tl.where(v <= 0, 4, i)  # what is not a number passes, as it does forwards
        if WHICH:
            tl.store(which + there, i.to(tl.uint8), mask=m)
    elif POOL == 2:
        acc, acc1, acc2, acc3 = acc + bias, acc1 + bias, acc2 + bias, acc3 + bias
        if RELU:
            if WHICH:
                i = tl.where(acc <= 0, 0, 1) + tl.where(acc1 <= 0, 0, 2)
                i = i + tl.where(acc2 <= 0, 0, 4) + tl.where(acc3 <= 0, 0, 8)
                tl.store(which + there, i.to(tl.uint8), mask=m)
            acc, acc1 = tl.where(acc <= 0, 0.0, acc), tl.where(acc1 <= 0, 0.0, acc1)
            acc2, acc3 = tl.where(acc2 <= 0, 0.0, acc2), tl.where(acc3 <= 0, 0.0, acc3)
        v = (acc + acc1 + acc2 + acc3) * 0.25
    else:
        v = acc + bias
    if RELU:
        v = tl.where(v <= 0, 0.0, v)  # not a maximum: what is not a number must stay so
    if FLAT:
        place = ((c * B + t // HP)[:, None] * REAL_O + n[None, :]) * (HP * WP) + (py * WP + px)[:, None]
        tl.store(y + place, v, mask=ok[:, None] & (n < REAL_O)[None, :])
    else:
        tl.store(y + there, v, mask=m)


@triton.jit
def _unpooled(
    g, which, r, ok, n,
    HO: tl.constexpr, WO: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, O: tl.constexpr, REAL_O: tl.constexpr,
    RELU: tl.constexpr, POOL: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Return the gradient before ReLU and pool of these pixels and channels of a client.

    Without a pool `which` is the layer's output, whose sign says where ReLU was on, and lies as the gradient does.
    """
    ox = r % WO
    t = r // WO
    oy = t % HO
    py = oy // 2 if POOL else oy
    px = ox // 2 if POOL else ox
    inside = ok[:, None] & (n < O)[None, :] & (py < HP)[:, None] & (px < WP)[:, None]
    last = ((t // HO * HP + py) * WP + px)[:, None] * O + n[None, :]
    if FLAT:
        place = ((t // HO)[:, None] * REAL_O + n[None, :]) * (HP * WP) + (py * WP + px)[:, None]
        v = tl.load(g + place, mask=inside & (n < REAL_O)[None, :], other=0.0)
    else:
        place = last
        v = tl.load(g + place, mask=inside, other=0.0)
    if POOL == 0:
        if RELU:
            v = tl.where(tl.load(which + place, mask=inside & (n < REAL_O)[None, :], other=0.0) <= 0, 0.0, v)
    else:
        q = ((oy % 2) * 2 + ox % 2)[:, None]
        if POOL == 1:
            v = tl.where(tl.load(which + last, mask=inside, other=4) == q, v, 0.0)
        else:
            v = v * 0.25
            if RELU:
                on = (tl.load(which + last, mask=inside, other=0).to(tl.int32) >> q) & 1
                v = tl.where(on == 1, v, 0.0)
    return v


@triton.jit(do_not_specialize=["B"])
def _before_pool(
    g, which, dense, turned, B,
    HO: tl.constexpr, WO: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, O: tl.constexpr, REAL_O: tl.constexpr,
    RELU: tl.constexpr, POOL: tl.constexpr, FLAT: tl.constexpr, DENSE: tl.constexpr, TURNED: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the gradient before ReLU and pool, dense [C, B, HO, WO, O] and turned [C, O, B*HO*WO]."""
    c = tl.program_id(1).to(tl.int64)
    M = B * HO * WO
    r = tl.program_id(0) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    each: tl.constexpr = REAL_O if FLAT else O
    g += c * B * HP * WP * each
    which += c * B * HP * WP * (O if POOL else each)
    v = _unpooled(g, which, r, r < M, n, HO, WO, HP, WP, O, REAL_O, RELU, POOL, FLAT)
    m = (r < M)[:, None] & (n < O)[None, :]
    if DENSE:
        tl.store(dense + c * M * O + r[:, None] * O + n[None, :], v, mask=m)
    if TURNED:
        tl.store(turned + c * M * O + n[None, :] * M + r[:, None], v, mask=m)


@triton.jit(do_not_specialize=["B", "SPLIT"])
def _weight_grad(
    x, g, which, dw, db, B, SPLIT,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr,
    I: tl.constexpr, O: tl.constexpr, REAL_O: tl.constexpr, KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    RELU: tl.constexpr, POOL: tl.constexpr, FLAT: tl.constexpr, BIAS: tl.constexpr, PREC: tl.constexpr,
    TURNED: tl.constexpr, FUSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Add a slice of the weights' gradient; `g` is dense or turned, or as it comes, after ReLU and pool (FUSED)."""
    c = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    kk = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.arange(0, BN)
    M = B * HO * WO
    K: tl.constexpr = KS * KS * I
    ky = kk // (KS * I)
    kx = (kk // I) % KS
    off = ky * (W * I) + kk % (KS * I)
    off = tl.max_contiguous(tl.multiple_of(off, 4), 4)
    x += c * B * H * W * I
    if FUSED:
        each: tl.constexpr = REAL_O if FLAT else O
        g += c * B * HP * WP * each
        which += c * B * HP * WP * (O if POOL else each)
    else:
        g += c * M * O
    acc = tl.zeros((BK, BN), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for r0 in range(split * BM, M, SPLIT * BM):
        r = r0 + tl.arange(0, BM)
        ok = r < M
        t = r // WO
        iy = (t % HO) * STRIDE - PAD
        ix = (r % WO) * STRIDE - PAD
        base = ((t // HO * H + iy) * W + ix) * I
        inside = (kk < K)[:, None] & ok[None, :]
        if PAD > 0:
            yy = iy[None, :] + ky[:, None]
            xx = ix[None, :] + kx[:, None]
            inside = inside & (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
        xa = tl.load(x + off[:, None] + base[None, :], mask=inside, other=0.0)
        if FUSED:
            ga = _unpooled(g, which, r, ok, n, HO, WO, HP, WP, O, REAL_O, RELU, POOL, FLAT)
        elif TURNED:
            ga = tl.load(g + n[None, :] * M + r[:, None], mask=ok[:, None] & (n < O)[None, :], other=0.0)
        else:
            ga = tl.load(g + r[:, None] * O + n[None, :], mask=ok[:, None] & (n < O)[None, :], other=0.0)
        acc = tl.dot(xa, ga, acc, input_precision=PREC)
        if BIAS:
            bias += tl.sum(ga, axis=0)
    row = split.to(tl.int64) * tl.num_programs(2) + c
    tl.store(dw + row * K * O + kk[:, None] * O + n[None, :], acc, mask=(kk < K)[:, None] & (n < O)[None, :])
    if BIAS:  # noqa: SIM102 (known when the kernel is compiled, the other is not)
        if tl.program_id(0) == 0:
            tl.store(db + row * O + n, bias, mask=n < O)


@triton.jit(do_not_specialize=["C"])
def _add_up(
    dw, db, w, b, C,
    SPLIT: tl.constexpr, I: tl.constexpr, O: tl.constexpr, REAL_I: tl.constexpr, REAL_O: tl.constexpr,
    TAPS: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Add slices of the weight gradient in order, from taps first to PyTorch's [O, I, k, k].

    The loops are unrolled: all slices are asked for at once, or each addition would wait for its own.
    """
    c = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)  # in the order in which they are written
    n = tl.arange(0, BN)
    K: tl.constexpr = TAPS * I
    m = (j < REAL_I * TAPS)[:, None] & (n < O)[None, :]
    kk = j % TAPS * I + j // TAPS
    acc = tl.zeros((BJ, BN), tl.float32)
    for s in tl.static_range(SPLIT):
        acc += tl.load(dw + (s * C + c) * K * O + kk[:, None] * O + n[None, :], mask=m, other=0.0)
    place = n[None, :] * (REAL_I * TAPS) + j[:, None]
    tl.store(w + c * REAL_O * REAL_I * TAPS + place, acc, mask=m & (n < REAL_O)[None, :])
    if BIAS:  # noqa: SIM102
        if tl.program_id(0) == 0:
            total = tl.zeros((BN,), tl.float32)
            for s in tl.static_range(SPLIT):
                total += tl.load(db + (s * C + c) * O + n, mask=n < O, other=0.0)
            tl.store(b + c * REAL_O + n, total, mask=n < REAL_O)


@triton.jit
def _arrange(
    w, out, sw,
    I: tl.constexpr, O: tl.constexpr, REAL_I: tl.constexpr, REAL_O: tl.constexpr, TAPS: tl.constexpr,
    BN: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Lay weights [O, I, k, k] out as taps [k*k*I, O], with zeros for the channels that are added."""
    c = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    n = tl.arange(0, BN)
    real = (j < REAL_I * TAPS)[:, None] & (n < REAL_O)[None, :]
    v = tl.load(w + c * sw + n[None, :] * (REAL_I * TAPS) + j[:, None], mask=real, other=0.0)
    kk = j % TAPS * I + j // TAPS
    tl.store(out + c * TAPS * I * O + kk[:, None] * O + n[None, :], v, mask=(j < I * TAPS)[:, None] & (n < O)[None, :])


@triton.jit(do_not_specialize=["B"])
def _input_grad(
    g, w, dx, sw, B,
    H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    KS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PREC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    o = tl.arange(0, BO)
    ix = rows % W + PAD
    t = rows // W
    iy = t % H + PAD
    ok = rows < B * H * W
    first = t // H * HO
    g += c * B * HO * WO * O
    w += c * sw
    acc = tl.zeros((BM, BN), tl.float32)
    PIECES: tl.constexpr = (O + BO - 1) // BO
    for k in range(KS * KS * PIECES):
        o0 = (k % PIECES) * BO
        tap = k // PIECES
        ty = iy - tap // KS
        tx = ix - tap % KS
        inside = ok & (ty >= 0) & (tx >= 0)
        if STRIDE > 1:
            inside = inside & (ty % STRIDE == 0) & (tx % STRIDE == 0)
            ty = ty // STRIDE
            tx = tx // STRIDE
        inside = inside & (ty < HO) & (tx < WO)
        place = ((first + ty) * WO + tx) * O + o0
        ga = tl.load(g + place[:, None] + o[None, :], mask=inside[:, None] & (o0 + o < O)[None, :], other=0.0)
        wa = tl.load(
            w + (tap * I + n)[None, :] * O + o0 + o[:, None], mask=(n < I)[None, :] & (o0 + o < O)[:, None], other=0.0
        )
        acc = tl.dot(ga, wa, acc, input_precision=PREC)
    tl.store(dx + (c * B * H * W + rows)[:, None] * I + n[None, :], acc, mask=ok[:, None] & (n < I)[None, :])


# ---------------------------------------------------------------------------------------------------- launches


def _up2(n: int) -> int:
    return max(16, next_two(n))


def _up4(n: int) -> int:
    return -(-n // 4) * 4


def channels_last(x: Tensor) -> Tensor:
    """Return [C, B, I, H, W] as contiguous [C, B, H, W, I'], I' a multiple of four; copy only where needed."""
    C, B, I, H, W = x.shape
    P = _up4(I)
    strides = (B * H * W * P, H * W * P, 1, W * P, P)
    size = x.element_size() * C * B * H * W * P
    whole = P == I or (x.storage_offset() == 0 and x.untyped_storage().nbytes() == size)
    if x.stride() == strides and whole:  # what these kernels give, padding included
        return x.as_strided((C, B, H, W, P), (B * H * W * P, H * W * P, W * P, P, 1))
    out = x.new_zeros(C, B, H, W, P) if P != I else x.new_empty(C, B, H, W, P)
    out[..., :I] = x.permute(0, 1, 3, 4, 2)
    return out


def channels_first(x: Tensor, channels: int) -> Tensor:
    """Return the view [C, B, I, H, W] of what `channels_last` gives."""
    return x[..., :channels].permute(0, 1, 4, 2, 3)


def _taps(w: Tensor) -> Tensor:
    """Return [C, O, I, k, k] as [C, k*k*I', O']."""
    C, O, I, k, _ = w.shape
    if w.stride()[1:] != (I * k * k, k * k, k, 1):
        w = w.contiguous()
    P, Q, bj = _up4(I), _up4(O), 32
    out = w.new_empty(C, k * k * P, Q)
    _arrange[(triton.cdiv(k * k * P, bj), C)](w, out, w.stride(0), P, Q, I, O, k * k, _up2(Q), bj)
    return out


def _options(c: dict[str, int]) -> dict[str, int]:
    return {"num_warps": c["warps"], "num_stages": c["stages"]}


def forward(x: Tensor, w: Tensor, b: Tensor | None, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [C, B, O, HP, WP], what its gradient needs to know of the pool, and the weights as taps."""
    xl, wl = channels_last(x), _taps(w)
    C, B, H, W, I = xl.shape
    O, real = wl.shape[2], w.shape[1]
    HP, WP = layer.pooled(H), layer.pooled(W)
    bl = wl if b is None else b if b.stride(1) == 1 else b.contiguous()
    flat = layer.flat and (layer.relu or layer.pool != NONE)
    y = x.new_empty(C, B, real, HP, WP) if flat else x.new_empty(C, B, HP, WP, O)
    noted = layer.pool == MAX or (layer.pool == AVG and layer.relu)
    which = x.new_empty(C, B, HP, WP, O, dtype=torch.uint8) if noted else y

    def launch(c: dict[str, int]) -> autotune.Call:
        bn, bm = min(c["BN"], _up2(O)), c["BM"] // (4 if layer.pool else 1)
        grid = (triton.cdiv(B * HP * WP, bm), triton.cdiv(O, bn), C)
        args = (
            xl, wl, bl, y, which, wl.stride(0), bl.stride(0), B, H, W, HP, WP, I, O, real, layer.kernel, layer.stride,
            layer.padding, layer.relu, layer.pool, flat, b is not None, noted, precision(), bm, bn, c["BK"],
        )  # fmt: skip
        return autotune.Call(_forward, grid, args, _options(c))

    autotune.run("forward", (C, B, H, W, I, O, *layer, b is not None, precision()), launch, x.device, (y, which))
    return y if flat else channels_first(y, real), channels_first(which, real) if noted else x.new_empty(C, 0), wl


def backward(
    g: Tensor, x: Tensor, wl: Tensor, y: Tensor, which: Tensor, layer: Layer, channels: tuple[int, int], bias: bool,
    need: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of input (empty unless needed), weight, and bias (empty without one); `wl` are the taps."""
    xl, (real_o, real_i) = channels_last(x), channels
    C, B, H, W, I = xl.shape
    O, k = wl.shape[2], layer.kernel
    HO, WO, HP, WP = layer.outer(H), layer.outer(W), layer.pooled(H), layer.pooled(W)
    plain = not layer.pool and not layer.relu
    flat = layer.flat and not plain
    gl = g.contiguous() if flat else channels_last(g)
    pooled = layer.pool and which.numel()
    noted = channels_last(which) if pooled else y.contiguous() if flat else channels_last(y)
    room = functools.cache(lambda _: gl.new_empty(C, B, HO, WO, O))  # each kind once, whoever needs it
    dense = gl if plain else room("dense") if need else None
    bn = _up2(O)
    bp = max(16, 4096 // bn)

    shape = (C, B, H, W, I, O, k, layer.stride, layer.padding, precision())
    dw, db = gl.new_empty(C, real_o, real_i, k, k), gl.new_empty(C, real_o if bias else 0)

    def weights(c: dict[str, int]) -> autotune.Call:
        S, turn = c["SPLIT"], bool(c["TURNED"])
        fused = bool(c["FUSED"]) and dense is None  # where nobody else needs it, it need not be written down
        spread = room("dense") if dense is None and not turn and not fused else dense
        turned = room("turned") if turn else gl
        dw_all, db_all = gl.new_empty(S, C, k * k * I, O), gl.new_empty(S, C, O)
        bj = max(4, 512 // bn)  # few for each program: there may be little to add, and all of it is waited for
        whole = (dw_all, db_all, dw, db, C, S, I, O, real_i, real_o, k * k, bias, bn, bj)
        add = autotune.Call(_add_up, (triton.cdiv(k * k * real_i, bj), C), whole, {})
        after = (layer.relu, layer.pool, flat) if fused else (False, NONE, False)
        args = (
            xl, gl if fused else turned if turn else spread, noted, dw_all, db_all, B, S, H, W, HO, WO, HP, WP, I, O,
            real_o, k, layer.stride, layer.padding, *after, bias, precision(), turn, fused, c["BM"], bn, c["BK"],
        )  # fmt: skip
        product = autotune.Call(_weight_grad, (triton.cdiv(k * k * I, c["BK"]), S, C), args, _options(c), add)
        if fused or (plain and not turn):
            return product
        args = (
            gl, noted, gl if spread is None else spread, turned, B, HO, WO, HP, WP, O, real_o, layer.relu, layer.pool,
            flat, not plain and spread is not None, turn, bp, bn,
        )  # fmt: skip
        return autotune.Call(_before_pool, (triton.cdiv(B * HO * WO, bp), C), args, {}, product)

    autotune.run("weights", (*shape, layer.relu, layer.pool, flat, need, bias), weights, x.device, (dw, db))
    dx = g.new_empty(C, 0)
    if need:
        out = g.new_empty(C, B, H, W, I)

        def inputs(c: dict[str, int]) -> autotune.Call:
            bo = min(c["BO"], _up2(O))
            args = (
                dense, wl, out, wl.stride(0), B, H, W, HO, WO, I, O, k, layer.stride, layer.padding, precision(),
                c["BM"], _up2(I), bo,
            )  # fmt: skip
            return autotune.Call(_input_grad, (triton.cdiv(B * H * W, c["BM"]), C), args, _options(c))

        autotune.run("inputs", shape, inputs, x.device, (out,))
        dx = channels_first(out, real_i)
    return dx, dw, db
