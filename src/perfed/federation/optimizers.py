"""Optimisers at the server: what becomes of the mean of clients' changes before a method adds it to its model.

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification. 2019
(FedAvgM), https://arxiv.org/abs/1909.06335
Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization. ICLR 2021, Algorithm 2
(FedAdagrad, FedYogi, FedAdam), https://arxiv.org/abs/2003.00295

As in Algorithm 2 there is no correction of a bias at the start, where m is 0 and v is tau^2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.messages import Cohort
from perfed.core.method import Method
from perfed.core.tree import flatten, leaves, unflatten
from perfed.engines.base import by_row

Moments = dict[str, list[Tensor]]  # "m", and "v" of those that adapt: for each change in `Cohort.mean`


@dataclass(frozen=True)
class ServerOptimizer:
    """Turn the mean change of a model into a server's step.

    Attributes:
        kind: momentum (FedAvgM) or one of those that adapt.
        rate: learning rate of the server.
        momentum: share of the last direction that is kept, beta_1 of those that adapt.
        beta2: share of the second moment that adam and yogi keep.
        tau: what is added to the root of the second moment.
    """

    kind: Literal["momentum", "adam", "yogi", "adagrad"]
    rate: float
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def moments(self, method: Method, cohort: Cohort, known: Moments) -> Moments:
        """Return the moments before a step: those that are known, or the first ones where a mean has another form."""
        changes = [mean for mean in leaves(cohort.mean) if learned(method, mean) is not None]
        if not changes and method.context.phase:  # a kind of round of its own, which may send something else
            return known
        if not changes:
            raise Problem(
                f"run.server_optimizer finds no change of a model in the Up.mean of {type(method).__name__}: a tensor "
                f"of {method.model.width} numbers (theta's), or of as many as the part has that its `sent` returns"
            )
        first: Moments = {"m": [torch.zeros_like(change) for change in changes]}
        if self.kind != "momentum":
            first["v"] = [torch.full_like(change, self.tau**2) for change in changes]
        form = lambda moments: {name: [tensor.shape for tensor in each] for name, each in moments.items()}
        return known if form(known) == form(first) else first

    def step(self, method: Method, cohort: Cohort, moments: Moments) -> tuple[Cohort, Moments]:
        """Put the server's steps in the place of changes.

        Running statistics, and all else that is no change of a weight, stay plain means. A group that nobody was in
        has neither a step nor new moments.

        Args:
            method: whose mean it is.
            cohort: the means.
            moments: those before this step, see `moments`.

        Returns:
            The cohort that `aggregate` is given, and the moments after the step.
        """
        means, form = flatten(cohort.mean)
        masks = [(place, mask) for place, mean in enumerate(means) if (mask := learned(method, mean)) is not None]
        if not masks:
            return cohort, moments
        totals = [cohort.weight] * len(means) if isinstance(cohort.weight, Tensor) else leaves(cohort.weight)
        out: Moments = {name: [] for name in moments}
        for (place, weights), *before in zip(masks, *moments.values(), strict=True):
            mean, used = means[place], totals[place] > 0
            grouped = method.groups > 1 and used.shape == mean.shape[:1]
            used = by_row(used, mean) if grouped and mean.dim() > 1 else used
            change, after = self._stepped(torch.where(weights, mean, 0.0), *before)
            means[place] = torch.where(weights & used, change, mean)
            for name, new, old in zip(moments, after, before, strict=True):
                out[name].append(torch.where(used, new, old))
        return replace(cohort, mean=unflatten(means, form)), out

    def _stepped(self, delta: Tensor, m: Tensor, v: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        if v is None:
            m = self.momentum * m + delta
            return self.rate * m, (m,)
        m, square = self.momentum * m + (1 - self.momentum) * delta, delta**2
        if self.kind == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        elif self.kind == "yogi":
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        else:
            v = v + square
        return self.rate * m / (v.sqrt() + self.tau), (m, v)


def learned(method: Method, mean: Tensor) -> Tensor | None:
    """Return which numbers of a mean are changes of weights; None: it is no change of theta or of a part of it."""
    weights, numbers = method.model.weights.mask, mean.shape[-1] if mean.dim() else 0
    if method.context.networks is not None:  # such a mean has a row for each of them
        masks = torch.stack([model.weights.mask for model in method.networks])
        return masks if mean.shape == masks.shape else None
    if numbers == method.model.width:
        return weights
    return weights[method.sent.index] if numbers == len(method.sent.index) else None
