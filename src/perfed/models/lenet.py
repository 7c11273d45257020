"""The network of pFedMB: LeNet with two convolutions (6, 16) and layers of 120 and 84: 62,006 numbers for CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from perfed.models.config import ModelConfig
from perfed.models.shapes import after_two_convolutions, image


class LeNet(nn.Module):
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 pooling, then layers of 120, 84 and the classes."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * after_two_convolutions(height, width), 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.conv1(x).relu(), 2)
        x = max_pool2d(self.conv2(x).relu(), 2)
        x = self.fc1(x.flatten(1)).relu()
        return self.head(self.fc2(x).relu())


def network(shape: tuple[int, ...], classes: int, _config: ModelConfig) -> LeNet:
    """Make the network for images of at least 16x16 pixels.

    Args:
        shape: the shape of a sample.
        classes: how many classes there are.

    Returns:
        The network, with random weights.
    """
    return LeNet(*image(shape, "lenet", least=16), classes)
