"""ResNet: small residual network, three blocks of 16, 32 and 64 channels, batch or group normalisation.

For images of CIFAR's size (He et al., 2016).
"""

from __future__ import annotations

from torch import Tensor, nn

from perfed.models.config import ModelConfig
from perfed.models.shapes import image


def _norm(kind: str, width: int) -> nn.Module:
    # Group normalisation keeps no statistics of the data, so nothing of it has to be averaged between clients.
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(8, width)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, width)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Three blocks of 16, 32 and 64 channels, the later two at half the size each, then the mean over all pixels."""

    def __init__(self, channels: int, classes: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm1 = _norm(norm, 16)
        self.block1 = Block(16, 16, 1, norm)
        self.block2 = Block(16, 32, 2, norm)
        self.block3 = Block(32, 64, 2, norm)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        x = self.block3(self.block2(self.block1(x)))
        return self.head(x.mean((2, 3)))


def network(shape: tuple[int, ...], classes: int, config: ModelConfig) -> ResNet:
    """Make the network for images of at least 8x8 pixels.

    Args:
        shape: the shape of a sample.
        classes: how many classes there are.
        config: norm, the kind of normalisation.

    Returns:
        The network, with random weights.
    """
    channels, _, _ = image(shape, "resnet", least=8)
    return ResNet(channels, classes, config.norm)
