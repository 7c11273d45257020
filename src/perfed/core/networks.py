"""Networks that differ between clients: which there are, and who has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from perfed.core.errors import Problem
from perfed.core.model import Model


@dataclass(frozen=True, eq=False)
class Networks:
    """Hold the networks of a run's clients, all with theta of one width: every client's tensors have the same form.

    Attributes:
        names: one for each network.
        models: one for each network.
        of: the number of each client's network.

    Example:
        >>> from perfed.contract.toy import norm_net, plain_net
        >>> networks = Networks.of_one_width({"plain": plain_net, "norm": norm_net}, of=[0, 1, 0])
        >>> [(model.size, model.width) for model in networks.models]
        [(83, 116), (115, 116)]
    """

    names: tuple[str, ...]
    models: tuple[Model, ...]
    of: tuple[int, ...]

    @classmethod
    def of_one_width(cls, builds: Mapping[str, Callable[[], nn.Module]], of: Sequence[int], **options: Any) -> Networks:
        """Make models of several networks, all as wide as the widest.

        Args:
            builds: what makes each network, by name.
            of: the number of each client's network.
            options: those of every Model.
        """
        models = [Model(build, **options) for build in builds.values()]
        width = max(model.width for model in models)
        padded = [model if model.width == width else Model(model.build, width=width, **options) for model in models]
        return cls(tuple(builds), tuple(padded), tuple(of))

    def __post_init__(self) -> None:
        first = self.models[0]
        for model in self.models:
            if (model.width, model.dtype, model.device) != (first.width, first.dtype, first.device):
                raise Problem(
                    "networks of one run need theta of one width and type, on one device: Networks.of_one_width"
                )
        if len(self.names) != len(self.models) or not {*self.of} <= {*range(len(self.models))}:
            raise Problem(
                f"{len(self.names)} networks have the numbers 0 to {len(self.names) - 1}, in `of` and by name"
            )

    @cached_property
    def where(self) -> Tensor:
        """[clients], the number of each one's network, on the device of the models."""
        return torch.tensor(self.of, dtype=torch.int64, device=self.models[0].device)

    def members(self, number: int, ids: Sequence[int]) -> list[int]:
        """Return the places in `ids` of the clients that have a network."""
        return [place for place, id in enumerate(ids) if self.of[id] == number]
