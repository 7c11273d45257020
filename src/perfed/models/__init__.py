"""The networks clients train: one file per network. Importing this does not import torch.

Every network returns logits [batch, classes], and its classifier is called `head`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest
from perfed.training.config import ModelConfig

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
    network = importlib.import_module(f"perfed.models.{name}").network
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


def refuse_mixing(make: Callable[[], nn.Module], clients: Clients) -> None:
    """Refuse a network whose output for one sample depends on the samples beside it, other than through BatchNorm.

    In a block, the filling of a partial batch stands beside real samples; only our own layers know to ignore it.
    """
    import torch

    from perfed.core.model import Model
    from perfed.core.random import derive

    model = Model(make)
    theta, x = model.init(0), clients.ready(clients.train.x[:1], torch.float32).cpu()
    pair = torch.cat([x, 2 * x + 1])
    with torch.no_grad():
        alone = model.apply(theta, x, train=True, weight=torch.ones(1), key=derive(0))[0]
        beside = model.apply(theta, pair, train=True, weight=torch.tensor([1.0, 0.0]), key=derive(0))[0]
    if not torch.allclose(alone[0], beside[0], rtol=1e-3, atol=1e-4):
        raise Problem("the network mixes the samples of a batch other than through BatchNorm: use --engine workers")


def suits(shape: tuple[int, ...]) -> str:
    """The network that is used where none is named."""
    return "fedavgcnn" if len(shape) == 3 and min(shape[1:]) >= 28 else "mlp"


def _try(make: Callable[[], nn.Module], name: str, clients: Clients) -> None:
    """Make the network once and give it one sample, so that what does not fit is found before training."""
    import torch
    from torch import Tensor, nn

    from perfed.core.layers import swap

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
            ours, before = swap(model).train(), torch.get_rng_state()
            ours(torch.cat([sample, sample]))
            random = not torch.equal(before, torch.get_rng_state())
        except Exception as error:
            raise Problem(
                f"model.name '{name}' cannot take a sample of shape {clients.shape}: {type(error).__name__}: {error}"
            ) from error
    if random:
        raise Problem(
            f"model.name '{name}' draws random numbers of its own in training, which no seed of a run reaches: "
            "use nn.Dropout as a module"
        )
    if not isinstance(logits, Tensor) or logits.shape != (1, clients.classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise Problem(
            f"model.name '{name}' must return one number for each of {clients.classes} classes: {(1, clients.classes)} "
            f"for one sample, not {found}"
        )
