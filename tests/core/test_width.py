"""A network with a mask is the narrow network."""

import pytest
import torch
from torch import nn
from zoo import ResNet

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.width import width_mask


def mlp(width):
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 3)
    )


def cnn(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(2 * width * 16, width), nn.ReLU(), nn.Linear(width, 3),
    )  # fmt: skip


def resnet(width):
    return ResNet(width=width)


@pytest.mark.parametrize(
    ("build", "shape"), [(mlp, (6,)), (cnn, (3, 8, 8)), (resnet, (3, 8, 8))], ids=lambda v: str(v)[:12]
)
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_first_units_of_every_layer(build, shape, share):
    whole = Model(lambda: build(8), dtype=torch.float64).taking(shape)
    small = Model(lambda: build(int(8 * share)), dtype=torch.float64)
    mask = width_mask(whole, share)
    assert mask.sum() == small.size
    assert width_mask(whole, share) is mask
    theta = whole.init(1)
    narrow = torch.zeros_like(small.init(0))
    narrow[: small.size] = theta[mask]
    x = torch.randn(5, *shape, dtype=torch.float64)
    for train in (False, True):
        torch.testing.assert_close(
            whole.apply(torch.where(mask, theta, 0), x, train)[0], small.apply(narrow, x, train)[0]
        )
    assert torch.equal(width_mask(whole, 1.0), whole.everything.mask)


def test_what_has_no_width():
    model = Model(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))).taking((6,))
    with pytest.raises(Problem, match=r"the layer '1' \(LayerNorm\) cannot be made narrower"):
        width_mask(model, 0.5)
    with pytest.raises(Problem, match="above 0 and at most 1, not 0"):
        width_mask(model, 0)


def test_layers_that_are_joined_in_another_way():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(6, 6), nn.Linear(14, 3)

        def forward(self, x):
            return self.head(torch.cat([self.one(x).relu(), self.two(x).relu()], 1))

    with pytest.raises(Problem, match="joined in a way"):
        width_mask(Model(Joined).taking((6,)), 0.5)
