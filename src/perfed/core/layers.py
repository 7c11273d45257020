"""Layers that know about sample weights and keys; `Model` swaps them in for BatchNorm and Dropout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.accel.fast import covered
from perfed.core.errors import Problem
from perfed.core.random import derive, uniform


class Norm(nn.Module):
    """BatchNorm whose statistics ignore samples of weight 0 (the filling of a block's partial last batch)."""

    running_mean: Tensor
    running_var: Tensor
    samples: Tensor

    def __init__(self, old: nn.modules.batchnorm._BatchNorm):
        super().__init__()
        if old.momentum is None or old.running_mean is None or old.running_var is None:
            raise Problem("BatchNorm must have a momentum and running statistics")
        self.weight, self.bias, self.eps, self.momentum = old.weight, old.bias, old.eps, old.momentum
        self.register_buffer("running_mean", old.running_mean)
        self.register_buffer("running_var", old.running_var)
        self.register_buffer("samples", torch.ones(1), persistent=False)  # weights of the batch, given by Model.apply
        self.weighted = False  # whether this copy of the network is the one for weighted batches

    def forward(self, x: Tensor) -> Tensor:
        channel, dims = (1, -1, *(1,) * (x.dim() - 2)), (0, *range(2, x.dim()))
        if not self.training and not covered(x):
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if not self.training:  # by hand: PyTorch asks for a layout, which vmap cannot tell it
            return self._by_hand(x, self.running_mean, self.running_var, channel)
        per_sample = x[0, 0].numel()
        if not self.weighted and x.shape[0] * per_sample > 1:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
            )
        # By hand: weights, or a single value per channel (which PyTorch refuses: a client with one sample trains).
        weight = self.samples if self.weighted else torch.ones_like(x[:, 0].reshape(x.shape[0], -1)[:, 0])
        share = weight.reshape(-1, *(1,) * (x.dim() - 1))
        count = weight.sum() * per_sample
        mean = (x * share).sum(dims) / count
        var = ((x - mean.view(channel)) ** 2 * share).sum(dims) / count
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp_min(1)
            self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean.detach())
            self.running_var.mul_(1 - self.momentum).add_(self.momentum * unbiased.detach())
        return self._by_hand(x, mean, var, channel)

    def _by_hand(self, x: Tensor, mean: Tensor, var: Tensor, channel: tuple[int, ...]) -> Tensor:
        x = (x - mean.view(channel)) * (var.view(channel) + self.eps).rsqrt()
        return x if self.weight is None else x * self.weight.view(channel) + self.bias.view(channel)


class Drop(nn.Module):
    """Dropout drawn from the batch's key, so that every engine drops the same units."""

    key: Tensor

    def __init__(self, p: float, salt: int, whole_channels: bool):
        super().__init__()
        self.p, self.salt, self.whole_channels = p, salt, whole_channels
        self.calls = 0  # in the current pass; Model resets it: a layer that is used twice must not drop the same units
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)  # given by Model.apply

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        self.calls += 1
        if covered(x, self.key):
            from perfed.accel import operators

            keep = operators.uniform(self.key, self.salt, self.calls, math.prod(shape)).reshape(shape) >= self.p
        else:
            keep = uniform(derive(self.key, self.salt, self.calls), shape, x.dtype) >= self.p
        return x * keep / (1 - self.p)


class Groups(nn.GroupNorm):
    """GroupNorm, which a block of clients does in one kernel, in the layout of the convolutions around it."""

    def __init__(self, old: nn.GroupNorm):
        super().__init__(old.num_groups, old.num_channels, old.eps, affine=False)
        self.affine, self.weight, self.bias = old.affine, old.weight, old.bias

    def forward(self, input: Tensor) -> Tensor:
        if self.affine and covered(input, self.weight) and input.dim() == 4:
            from perfed.accel import kernels, operators

            if kernels.can_normalise(self.num_groups, *input.shape[1:]):
                return operators.group_norm(input, self.weight, self.bias, self.num_groups, self.eps)
        return super().forward(input)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def swap(module: nn.Module) -> nn.Module:
    """The same network with our Norm, Drop and Groups in place of BatchNorm, Dropout and GroupNorm."""
    made: dict[nn.Module, nn.Module] = {}  # a module may stand in several places and stays one module

    def walk(parent: nn.Module) -> None:
        for name, child in list(parent._modules.items()):  # named_children() would skip the second place
            if child is None:
                continue
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                parent._modules[name] = made.setdefault(child, Norm(child))
            elif isinstance(child, _DROPOUT):
                drop = made.get(child) or Drop(child.p, len(made) + 1, not isinstance(child, nn.Dropout))
                parent._modules[name] = made[child] = drop
            elif type(child) is nn.GroupNorm and not (child._forward_hooks or child._forward_pre_hooks):
                parent._modules[name] = made.setdefault(child, Groups(child))
            elif isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise Problem(f"the model uses {type(child).__name__}, which has no keyed form here: use Dropout")
            else:
                walk(child)

    root = nn.Sequential(module)  # so that a model that is itself a BatchNorm is swapped too
    walk(root)
    return root[0]
