"""The networks clients train: one file per network. Importing this does not import torch.

Every network returns logits [batch, classes], and its classifier is called `head`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
    shape, classes = clients.shape, clients.classes
    name = config.name or _suits(shape)
    if ":" in name or name.endswith(".py"):
        from perfed.models.custom import load

        make = load(name, shape, classes)
    elif name in MODELS:
        network = importlib.import_module(f"perfed.models.{_FILE.get(name, name)}").network
        make = lambda: network(shape, classes, config)
    else:
        known = nearest(name, MODELS)
        raise Problem(f"model.name: there is no network '{name}'{known} (your own: path.py:factory)")
    _try(make, name, clients)
    return make


def _suits(shape: tuple[int, ...]) -> str:
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
