"""Seeds: the few samples that clients send of classes which are rare with them, and what fills these classes up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.core.messages import Up
from perfed.core.model import Batch
from perfed.core.random import derive, normal, uniform

LAST = 2.0  # behind all draws, which are below 1


def drawn(batch: Batch, classes: int, noise: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what a function of `map` draws for each sample.

    Args:
        batch: the samples.
        classes: how many there are.
        noise: shape of the normal numbers of a sample.

    Returns:
        The samples `x`; `of`, 1 at a sample's class; `draw`, below 1; `cover`, a number for each class, alike
        for all samples; `noise`.
    """
    assert batch.index is not None  # a map says them
    keys, cover = derive(batch.key, 1, batch.index), uniform(derive(batch.key, 2), (classes,))
    each = {"x": batch.x, "of": F.one_hot(batch.y, classes), "cover": cover.expand(len(batch.y), -1)}
    return each | {"draw": uniform(derive(keys, 1), ()), "noise": normal(derive(keys, 2), noise, batch.x.dtype)}


def gathered(mine: dict[str, Tensor], few: float, k: int, r: int) -> Up:
    """Return a client's message: samples of its target classes and of others that cover which these are.

    A class is a target where a client has some of it, but less than `few` of an even part.

    Args:
        mine: what a map over `drawn` returned.
        few: see above.
        k: samples of a class; those that there are, where there are fewer.
        r: other classes; none where there is no target.

    Returns:
        In `mean` the share of targets among the classes that are sent; in `own` the samples [k, classes, ...], and
        which of them are `real`, and no filling.
    """
    c = mine["of"].sum(0)
    target = (c > 0) & (c < few * c.sum() / len(c))
    other = (c > 0) & ~target
    order = torch.where(other, mine["cover"][0], LAST).argsort().argsort()
    sent = target | (other & (order < r) & target.any())
    draws = torch.where(mine["of"] > 0, mine["draw"][:, None], LAST)
    draws, rows = draws.topk(min(k, len(draws)), 0, largest=False)
    real, x = (draws < LAST) & sent, mine["x"][rows]
    x = torch.where(real.reshape(*real.shape, *(1,) * (x.dim() - 2)), x, 0)
    return Up(mean=(target.sum() / sent.sum().clamp_min(1)).to(x.dtype), weight=1.0, own={"x": x, "real": real})


def filling(of: Tensor, known: Tensor, ratio: float, places: int) -> tuple[Tensor, Tensor]:
    """Return the classes of samples that bring each class to as many as a client's largest one has.

    Args:
        of: 1 at each sample's class [samples, classes].
        known: the classes of which some can be made [classes].
        ratio: how many may join, for each sample of the client; where more are wanted, each class gets its share.
        places: samples that may join anybody.

    Returns:
        [places], the classes; and [places], which of these samples join.
    """
    c = of.sum(0)
    wanted = torch.where(known, c.max() - c, 0).double()
    most = (ratio * c.sum()).floor()
    end = (wanted * (most / wanted.sum().clamp_min(1)).clamp_max(1)).cumsum(0).round()
    place = torch.arange(places, device=of.device)
    return (place[:, None] >= end).sum(1).clamp_max(len(c) - 1), place < end[-1]
