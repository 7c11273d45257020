"""What the tests share: the contract's small ragged federation in float64, and its two networks."""

import os

import pytest
import torch

from perfed.contract import SIZES as SIZES
from perfed.contract import norm_net, plain_net
from perfed.contract import toy_clients as make_clients
from perfed.core.model import Model

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as plain Python; read when Triton is first imported
torch.set_num_threads(1)  # tiny tensors: threads only wait for each other


@pytest.fixture
def clients():
    return make_clients()


@pytest.fixture
def model():
    return Model(plain_net, dtype=torch.float64)


@pytest.fixture
def norm_model():
    return Model(norm_net, dtype=torch.float64)
