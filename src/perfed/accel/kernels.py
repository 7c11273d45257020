"""Kernels for a whole cohort besides the convolution, each with the function that launches it.

Cross-entropy and GroupNorm with their gradients, for layers; the hash of `random` and the numbers drawn from it, bit
for bit; and sums and copies of all clients' rows.
"""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.convolution import channels_first, channels_last, next_two


@triton.jit
def _loss(logits, y, loss, K, BK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    z = tl.load(logits + r * K + k, mask=k < K, other=-float("inf"))
    top = tl.max(z, axis=0)
    label = tl.load(y + r)
    right = tl.sum(tl.where(k == label, z, 0.0), axis=0)
    tl.store(loss + r, tl.log(tl.sum(tl.exp(z - top), axis=0)) + top - right)


@triton.jit
def _loss_grad(logits, y, g, out, K, BK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    z = tl.load(logits + r * K + k, mask=k < K, other=-float("inf"))
    e = tl.exp(z - tl.max(z, axis=0))
    d = e / tl.sum(e, axis=0) - tl.where(k == tl.load(y + r), 1.0, 0.0)
    tl.store(out + r * K + k, d * tl.load(g + r), mask=k < K)


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, logits [..., classes]."""
    z = logits.contiguous()
    out = z.new_empty(y.shape)
    K = z.shape[-1]
    _loss[(y.numel(),)](z, y.contiguous(), out, K, next_two(K), num_warps=1)
    return out


def loss_grad(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """The gradient of the logits, where each sample's loss has gradient g."""
    z = logits.contiguous()
    out, K = torch.empty_like(z), z.shape[-1]
    _loss_grad[(y.numel(),)](z, y.contiguous(), g.contiguous(), out, K, next_two(K), num_warps=1)
    return out


@triton.jit(do_not_specialize=["B"])
def _norm(
    x, w, b, y, mean, scale, eps, B,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One sample: every group of channels to mean 0 and variance 1, then weight and bias."""
    r = tl.program_id(0).to(tl.int64)
    EACH: tl.constexpr = CHANNELS // GROUPS
    n = tl.arange(0, CHANNELS)
    place = tl.arange(0, BP)
    at = r * PIXELS * CHANNELS + place[:, None] * CHANNELS + n[None, :]
    ok = (place < PIXELS)[:, None]
    v = tl.reshape(tl.load(x + at, mask=ok, other=0.0), (BP, GROUPS, EACH))
    m = tl.sum(tl.sum(v, axis=2), axis=0) / (PIXELS * EACH)
    d = tl.where((place < PIXELS)[:, None, None], v - m[None, :, None], 0.0)
    s = 1.0 / tl.sqrt(tl.sum(tl.sum(d * d, axis=2), axis=0) / (PIXELS * EACH) + eps)
    c = r // B * CHANNELS
    out = tl.reshape(d * s[None, :, None], (BP, CHANNELS)) * tl.load(w + c + n)[None, :] + tl.load(b + c + n)[None, :]
    tl.store(y + at, out, mask=ok)
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
    at = r * PIXELS * CHANNELS + place[:, None] * CHANNELS + n[None, :]
    ok = (place < PIXELS)[:, None]
    group = tl.arange(0, GROUPS)
    m = tl.load(mean + r * GROUPS + group)
    s = tl.load(scale + r * GROUPS + group)
    inside = (place < PIXELS)[:, None, None]
    v = tl.reshape(tl.load(x + at, mask=ok, other=0.0), (BP, GROUPS, EACH))
    unit = tl.where(inside, (v - m[None, :, None]) * s[None, :, None], 0.0)
    grad = tl.load(g + at, mask=ok, other=0.0)
    tl.store(dw + r * CHANNELS + n, tl.sum(grad * tl.reshape(unit, (BP, CHANNELS)), axis=0))
    tl.store(db + r * CHANNELS + n, tl.sum(grad, axis=0))
    h = tl.reshape(grad * tl.load(w + r // B * CHANNELS + n)[None, :], (BP, GROUPS, EACH))
    first = tl.sum(tl.sum(h, axis=2), axis=0) / (PIXELS * EACH)
    second = tl.sum(tl.sum(h * unit, axis=2), axis=0) / (PIXELS * EACH)
    out = (h - first[None, :, None] - unit * second[None, :, None]) * s[None, :, None]
    tl.store(dx + at, tl.reshape(out, (BP, CHANNELS)), mask=ok)


def can_normalise(groups: int, channels: int, high: int, wide: int) -> bool:
    """Whether one sample fits into one program, and its numbers of channels are powers of two."""
    two = lambda n: n & (n - 1) == 0
    return channels % 4 == 0 and two(channels) and two(groups) and channels * high * wide <= 2**15


def normalise(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm of every row's images, and each group's mean and scale for its gradient."""
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
    """Gradients of input, weight and bias."""
    gl, xl = channels_last(g), channels_last(x)
    C, B, H, W, I = xl.shape
    dx, dw, db = torch.empty_like(xl), xl.new_empty(C, B, I), xl.new_empty(C, B, I)
    block = next_two(H * W)
    rest = [t.contiguous() for t in (w, mean, scale)]  # under a client's own vmap, rows may be one row, shown often
    _norm_grad[(C * B,)](gl, xl, *rest, dx, dw, db, B, H * W, I, groups, block, num_warps=_warps(block * I))
    return channels_first(dx, I), dw.sum(1), db.sum(1)


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _derived(key, part):
    """One part of `random.derive`."""
    return _mix(key + (part + 1) * -7046029254386353131)


@triton.jit(do_not_specialize=["first", "second"])
def _uniform(key, out, N, first, second, BLOCK: tl.constexpr):
    """Numbers in [0, 1) from keys, bit for bit those of `random.uniform(derive(key, first, second))`."""
    c = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = _derived(_derived(_derived(tl.load(key + c), first.to(tl.int64)), second.to(tl.int64)), at)
    u = ((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    tl.store(out + c * N + at, u.to(tl.float32), mask=at < N)


def uniform_rows(key: Tensor, first: int, second: int, count: int) -> Tensor:
    """`random.uniform` of a derived key for every row: [rows, count]."""
    out = torch.empty(len(key), count, device=key.device)
    _uniform[(triton.cdiv(count, 1024), len(key))](key.contiguous(), out, count, first, second, 1024)
    return out


@triton.jit
def _step_keys(key, at, out, M, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    step = tl.load(at)
    one = step * 0 + 1  # a number of 64 bits, as all others
    tl.store(out + c, _derived(_derived(tl.load(key + c, mask=c < M, other=0), one), step), mask=c < M)


def step_keys(key: Tensor, at: Tensor) -> Tensor:
    """`data.step_key` of every row, for a step that only the device knows."""
    out = torch.empty_like(key)
    _step_keys[(1,)](key, at, out, len(key), next_two(len(key)))
    return out


@triton.jit
def _weighted(x, share, out, M, N, G, BLOCK: tl.constexpr):
    """Rows added in order with weights, in double precision."""
    g = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    place = x + at
    for m in range(M):
        total += tl.load(share + m * G + g) * tl.load(place, mask=at < N, other=0.0).to(tl.float64)
        place += N
    tl.store(out + g.to(tl.int64) * N + at, total, mask=at < N)


def weighted_sum(rows: Tensor, share: Tensor) -> Tensor:
    """Sum over rows [m, n] with weights [m, groups] in float64: [groups, n], one look at each number."""
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
    """Sums over the middle of [clients, batch, columns], a bias's gradient; PyTorch takes several times as long."""
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
    """A slice of the sum: weights times samples, so that the long side is the one that tensor cores want long."""
    c = tl.program_id(2).to(tl.int64)
    split = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    b = tl.arange(0, BB)
    x += c * B * K
    w += c * (sw * 4 if FOUR else sw)  # said as a multiple of four, so that 16 bytes are read at once
    acc = tl.zeros((BN, BB), tl.float32)
    for k0 in range(split * BK, K, SPLIT * BK):
        k = k0 + tl.arange(0, BK)
        wa = tl.load(w + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        xa = tl.load(x + b[None, :] * K + k[:, None], mask=(b < B)[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(wa, xa, acc, input_precision=PREC)
    row = split.to(tl.int64) * tl.num_programs(2) + c
    tl.store(out + (row * B + b[None, :]) * N + n[:, None], acc, mask=(n < N)[:, None] & (b < B)[None, :])


def thin_product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm(a, b)` of a few samples each [clients, batch, inputs] and weights [clients, inputs, outputs].

    It is as fast as the weights are read, and a library's kernel reads them with half of the GPU. Slices of the sum
    are added in a fixed order. The numbers of an input lie side by side, in both.
    """
    (C, B, K), N = a.shape, b.shape[2]
    bn, bk = 64, 64
    tiles, most = C * triton.cdiv(N, bn), triton.cdiv(K, bk)
    split = max(1, min(most // 4, triton.cdiv(4 * _processors(a.device), tiles)))
    out = a.new_empty(split, C, B, N)
    far, four = b.stride(0), b.stride(0) % 4 == 0
    exact = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _thin[(split, triton.cdiv(N, bn), C)](
        a, b, out, far // 4 if four else far, B, K, N, split, four, bn, max(16, next_two(B)), bk, exact,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out[0] if split == 1 else out.sum(0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _repeat(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < N)
    tl.store(out + tl.program_id(1).to(tl.int64) * N + at, v, mask=at < N)


def fill(place: Tensor, value: Tensor) -> None:
    """`place.copy_(value)`; one row for all, which PyTorch copies at half the speed, by a kernel."""
    numbers = place[0].numel() if place.dim() and len(place) else 0
    alike = value.shape == place.shape and value.dtype == place.dtype and place.is_contiguous()
    if not place.is_cuda or not numbers or not alike or value.stride(0) != 0 or not value[0].is_contiguous():
        place.copy_(value)
    else:
        _repeat[(triton.cdiv(numbers, 1024), len(place))](value, place, numbers, 1024)


@triton.jit
def _mixed(z, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, _mix(tl.load(z + at, mask=at < N, other=0)), mask=at < N)


def mix(z: Tensor) -> Tensor:
    """The hash of `random`, in one launch."""
    z = z.contiguous()
    out = torch.empty_like(z)
    _mixed[(triton.cdiv(z.numel(), 1024),)](z, out, z.numel(), 1024)
    return out


@triton.jit(do_not_specialize=["M", "begin"])
def _tickets(key, sizes, out, M, N, begin, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)  # there may be many: the other axes end at 65,535
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    epoch = r // M + begin
    seed = _derived(_derived(tl.load(key + r % M), epoch * 0), epoch)
    ticket = tl.where(at < tl.load(sizes + r % M), _derived(seed, at), 0x7FFFFFFFFFFFFFFF)
    tl.store(out + r * N + at, ticket, mask=at < N)


def tickets(key: Tensor, sizes: Tensor, begin: int, end: int, longest: int) -> Tensor:
    """`random.tickets(data.order_key(key, epoch))` of these epochs, one after another: [epochs * rows, longest]."""
    rows, width = len(key), min(1024, next_two(longest))
    out = torch.empty((end - begin) * rows, longest, dtype=torch.int64, device=key.device)
    _tickets[(len(out), triton.cdiv(longest, width))](key.contiguous(), sizes, out, rows, longest, begin, width)
    return out


@triton.jit(do_not_specialize=["M", "STEPS", "EPOCHS", "BATCH"])
def _batches(order, sizes, totals, out, M, N, STEPS, EPOCHS, BATCH, SLOTS, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = at // SLOTS
    size = tl.load(sizes + row)
    each = tl.maximum((size + BATCH - 1) // BATCH, 1)
    place = step % each * BATCH + at % SLOTS
    inside = (step < tl.load(totals + row)) & (place < size) & (at < STEPS * SLOTS)
    epoch = tl.minimum(step // each, EPOCHS - 1)
    n = tl.load(order + (epoch * M + row) * N + place, mask=inside, other=-1)
    tl.store(out + row * STEPS * SLOTS + at, n, mask=at < STEPS * SLOTS)


def batches(order: Tensor, sizes: Tensor, totals: Tensor, batch: int, steps: int, slots: int) -> Tensor:
    """Samples of every step [rows, steps, slots] from the order of every epoch [epochs, rows, samples]; -1: none."""
    (epochs, rows, first), width = order.shape, min(1024, next_two(steps * slots))
    out = torch.empty(rows, steps, slots, dtype=torch.int64, device=order.device)
    _batches[(rows, triton.cdiv(steps * slots, width))](
        order.contiguous(), sizes, totals, out, rows, first, steps, epochs, batch, slots, width
    )
    return out
