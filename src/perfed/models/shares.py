"""Who has which network, where the networks of clients differ. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest
from perfed.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shares:
    """Hold what makes the networks of clients, and who has which.

    Attributes:
        makes: what makes each network, by its name.
        of: the number of each client's network.
    """

    makes: dict[str, Callable[[], nn.Module]]
    of: tuple[int, ...]

    def make(self, id: int) -> Callable[[], nn.Module]:
        """Return what makes a client's network."""
        return list(self.makes.values())[self.of[id]]

    def name(self, id: int) -> str:
        """Return the name of a client's network."""
        return list(self.makes)[self.of[id]]


def share(config: ModelConfig, clients: Sequence[str]) -> tuple[list[str], tuple[int, ...]]:
    """Say who has which network: clients that are named have theirs, the others are dealt theirs in turn.

    A client's own name goes before patterns, and of those the first that fits counts.

    Args:
        config: names the networks.
        clients: the clients' names.

    Returns:
        The networks' names, and the number of each client's.

    Example:
        >>> share(ModelConfig(networks="mlp,mlr", clients="north=lenet"), ["south", "west", "north", "east"])
        (['mlp', 'mlr', 'lenet'], (0, 1, 2, 1))
    """
    names, dealt, own = config.names, config.dealt, config.own
    for pattern in own:
        if pattern not in clients and not any(fnmatchcase(client, pattern) for client in clients):
            raise Problem(f"model.clients: no client is called '{pattern}'{nearest(pattern, clients)}")
    having = []
    for id, client in enumerate(clients):
        fitting = [name for pattern, name in own.items() if fnmatchcase(client, pattern)]
        having.append(own[client] if client in own else fitting[0] if fitting else dealt[id % len(dealt)])
    if nobody := [name for name in names if name not in having and name != config.name]:
        raise Problem(f"no client has the network '{nobody[0]}': there are {len(clients)} clients and {config.title}")
    names = [name for name in names if name in having]
    return names, tuple(names.index(name) for name in having)
