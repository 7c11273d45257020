"""Networks as people bring them, recorded on a GPU; `pytest -m gpu` runs these."""

import functools
from importlib.util import find_spec

import pytest
import torch
from zoo import CLASSES, EVEN, ORDER, RAGGED, SETTINGS, ZOO, Animal, clients, full_size

from perfed.contract import checks
from perfed.core.model import Model
from perfed.core.tree import tree_map
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.methods.fedavg import FedAvg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(find_spec("triton") is None, reason="recorded steps need Triton"),
]
# A notice that something could not be recorded is a warning where nobody listens, and so an error here.
Recorded = functools.partial(Vectorised, fast=True)
IN_DOUBLE = (
    "resnet-batch", "resnet-instance", "mobilenet-dropout", "vit-dropout", "transformer-dropout", "transformer-masked",
    "gru-dropout", "lstm-last-state", "unet", "tied", "frozen-by-context", "several-inputs", "spectral-norm",
)  # fmt: skip
IN_SINGLE = ("resnet-batch", "resnet-group", "mobilenet", "vit", "gru", "unet")


def play(engine, animal, data, device, dtype, **changed):
    method = FedAvg(Model(animal.build, dtype=dtype, device=device), **(SETTINGS | changed))
    outcome = checks.play(engine(Job(method, data, seed=ORDER)), [range(len(data))])
    here = lambda t: t.cpu() if isinstance(t, torch.Tensor) else t
    return tree_map(here, outcome.server), outcome.scores, method.model.init(0).cpu()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_recorded_on_a_gpu_equals_the_reference(name):
    animal = ZOO[name]
    data = clients(animal.shape, RAGGED)
    expected, scores, _ = play(Sequential, animal, data, "cpu", torch.float64)
    actual, mine, _ = play(Recorded, animal, data, "cuda", torch.float64)
    assert checks.difference(actual, expected) < 1e-8
    assert checks.difference(mine, scores) < 1e-8


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("name", IN_SINGLE)
def test_kernels_and_full_batches(name):
    """In single precision, where layers are kernels; and without sample weights, where BatchNorm is cuDNN's."""
    animal = ZOO[name]
    expected, _, start = play(Sequential, animal, clients(animal.shape, EVEN), "cpu", torch.float64, epochs=1)
    few = clients(animal.shape, EVEN, torch.float32)
    actual, _, _ = play(Recorded, animal, few, "cuda", torch.float32, epochs=1)
    assert (actual - expected).norm() < 1e-3 * (expected - start).norm()


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_18(norm):
    """Of full width, on images of 32x32 pixels, with batches that are all full: BatchNorm is cuDNN's."""
    assert CLASSES == 4
    animal = Animal(lambda: full_size(norm), (3, 32, 32))
    few = clients(animal.shape, EVEN, torch.float32)
    settings = {"epochs": 1, "batch_size": 8, "lr": 0.01}
    expected, _, start = play(Vectorised, animal, few, "cuda", torch.float32, **settings)
    actual, _, _ = play(Recorded, animal, few, "cuda", torch.float32, **settings)
    assert (actual - expected).norm() < 1e-2 * (expected - start).norm()
