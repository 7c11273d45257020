"""Networks of the papers' experiments that are nobody's default."""

from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class PairsOfPixels(nn.Module):
    """pFedMT's CNN for MNIST, after the authors' code: 2x2 convolutions, pooling with stride 1, no dropout."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 2)
        self.conv2 = nn.Conv2d(16, 32, 2)
        self.fc1 = nn.Linear(32 * (height - 4) * (width - 4), 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.conv1(x).relu(), 2, 1)
        x = max_pool2d(self.conv2(x).relu(), 2, 1)
        return self.head(self.fc1(x.flatten(1)).relu())


def pfedmt(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Make the network; for MNIST it has 2,362,874 numbers."""
    return PairsOfPixels(*shape, classes)
