"""FedAvgCNN: two convolutions (32, 64) and a layer of 512: 878,538 numbers for CIFAR-10.

The convolutional network of many federated experiments, PGFed's among them.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from perfed.models.config import ModelConfig
from perfed.models.shapes import after_two_convolutions, image


class FedAvgCNN(nn.Module):
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 pooling, then a layer of 512 and the classes."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * after_two_convolutions(height, width), 512)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.conv1(x).relu(), 2)
        x = max_pool2d(self.conv2(x).relu(), 2)
        return self.head(self.fc1(x.flatten(1)).relu())


def network(shape: tuple[int, ...], classes: int, _config: ModelConfig) -> FedAvgCNN:
    """Make the network for images of at least 16x16 pixels.

    Args:
        shape: the shape of a sample.
        classes: how many classes there are.

    Returns:
        The network, with random weights.
    """
    return FedAvgCNN(*image(shape, "fedavgcnn", least=16), classes)
