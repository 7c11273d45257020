"""The networks clients train: one file per network. Importing this does not import torch.

Every network returns logits [batch, classes], and its classifier is called `head`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.config import ModelConfig
from perfed.core.errors import Problem, nearest

if TYPE_CHECKING:
    from torch import nn

    from perfed.core.clients import Clients

MODELS: dict[str, str] = {
    "mlr": "multinomial logistic regression: one linear layer",
    "mlp": "one hidden layer with ReLU, of width model.hidden",
    "lenet": "LeNet with two convolutions (6, 16) and layers of 120 and 84: 62,006 numbers for CIFAR-10",
    "fedavgcnn": "two convolutions (32, 64) and a layer of 512: 878,538 numbers for CIFAR-10",
    "resnet": "small residual network, three blocks of 16, 32 and 64 channels, batch or group normalisation",
}
_FILE = {"fedavgcnn": "cnn"}


def build(config: ModelConfig, clients: Clients) -> Callable[[], nn.Module]:
    """A function without arguments that makes the network for these clients' samples, new at each call."""
    make = make_network(config, clients.shape, clients.classes)
    _try(make, config.name or suits(clients.shape), clients)
    return make


def make_network(config: ModelConfig, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
    """The same, for samples of a known shape and without trying it."""
    name = config.name or suits(shape)
    check_name(name)
    if is_path(name):
        from perfed.models.custom import load

        return load(name, shape, classes)
    network = importlib.import_module(f"perfed.models.{_FILE.get(name, name)}").network
    return lambda: network(shape, classes, config)


def is_path(name: str) -> bool:
    """Whether a model's name means a file of the user's."""
    return ":" in name or name.endswith(".py")


def check_name(name: str) -> None:
    """Refuse a network that does not exist; needs no torch and runs nothing."""
    if is_path(name):
        place, colon, function = name.rpartition(":")
        if not colon or not function:
            raise Problem(f"model.name '{name}' must name a function too: path.py:factory")
        if not Path(place).expanduser().is_file():
            raise Problem(f"model.name: there is no file '{place}'")
    elif name and name not in MODELS:
        known = nearest(name, MODELS)
        raise Problem(f"model.name: there is no network '{name}'{known} (your own: path.py:factory)")


def suits(shape: tuple[int, ...]) -> str:
    """The network that is used where none is named."""
    return "fedavgcnn" if len(shape) == 3 and min(shape[1:]) >= 28 else "mlp"


def _try(make: Callable[[], nn.Module], name: str, clients: Clients) -> None:
    """Make the network once and give it one sample, so that what does not fit is found before training."""
    import torch
    from torch import Tensor, nn

    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the trial must not change what is drawn later
        try:
            model = make()
        except Problem:
            raise
        except Exception as error:
            raise Problem(f"model.name '{name}' raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise Problem(f"model.name '{name}' returned {type(model).__name__}, not a torch.nn.Module")
        sample = clients.ready(clients.train.x[:1], torch.float32).cpu()
        try:
            logits = model.eval()(sample)
        except Exception as error:
            raise Problem(
                f"model.name '{name}' cannot take a sample of shape {clients.shape}: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(logits, Tensor) or logits.shape != (1, clients.classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Problem(
            f"model.name '{name}' must return one number for each of {clients.classes} classes: {(1, clients.classes)} "
            f"for one sample, not {found}"
        )
