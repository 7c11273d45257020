"""Layers that run a whole cohort in one kernel under vmap, and do what PyTorch does everywhere else.

Each is a subclass of the layer that it stands for. It has one question to ask, whether it is `batched` in a way that
kernels know; that it may use kernels at all was decided when its network was made.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor

from perfed.accel import operators
from perfed.accel.fused_layers import Conv
from perfed.accel.kernels import conv, norm
from perfed.core.functions import plain_draw
from perfed.core.layers import Drop, Norm
from perfed.core.task import Losses

MOST_CHANNELS = 128  # of a convolution: more do not fit into a program's memory


def batched(*tensors: Tensor) -> bool:
    """Return True if these are float32 numbers of a cohort under vmap, so that its kernels may run."""
    if tensors[0].dtype != torch.float32 or not any(map(is_functorch_wrapped_tensor, tensors)):
        return False
    # A derivative through a client's own vmap: kernels know theirs inside the innermost vmap alone.
    kinds = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    maps = [place for place, kind in enumerate(kinds) if kind == TransformType.Vmap]
    return bool(maps) and not {TransformType.Grad, TransformType.Jvp} & set(kinds[: maps[-1]])


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (operators if batched(out) else Losses).cross_entropy(out, y)


def binary_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (operators if batched(out) else Losses).binary_cross_entropy(out, y)


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample."""
    return (operators if batched(out) else Losses).squared_error(out, y)


class CohortConv(Conv):
    """Run a fused convolution."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self._layer(x) if batched(x, self.weight) else None
        return super().forward(x) if layer is None else operators.conv(x, self.weight, self.bias, layer)

    def _layer(self, x: Tensor) -> conv.Layer | None:
        """Describe this layer to the kernels; None where they do not cover it."""
        high, wide = self.weight.shape[-2:]
        square = high == wide and self.stride[0] == self.stride[1] and self.padding[0] == self.padding[1]
        if not square or self.groups != 1 or self.dilation != (1, 1) or x.dim() != 4:
            return None
        channels = max(self.weight.shape[:2])
        if channels > MOST_CHANNELS or x.shape[0] * x.shape[2] * x.shape[3] * channels >= 2**31:
            return None  # more than a program's memory, or its whole numbers, can hold
        pool = {None: conv.NONE, "max": conv.MAX, "avg": conv.AVG}[self.pool]
        layer = conv.Layer(high, self.stride[0], self.padding[0], self.relu, pool, self.flat)
        left = min(layer.pooled(x.shape[2]), layer.pooled(x.shape[3]))
        return layer if left >= 1 else None  # PyTorch has words for an image that is too small


class CohortNorm(Norm):
    """Run a BatchNorm; in evaluation by hand, because PyTorch asks for a layout, which vmap cannot tell it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not batched(x):
            return super().forward(x)
        return self.by_hand(x, self.running_mean, self.running_var)


def draw(like: Tensor, key: Tensor, salt: int, call: int, shape: tuple[int, ...]) -> Tensor:
    """Do what `functions.plain_draw` does, in one launch."""
    if not batched(like, key):
        return plain_draw(like, key, salt, call, shape)
    return operators.uniform(key, salt, call, math.prod(shape)).reshape(shape)


class CohortDrop(Drop):
    """Run a dropout whose numbers are drawn in one launch."""

    def _draw(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return draw(x, self.key, self.salt, self.calls, shape)


class CohortGroupNorm(nn.GroupNorm):
    """Run a GroupNorm in one kernel, in the layout of the convolutions around it."""

    def forward(self, input: Tensor) -> Tensor:
        covered = self.affine and batched(input, self.weight) and input.dim() == 4
        if not covered or not norm.can_normalise(self.num_groups, *input.shape[1:]):
            return super().forward(input)
        return operators.group_norm(input, self.weight, self.bias, self.num_groups, self.eps)


COHORT: dict[type[nn.Module], type[nn.Module]] = {
    Conv: CohortConv,
    Norm: CohortNorm,
    Drop: CohortDrop,
    nn.GroupNorm: CohortGroupNorm,
}


def use_kernels(net: nn.Module) -> None:
    """Let the layers of a network run cohorts in kernels; each stays the object that it is, with names and hooks."""
    for module in net.modules():
        if type(module) in COHORT:
            module.__class__ = COHORT[type(module)]
