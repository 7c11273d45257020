"""The settings of the section `model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perfed.core.errors import Problem
from perfed.core.fields import checked, hyper


@dataclass(frozen=True)
class ModelConfig:
    """Say which network every client trains."""

    name: str = hyper("", "network: see `perfed list models`, or path.py:factory (default: what suits the data)")
    networks: str = hyper("", "networks that differ, dealt to clients in turn: mlp,lenet (default: all have one)")
    clients: str = hyper("", "networks of single clients, by name or pattern: north=mlp,ward_*=lenet")
    head: str = hyper("", "module that is the head (default: the last one with parameters)")
    hidden: int = hyper(64, "width of the hidden layer of 'mlp'", at_least=1, at_most=100_000)
    norm: Literal["batch", "group"] = hyper("group", "normalisation of 'resnet'")

    def __post_init__(self) -> None:
        object.__setattr__(self, "networks", _listed(self.networks))  # TOML has lists and tables, an option has text
        object.__setattr__(self, "clients", _paired(self.clients))
        checked(self, "model")
        if self.name and self.networks:
            raise Problem(f"model.name is '{self.name}' and model.networks '{self.networks}': set one of them")

    @property
    def dealt(self) -> list[str]:
        """Return the names of the networks that are dealt in turn, or of the one that all have."""
        return [name.strip() for name in self.networks.split(",") if name.strip()] or [self.name]

    @property
    def own(self) -> dict[str, str]:
        """Return the networks of single clients: name or pattern -> network."""
        pairs = [pair.partition("=") for pair in self.clients.split(",") if pair.strip()]
        return {pattern.strip(): name.strip() for pattern, _, name in pairs}

    @property
    def names(self) -> list[str]:
        """Return the names of all networks, each once."""
        return list(dict.fromkeys([*self.dealt, *self.own.values()]))

    @property
    def title(self) -> str:
        """Return what a run's networks are called for people."""
        return ", ".join(map(without_folder, self.names))

    def alone(self, name: str) -> ModelConfig:
        """Return these settings for one network that all clients have."""
        return replace(self, name=name, networks="", clients="")

    def renamed(self, change: Callable[[str], str]) -> ModelConfig:
        """Return these settings with another name for each network.

        Args:
            change: returns the new name.
        """
        dealt, own = (",".join(map(change, self.dealt)), {pattern: change(name) for pattern, name in self.own.items()})
        place = {"networks": dealt} if self.networks else {"name": dealt}
        return replace(self, clients=own, **place)


def without_folder(name: str) -> str:
    """Return the name of a network; of a user's own file without the folder that it is in."""
    path, colon, function = name.rpartition(":")
    return f"{Path(path).name}:{function}" if colon else name


def _listed(names: Any) -> Any:
    return ",".join(map(str, names)) if isinstance(names, list | tuple) else names


def _paired(table: Any) -> Any:
    """Return a table as text, as `clients` has it; what is neither is left for the check of types."""
    if not isinstance(table, dict):
        if isinstance(table, str) and any(pair.count("=") != 1 for pair in table.split(",") if pair.strip()):
            raise Problem(f"model.clients is written as client=network,client=network, not '{table}'")
        return table
    for pattern, name in table.items():
        if not isinstance(name, str):
            raise Problem(f"model.clients names a network for '{pattern}', not {name!r}")
        if any(sign in pattern + name for sign in ",="):
            raise Problem(f"model.clients cannot write ',' and '=' of '{pattern}': a pattern has ? in their place")
    return ",".join(f"{pattern}={name}" for pattern, name in table.items())
