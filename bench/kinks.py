"""How far two engines are apart where rounding decides on which side of a kink a number lies.

`python bench/kinks.py` prints what `docs/engines.md` says: a residual network with ReLU and BatchNorm, three rounds of
three clients with random pictures; the distance of the two servers, as a share of what the model has moved.
"""

import sys

import torch

from perfed import Model
from perfed.core.clients import Clients, Split
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.perfedavg import PerFedAvg
from perfed.models import make_network
from perfed.models.config import ModelConfig

SHAPE, CLASSES, SIZES = (3, 16, 16), 4, (40, 24, 33)
METHODS = {"FedAvg": (FedAvg, {}), "Per-FedAvg fo": (PerFedAvg, {"variant": "fo"}), "Per-FedAvg hf": (PerFedAvg, {})}


def pictures() -> Clients:
    """Make three clients with random pictures."""
    draw = torch.Generator().manual_seed(0)

    def split(sizes: tuple[int, ...]) -> Split:
        x = torch.randn(sum(sizes), *SHAPE, generator=draw)
        return Split(x, torch.randint(0, CLASSES, (sum(sizes),), generator=draw), sizes)

    return Clients(("a", "b", "c"), split(SIZES), split((0, 0, 0)), split((4, 4, 4)), CLASSES)


def distance(method: str, dtype: torch.dtype) -> float:
    """Return how far the engines are apart after three rounds."""
    kind, settings = METHODS[method]
    network = make_network(ModelConfig(name="resnet", norm="batch"), SHAPE, CLASSES)
    ends = []
    for engine in (Sequential, Vectorised):
        made = kind(Model(network, dtype=dtype), lr=0.05, epochs=1, **settings)
        federation = Federation(engine(Job(made, pictures())))
        start = federation.server.clone()
        for _ in range(3):
            federation.step()
        ends.append(federation.server)
    return float((ends[0] - ends[1]).norm() / (ends[0] - start).norm())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        for method in METHODS:
            sys.stdout.write(f"{str(dtype).removeprefix('torch.')}  {method:<14} {distance(method, dtype):.1e}\n")
