"""Losses of a whole cohort and their gradients, for the last layer: cross-entropy, and means over a row's outputs."""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.kernels import next_two

SQUARES, LOGITS = False, True  # squared error, or binary cross-entropy of logits


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
    """Return the loss of each sample, from logits [..., classes]."""
    z = logits.contiguous()
    out = z.new_empty(y.shape)
    K = z.shape[-1]
    _loss[(y.numel(),)](z, y.contiguous(), out, K, next_two(K), num_warps=1)
    return out


def loss_grad(logits: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of the logits, where each sample's loss has gradient g."""
    z = logits.contiguous()
    out, K = torch.empty_like(z), z.shape[-1]
    _loss_grad[(y.numel(),)](z, y.contiguous(), g.contiguous(), out, K, next_two(K), num_warps=1)
    return out


@triton.jit
def _mean_loss(out, y, loss, K, BK: tl.constexpr, KIND: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    z = tl.load(out + r * K + k, mask=k < K, other=0.0)
    t = tl.load(y + r * K + k, mask=k < K, other=0.0)
    if KIND:
        e = tl.exp(-tl.abs(z))
        u = 1.0 + e
        log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))  # log(1 + e), e however small
        each = tl.where(k < K, tl.where(z < 0.0, 0.0, z) - z * t + log, 0.0)
    else:
        each = (z - t) * (z - t)
    tl.store(loss + r, tl.sum(each, axis=0) / K)


@triton.jit
def _mean_loss_grad(out, y, g, into, K, BK: tl.constexpr, KIND: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BK)
    z = tl.load(out + r * K + k, mask=k < K, other=0.0)
    t = tl.load(y + r * K + k, mask=k < K, other=0.0)
    if KIND:
        e = tl.exp(-tl.abs(z))
        d = tl.where(z < 0.0, e, 1.0) / (1.0 + e) - t
    else:
        d = 2.0 * (z - t)
    tl.store(into + r * K + k, d * (tl.load(g + r) / K), mask=k < K)


def mean_loss(out: Tensor, y: Tensor, kind: bool) -> Tensor:
    """Return the loss of each sample, the mean over its outputs.

    Args:
        out: outputs [..., outputs].
        y: labels of the same shape and type.
        kind: SQUARES or LOGITS.
    """
    z = out.contiguous()
    loss = z.new_empty(z.shape[:-1])
    _mean_loss[(loss.numel(),)](z, y.contiguous(), loss, z.shape[-1], next_two(z.shape[-1]), kind, num_warps=1)
    return loss


def mean_loss_grad(out: Tensor, y: Tensor, g: Tensor, kind: bool) -> Tensor:
    """Return the gradient of the outputs, where each sample's loss has gradient g."""
    z = out.contiguous()
    into, K = torch.empty_like(z), z.shape[-1]
    _mean_loss_grad[(g.numel(),)](z, y.contiguous(), g.contiguous(), into, K, next_two(K), kind, num_warps=1)
    return into
