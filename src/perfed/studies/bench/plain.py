"""The loop that everybody writes first: FedAvg with an nn.Module, torch.optim.SGD and a state dict, one client at a
time. Nothing of perfed trains here; it is what the benchmarks compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Samples = Sequence[tuple[Tensor, Tensor]]  # x and y of each client: float, normalised, contiguous


class Loop:
    """Rounds of FedAvg, each with an evaluation of the global model on every client's test samples."""

    def __init__(
        self, build: Callable[[], nn.Module], train: Samples, test: Samples, *, lr: float, batch_size: int, epochs: int
    ):
        torch.manual_seed(0)
        self.net, self.train, self.test = build(), train, test
        self.lr, self.batch_size, self.epochs = lr, batch_size, epochs
        self.server = {name: value.clone() for name, value in self.net.state_dict().items()}

    def round(self) -> float:
        """Carry out a round; returns the mean test accuracy over clients."""
        total = sum(len(y) for _, y in self.train)
        average = {name: torch.zeros_like(value) for name, value in self.server.items()}
        for x, y in self.train:
            self.net.load_state_dict(self.server)
            self.net.train()
            optimiser = torch.optim.SGD(self.net.parameters(), lr=self.lr)
            for _ in range(self.epochs):
                for rows in torch.randperm(len(y)).split(self.batch_size):
                    optimiser.zero_grad()
                    F.cross_entropy(self.net(x[rows]), y[rows]).backward()
                    optimiser.step()
            for name, value in self.net.state_dict().items():
                average[name] += value * (len(y) / total)
        self.server = average
        return self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Score the global model, accuracy and loss, as any experiment logs them; returns the mean accuracy."""
        self.net.load_state_dict(self.server)
        self.net.eval()
        accuracy = []
        for x, y in self.test:
            right, loss = 0.0, 0.0
            for samples, labels in zip(x.split(512), y.split(512), strict=True):
                out = self.net(samples)
                loss += float(F.cross_entropy(out, labels, reduction="sum"))
                right += float((out.argmax(-1) == labels).sum())
            accuracy.append(right / len(y))
        return sum(accuracy) / len(accuracy)
