"""Without files: the core alone, for notebooks and for looking at states between rounds."""

import torch
from torch import nn

from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.fedper import FedPer

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)


def split(sizes):
    """Three clients; each flips the label of the same inputs in its own way."""
    x = torch.randn(sum(sizes), 5, generator=draw)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    return Split(x, ((x[:, 0] > 0).long() + owner) % 2, tuple(sizes))


clients = Clients(("north", "south", "west"), split([60, 40, 20]), split([10, 10, 10]), split([30, 30, 30]), classes=2)
model = Model(lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
federation = Federation(Sequential(Job(FedPer(model, lr=0.1, epochs=3), clients)))
for _ in range(10):
    federation.step()
accuracy = federation.evaluate()["personal"]["test"]["accuracy"]
print({name: round(a, 2) for name, a in zip(clients.names, accuracy.tolist(), strict=True)})
print("bytes down", federation.traffic.down, "up", federation.traffic.up)
