"""A block of a network at a smaller width: the first channels of its own weights, not a second network."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.core.errors import Problem
from perfed.core.layers import Drop, Norm, swap

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def narrow(channels: int, omega: float) -> int:
    """Return the number of a layer's channels that are left at width omega; at least one.

    >>> narrow(64, 0.25), narrow(3, 0.1)
    (16, 1)
    """
    return max(1, round(channels * omega))


class _Slim(nn.Module):
    """A layer that has no numbers of its own: it reads those of `full` when it runs."""

    def __init__(self, full: nn.Module):
        super().__init__()
        self._full = (full,)  # in a tuple, or it would be a part of this module and its numbers would count twice

    @property
    def full(self) -> Any:
        """The layer at its full width."""
        return self._full[0]


class SlimConv(_Slim):
    """The first input and output channels of a convolution."""

    def __init__(self, full: Any, omega: float):
        super().__init__(full)
        self.out = narrow(full.out_channels, omega)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.full.bias is None else self.full.bias[: self.out]
        return self.full._conv_forward(x, self.full.weight[: self.out, : x.shape[1]], bias)


class SlimGroupNorm(_Slim):
    """The first groups of a GroupNorm, each as large as it was."""

    def __init__(self, full: nn.GroupNorm, omega: float):
        super().__init__(full)
        each, left = full.num_channels // full.num_groups, narrow(full.num_channels, omega)
        if left % each:
            raise Problem(f"a width of {omega:g} cuts a group of {each} of {full.num_channels} normalised channels")
        self.groups = left // each

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if t is None else t[: x.shape[1]] for t in (self.full.weight, self.full.bias))
        return F.group_norm(x, self.groups, weight, bias, self.full.eps)


class SlimNorm(_Slim):
    """The first channels of a BatchNorm, always with the statistics of the batch; the running ones stay as they are."""

    def forward(self, x: Tensor) -> Tensor:
        full, pixels = self.full, x.reshape(*x.shape[:2], -1)
        share = full.samples if full.weighted else torch.ones_like(pixels[:, 0, 0])
        share = (share / share.sum()).view(-1, 1)
        mean = (share * pixels.mean(2)).sum(0).view(1, -1, 1)
        var = (share * ((pixels - mean) ** 2).mean(2)).sum(0).view(1, -1, 1)
        pixels = (pixels - mean) * (var + full.eps).rsqrt()
        if full.weight is not None:
            pixels = pixels * full.weight[: x.shape[1], None] + full.bias[: x.shape[1], None]
        return pixels.reshape(x.shape)


def _slim(layer: nn.Module, omega: float, block: str) -> nn.Module:
    if isinstance(layer, CONVOLUTIONS) and layer.groups == 1:
        return SlimConv(layer, omega)
    if isinstance(layer, nn.GroupNorm):
        return SlimGroupNorm(layer, omega)
    if isinstance(layer, Norm):
        return SlimNorm(layer)
    kind = type(layer).__name__ + (" with groups" if isinstance(layer, CONVOLUTIONS) else "")
    raise Problem(f"block '{block}' holds a {kind}: only convolutions, BatchNorm and GroupNorm run at another width")


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(part, CONVOLUTIONS) for part in module.modules())


def last_block(net: nn.Module, head: str) -> str:
    """Return the name of the last module with convolutions before the head.

    Where all convolutions lie in one module, the search goes on inside of it.

    Args:
        net: the network.
        head: the name of its head.
    """
    name, module = "", net
    while True:
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
        inside = [(key, child) for key, child in children if key != head and _convolves(child)]
        if not inside:
            return name
        name, module = inside[-1]
        if len(inside) > 1:
            return name


class TwoWidths(nn.Module):
    """A network that returns its output, then (input, output) of one block, then those of the block at width omega.

    The second pass of the block is without dropout; neither pass hands a gradient to what comes before it.
    """

    def __init__(self, net: nn.Module, block: str, omega: float):
        super().__init__()
        self.net, self.omega, self.seen = swap(net), omega, []
        full = self.net.get_submodule(block)
        slim = {id(m): _slim(m, omega, block) for m in full.modules() if m._parameters or isinstance(m, nn.GroupNorm)}
        drops: dict[int, nn.Module] = {id(m): nn.Identity() for m in full.modules() if isinstance(m, Drop)}
        self.slim = copy.deepcopy(full, slim | drops)  # a copy with other layers where those ids stand
        full.register_forward_hook(self._look)

    def _look(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.append((inputs[0], output))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        self.seen = []
        logits, (t_in, t_out) = self.net(x), self.seen[-1]
        self.seen = []
        s_in = t_in[:, : narrow(t_in.shape[1], self.omega)].detach()
        return logits, (t_in.detach(), t_out.detach()), (s_in, self.slim(s_in))
