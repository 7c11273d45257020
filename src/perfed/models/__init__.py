"""The networks clients train, one file each. Importing this does not import torch.

A network is added by writing its file. The docstring begins `Title: what it is.`, and the file defines
`network(shape, classes, config) -> nn.Module`: it returns logits [batch, classes], and its classifier is called `head`.
For other tasks `classes` is the number of labels, targets or tokens; of tokens [length] comes [batch, length, tokens].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest
from perfed.discover import load_member, members
from perfed.models.config import ModelConfig, without_folder
from perfed.models.shares import Shares, share

if TYPE_CHECKING:
    from torch import nn

    from perfed.core.clients import Clients


def networks() -> dict[str, str]:
    """Name and describe the networks."""
    return members(Path(__file__).parent, "network")


def suits(shape: tuple[int, ...], task: str = "classification") -> str:
    """Return the network that is used where none is named, for samples of a shape and a task."""
    if task == "next_token":
        return "gru"
    return "fedavgcnn" if len(shape) == 3 and min(shape[1:]) >= 28 else "mlp"


def is_path(name: str) -> bool:
    """Tell a user's own file from the name of a network."""
    return ":" in name or name.endswith(".py")


def check_name(name: str) -> None:
    """Refuse a network that does not exist; needs no torch and runs nothing."""
    if is_path(name):
        path, colon, function = name.rpartition(":")
        if not colon or not function:
            raise Problem(f"model.name '{name}' must name a function too: path.py:factory")
        if not Path(path).expanduser().is_file():
            raise Problem(f"model.name: there is no file '{path}'")
    elif name and name not in networks():
        known = nearest(name, networks())
        raise Problem(f"model.name: there is no network '{name}'{known} (your own: path.py:factory)")


def check_names(config: ModelConfig) -> None:
    """Refuse networks that do not exist; needs no torch and runs nothing."""
    for name in config.names:
        check_name(name)


def make_network(config: ModelConfig, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """Make the factory of a network.

    Args:
        config: names the network and holds its settings.
        shape: the shape of a sample.
        classes: how many classes there are.

    Returns:
        A function that makes the network, new at each call.
    """
    name = config.name or suits(shape)
    check_name(name)
    if is_path(name):
        from perfed.models.custom import load  # imports torch

        return load(name, shape, classes)
    network = load_member("perfed.models", name).network
    return lambda: network(shape, classes, config)


def make_networks(
    config: ModelConfig, shape: tuple[int, ...], classes: int, clients: Sequence[str]
) -> Callable[[], nn.Module] | Shares:
    """Make the factory of the network that all clients have, or of all networks where they differ.

    Args:
        config: names the networks and holds their settings.
        shape: the shape of a sample.
        classes: how many classes there are.
        clients: the clients' names.

    Returns:
        A function that makes the network; or several, and who has which.
    """
    names, of = share(config, clients)
    makes = [make_network(config.alone(name), shape, classes) for name in names]
    titles = [without_folder(name or suits(shape)) for name in names]
    if len({*titles}) < len(titles):
        raise Problem(f"two networks are called alike ({', '.join(titles)}): rename a function or a file")
    return makes[0] if len(makes) == 1 else Shares(dict(zip(titles, makes, strict=True)), of)


def build(config: ModelConfig, clients: Clients, precision: str = "float32") -> Callable[[], nn.Module] | Shares:
    """Make the factory of the network for these clients' samples, or of all networks, and try it.

    Args:
        config: names the networks and holds their settings.
        clients: those who train them.
        precision: the numbers that the run computes in.

    Returns:
        As `make_networks` does.
    """
    config = config.renamed(lambda name: name or suits(clients.shape, clients.task.kind))
    for name in share(config, clients.names)[0]:
        _try(config.alone(name), clients, precision)
    return make_networks(config, clients.shape, clients.task.outputs, clients.names)


def _try(config: ModelConfig, clients: Clients, precision: str) -> None:
    """Refuse a network that does not fit these clients' samples."""
    import torch

    from perfed.models.trial import refuse_other_gradients, refuse_unfit

    make = make_network(config, clients.shape, clients.task.outputs)
    name, dtype = config.name, getattr(torch, precision)
    refuse_unfit(make, name, clients, dtype)
    if is_path(name):
        refuse_other_gradients(make, name, clients, dtype)
