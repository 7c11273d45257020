"""Kernels as operators of PyTorch, with rules for autograd and `vmap`.

The network and the method are written for one client; `vmap(grad(...))` reaches the rules here with the whole block,
and they call the kernels. The layers in `cohort_layers` call these operators; everything else, and every machine
without Triton, takes PyTorch's own path, which is also what the tests compare with.
"""

# Rules name their arguments, where PyTorch's take any.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perfed.accel.kernels import hash, loss, norm
from perfed.accel.kernels.conv import Layer, backward, forward

# Operators, not plain functions, so that a traced step holds them as single nodes.
_LIBRARY = torch.library.Library("perfed", "DEF")
_LIBRARY.define("conv(Tensor x, Tensor w, Tensor? b, int[] layer) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "conv_grad(Tensor g, Tensor x, Tensor taps, Tensor y, Tensor which, int[] layer, int[] channels, bool bias,"
    " bool need) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("group_norm(Tensor x, Tensor w, Tensor b, int groups, float eps) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "group_norm_grad(Tensor g, Tensor x, Tensor w, Tensor mean, Tensor scale, int groups) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("uniform(Tensor key, int first, int second, int count) -> Tensor")
for _name in ("cross_entropy", "binary_cross_entropy", "squared_error"):
    _LIBRARY.define(f"{_name}(Tensor out, Tensor y) -> Tensor")
    _LIBRARY.define(f"{_name}_grad(Tensor out, Tensor y, Tensor g) -> Tensor")


def _layer(numbers: list[int]) -> Layer:
    kernel, stride, padding, relu, pool, flat = numbers
    return Layer(kernel, stride, padding, bool(relu), pool, bool(flat))


def _op_conv(x: Tensor, w: Tensor, b: Tensor | None, layer: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return forward(x, w, b, _layer(layer))


def _op_conv_grad(
    g: Tensor, x: Tensor, taps: Tensor, y: Tensor, which: Tensor, layer: list[int], channels: list[int], bias: bool,
    need: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(g, x, taps, y, which, _layer(layer), (channels[0], channels[1]), bias, need)


_FUNCTIONS = {
    "uniform": hash.uniform_rows,
    "conv": _op_conv,
    "conv_grad": _op_conv_grad,
    "group_norm": norm.normalise,
    "group_norm_grad": norm.normalise_grad,
    "cross_entropy": loss.loss,
    "cross_entropy_grad": loss.loss_grad,
    "binary_cross_entropy": partial(loss.mean_loss, kind=loss.LOGITS),
    "binary_cross_entropy_grad": partial(loss.mean_loss_grad, kind=loss.LOGITS),
    "squared_error": partial(loss.mean_loss, kind=loss.SQUARES),
    "squared_error_grad": partial(loss.mean_loss_grad, kind=loss.SQUARES),
}
for _name, _function in _FUNCTIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


def _rows(count: int, dims: Any, *tensors: Tensor | None) -> list[Any]:
    """Return each tensor with the clients as its first axis."""
    return [
        t if t is None else t.movedim(d, 0) if d is not None else t.expand(count, *t.shape)
        for t, d in zip(tensors, dims, strict=False)
    ]


def _in_one_block(name: str) -> None:
    """Give an operator a rule for a client's own vmap, over several models: the rows of all clients are one block."""
    operator = getattr(torch.ops.perfed, name).default

    def rule(info: Any, dims: Any, *args: Any) -> Any:
        rows = lambda t, d: _rows(info.batch_size, (d,), t)[0].flatten(0, 1) if isinstance(t, Tensor) else t
        out = operator(*map(rows, args, dims))
        apart = lambda t: t.unflatten(0, (info.batch_size, -1))
        return (apart(out), 0) if isinstance(out, Tensor) else (tuple(map(apart, out)), (0,) * len(out))

    torch.library.register_vmap(f"perfed::{name}", rule, lib=_LIBRARY)


for _name in _FUNCTIONS:
    _in_one_block(_name)


class _ForBlocks(torch.autograd.Function):
    """Stand for an operation of a whole block; a single client takes PyTorch's own path."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*args: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("a block's kernel was called for a single client")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("second derivatives need PyTorch's own layers")


class _Conv(_ForBlocks):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b, layer = inputs
        y, which, taps = output
        ctx.save_for_backward(x, taps, y, which)
        ctx.layer, ctx.channels, ctx.bias = layer, tuple(w.shape[:2]), b is not None
        ctx.mark_non_differentiable(which, taps)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        x, taps, y, which = ctx.saved_tensors
        need = ctx.needs_input_grad[0]
        dx, dw, db = _ConvGrad.apply(g, x, taps, y, which, ctx.layer, ctx.channels, ctx.bias, need)
        return dx if need else None, dw, db if ctx.bias else None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, b: Tensor | None, layer: tuple[int, ...]) -> Any:
        x, w, b = _rows(info.batch_size, dims, x, w, b)
        return torch.ops.perfed.conv(x, w, b, list(layer)), (0, 0, 0)


class _ConvGrad(_ForBlocks):
    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        *tensors, layer, channels, bias, need = args
        tensors = _rows(info.batch_size, dims, *tensors)
        return torch.ops.perfed.conv_grad(*tensors, list(layer), list(channels), bias, need), (0, 0, 0)


class _GroupNorm(_ForBlocks):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, _, ctx.groups, _ = inputs
        ctx.save_for_backward(x, w, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        x, w, mean, scale = ctx.saved_tensors
        return *_GroupNormGrad.apply(g, x, w, mean, scale, ctx.groups), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Any:
        return torch.ops.perfed.group_norm(*_rows(info.batch_size, dims, x, w, b), groups, eps), (0, 0, 0)


class _GroupNormGrad(_ForBlocks):
    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        *tensors, groups = args
        return torch.ops.perfed.group_norm_grad(*_rows(info.batch_size, dims, *tensors), groups), (0, 0, 0)


class _Uniform(_ForBlocks):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, dims: Any, key: Tensor, first: int, second: int, count: int) -> Any:
        return torch.ops.perfed.uniform(*_rows(info.batch_size, dims, key), first, second, count), 0


def _loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of each sample of one client, inside vmap, from outputs and labels."""
    operator, gradient = getattr(torch.ops.perfed, name), getattr(torch.ops.perfed, f"{name}_grad")

    class Gradient(_ForBlocks):
        @staticmethod
        def vmap(info: Any, dims: Any, out: Tensor, y: Tensor, g: Tensor) -> Any:
            return gradient(*_rows(info.batch_size, dims, out, y, g)), 0

    class Loss(_ForBlocks):
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return Gradient.apply(*ctx.saved_tensors, g), None

        @staticmethod
        def vmap(info: Any, dims: Any, out: Tensor, y: Tensor) -> Any:
            return operator(*_rows(info.batch_size, dims, out, y)), 0

    return Loss.apply


cross_entropy = _loss("cross_entropy")  # logits [n, classes] and classes [n] to [n]
binary_cross_entropy = _loss("binary_cross_entropy")  # logits and labels [n, labels] to [n], their mean
squared_error = _loss("squared_error")  # outputs and targets [n, targets] to [n], their mean


def conv(x: Tensor, w: Tensor, b: Tensor | None, layer: Layer) -> Tensor:
    """Run a convolution layer for one client, inside vmap."""
    return _Conv.apply(x, w, b, tuple(int(n) for n in layer))[0]


def group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    """Run GroupNorm for one client, inside vmap."""
    return _GroupNorm.apply(x, w, b, groups, eps)[0]


def uniform(key: Tensor, first: int, second: int, count: int) -> Tensor:
    """Return `random.uniform` of a derived key for one client, inside vmap."""
    return _Uniform.apply(key, first, second, count)
