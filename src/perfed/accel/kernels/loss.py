"""Cross-entropy of a whole cohort and its gradient, for the last layer."""

# Kernels are called through brackets with plain numbers.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.accel.kernels import next_two


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
