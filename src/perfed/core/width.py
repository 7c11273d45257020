"""Networks of another width: which entries of theta the first units of every hidden layer have."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from perfed.core.errors import Problem
from perfed.core.layers import Norm
from perfed.core.model import Model, Part
from perfed.core.random import derive, uniform


def width_mask(model: Model, share: float) -> Tensor:
    """Return which entries of theta belong to a narrower network: the first units of each hidden layer.

    With 0 elsewhere the whole network computes what the narrow one does, and entries outside have nothing to do with
    it. That holds for linear layers, convolutions and BatchNorm one after another, with shortcuts around them.

    Args:
        model: the network, whose inputs are known, as they are from `init_server` on.
        share: how much of each hidden layer is kept, rounded up to whole units; 1 is everything.

    Returns:
        [width], True inside; the same tensor whenever it is asked for.
    """
    name = f"the first {share:g} of every layer"
    if name not in model._parts:
        model._parts[name] = Part(_mask(model, share))
    return model._parts[name].mask


def _mask(model: Model, share: float) -> Tensor:
    if not 0 < share <= 1:
        raise Problem(f"a network's width is a share above 0 and at most 1, not {share:g}")
    kept = lambda units: math.ceil(share * units - 1e-9)
    modules, rows, columns, units = dict(model._net.named_modules()), {}, {}, 0  # units: of the layer before
    for name in model.layers:
        layer = modules[name]
        if isinstance(layer, Norm):
            rows[name] = kept(len(layer.running_mean))
            continue
        weight = getattr(layer, "weight", None)
        plain = isinstance(layer, nn.Linear) or (isinstance(layer, _ConvNd) and not layer.transposed)
        groups = getattr(layer, "groups", 1)
        if not plain or weight is None or groups not in (1, len(weight)):
            raise Problem(f"the layer '{name}' ({type(layer).__name__}) cannot be made narrower")
        inside = weight.shape[1]
        if not units or groups > 1:
            columns[name] = inside  # of the samples, or of each channel by itself
        elif isinstance(layer, nn.Linear) and inside % units == 0:
            columns[name] = kept(units) * (
                inside // units
            )  # all pixels of a channel, where they were laid out in a row
        else:
            columns[name] = kept(inside)
        rows[name] = len(weight) if name == model.layers[-1] else kept(len(weight))
        units = len(weight)
    masks, dropped = [], []
    for name, shape in model.shapes.items():
        layer = name.rpartition(".")[0]
        row = torch.arange(shape[0]) < rows[layer] if shape else torch.ones((), dtype=torch.bool)
        row = row.view(-1, *(1,) * (len(shape) - 1)).expand(shape)
        column = torch.arange(shape[1]) < columns[layer] if len(shape) > 1 else torch.ones((), dtype=torch.bool)
        column = column.view(-1, *(1,) * (len(shape) - 2)) if len(shape) > 1 else column
        masks.append((row & column).flatten())
        dropped.append((~row).flatten())
    filled = lambda parts: torch.cat([*parts, torch.zeros(model.width - model.size, dtype=torch.bool)]).to(model.device)
    mask = filled(masks)
    _refuse_readers(model, mask, filled(dropped))
    return mask


def _refuse_readers(model: Model, mask: Tensor, dropped: Tensor) -> None:
    """Refuse a network whose kept units read those that were dropped: its layers are joined in another way."""
    draw = lambda place, *shape: uniform(derive(place), shape, model.dtype).to(model.device)
    theta = torch.where(mask, model.init(0), 0)
    other = torch.where(dropped & model.weights.mask, draw(1, model.width), theta)
    x = draw(2, 2, *(model.inputs or ()))
    x = x.long() if model.tokens else x
    if not torch.allclose(*(model.apply(each, x)[0] for each in (theta, other)), rtol=1e-4, atol=1e-6):
        raise Problem(
            "the network cannot be made narrower: its layers are joined in a way that width_mask does not know"
        )
