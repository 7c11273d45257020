"""Layers that know about sample weights and keys; `Model` swaps them in for BatchNorm and Dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from perfed.core.errors import Problem
from perfed.core.functions import plain_draw


class Norm(nn.Module):
    """Normalise as BatchNorm does, but leave samples of weight 0 out (the filling of a block's partial last batch)."""

    running_mean: Tensor
    running_var: Tensor
    samples: Tensor

    def __init__(self, old: nn.modules.batchnorm._BatchNorm):
        super().__init__()
        if old.momentum is None or old.running_mean is None or old.running_var is None:
            raise Problem(
                "BatchNorm needs a momentum and running statistics: momentum=None averages over batches that a model "
                "between two rounds no longer knows of, and without statistics a prediction depends on its neighbours"
            )
        self.weight, self.bias, self.eps, self.momentum = old.weight, old.bias, old.eps, old.momentum
        self.register_buffer("running_mean", old.running_mean)
        self.register_buffer("running_var", old.running_var)
        self.register_buffer("samples", torch.ones(1), persistent=False)  # weights of the batch, given by Model.apply
        self.weighted = False  # whether `samples` counts; Model says so before a call

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            if torch.compiler.is_compiling():  # PyTorch's own would be run sample by sample there
                return self.by_hand(x, self.running_mean, self.running_var)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        per_sample = x[0, 0].numel()
        if not self.weighted and x.shape[0] * per_sample > 1:
            # cuDNN wants a gradient in the layout of x, which vmap cannot give; in three dimensions there is only one.
            batched = torch.compiler.is_compiling() or is_functorch_wrapped_tensor(x)
            rows = x.flatten(2) if x.dim() > 3 and batched else x
            statistics, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
            out = F.batch_norm(rows, *statistics, *affine, True, self.momentum, self.eps)
            return out if rows is x else out.view(x.shape)
        # By hand: weights, or a single value per channel (which PyTorch refuses: a client with one sample trains).
        weight = self.samples if self.weighted else torch.ones_like(x[:, 0].reshape(x.shape[0], -1)[:, 0])
        channel, dims = _per_channel(x), (0, *range(2, x.dim()))
        share = weight.reshape(-1, *(1,) * (x.dim() - 1))
        count = weight.sum() * per_sample
        mean = (x * share).sum(dims) / count
        var = ((x - mean.view(channel)) ** 2 * share).sum(dims) / count
        with torch.no_grad():
            unbiased = var * count / (count - 1).clamp_min(1)
            self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean.detach())
            self.running_var.mul_(1 - self.momentum).add_(self.momentum * unbiased.detach())
        return self.by_hand(x, mean, var)

    def by_hand(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Return x normalised with this mean and variance of each channel, then scaled and shifted."""
        channel = _per_channel(x)
        x = (x - mean.view(channel)) * (var.view(channel) + self.eps).rsqrt()
        return x if self.weight is None else x * self.weight.view(channel) + self.bias.view(channel)


def _per_channel(x: Tensor) -> tuple[int, ...]:
    """Return the shape in which one number per channel stands beside x."""
    return (1, -1, *(1,) * (x.dim() - 2))


class Drop(nn.Module):
    """Drop units as Dropout does, but drawn from the batch's key, so that every engine drops the same ones."""

    key: Tensor

    def __init__(self, p: float, salt: int, whole_channels: bool):
        super().__init__()
        self.p, self.salt, self.whole_channels = p, salt, whole_channels
        self.calls = 0  # in the current pass, set back by Model: a layer that is used twice drops other units
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)  # given by Model.apply

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        self.calls += 1
        keep = self._draw(x, shape) >= self.p
        return x * keep / (1 - self.p)

    def _draw(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a number in [0, 1) for every unit of x."""
        return plain_draw(x, self.key, self.salt, self.calls, shape)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _leave_as_they_are() -> None: ...


def swap(module: nn.Module) -> nn.Module:
    """Return the network with our Norm and Drop in place of BatchNorm and Dropout."""
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
                made[child] = child  # it stays, but counts: the units that are dropped depend on a Drop's number
            elif isinstance(child, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise Problem(f"the model uses {type(child).__name__}, which has no keyed form here: use Dropout")
            elif isinstance(child, nn.Embedding | nn.EmbeddingBag):
                if child.max_norm is not None:
                    raise Problem(f"{type(child).__name__} with max_norm writes over its weights when it is called")
                child.sparse = False  # all gradients are parts of one vector
            elif isinstance(child, nn.RNNBase):
                child.flatten_parameters = _leave_as_they_are  # they are views of theta, which must not be moved
            else:
                walk(child)

    root = nn.Sequential(module)  # so that a model that is itself a BatchNorm is swapped too
    walk(root)
    return root[0]
