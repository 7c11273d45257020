"""What the tests share: a small ragged federation in float64, and two networks for it."""

import pytest
import torch
from torch import nn

from perfed.core.clients import Clients, Split
from perfed.core.model import Model

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
SIZES = (23, 7, 41, 3, 12)  # fewer than a batch, not a multiple of it, and more


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def norm_net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def make_clients(sizes=SIZES, dtype=torch.float64, seed=0, features=6, classes=3):
    draw = torch.Generator().manual_seed(seed)

    def split(counts):
        n = sum(counts)
        x = torch.randn(n, features, generator=draw, dtype=dtype)
        return Split(x, torch.randint(0, classes, (n,), generator=draw), tuple(counts))

    names = tuple(f"client_{i}" for i in range(len(sizes)))
    return Clients(names, split(sizes), split([max(n // 4, 1) for n in sizes]), split([n // 3 + 1 for n in sizes]), classes)


@pytest.fixture()
def clients():
    return make_clients()


@pytest.fixture()
def model():
    return Model(plain_net, dtype=torch.float64)


@pytest.fixture()
def norm_model():
    return Model(norm_net, dtype=torch.float64)
