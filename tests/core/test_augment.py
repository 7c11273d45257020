"""Crops, mirror images, distortions: what they are, what they are drawn from, and that every engine draws the same."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import affine_transform
from torch import nn
from torch.func import vmap

from perfed.contract import checks
from perfed.core.augment import BORDER, distorted, moved, moves
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import derive, uniform
from perfed.engines.base import Job
from perfed.engines.local import ClientData, Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.methods.fedavg import FedAvg
from perfed.methods.perfedavg import PerFedAvg
from perfed.training.config import RunConfig
from perfed.training.prepare import augmented

KINDS = ("flip", "crop", "crop-flip")
COHORTS = ((0, 1), (1, 2), (0, 2))


def by_hand(image, move):
    """Padded, cropped and mirrored with PyTorch's own functions, as torchvision's RandomCrop and flip do."""
    row, column = divmod(int(move) // 2, 9)
    high, wide = image.shape[1:]
    out = F.pad(image, (4, 4, 4, 4))[:, row : row + high, column : column + wide]
    return out.flip(2) if int(move) % 2 else out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_an_image_is_padded_cropped_and_mirrored(dtype):
    move = torch.arange(162, dtype=torch.uint8)
    x = torch.randint(1, 256, (162, 2, 5, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = moved(x, move)
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack([by_hand(*pair) for pair in zip(x, move, strict=True)]))
    assert torch.equal(moved(x[:1], torch.tensor([80])), x[:1])  # the middle, not mirrored


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_may_happen_happens_equally_often(kind):
    drawn = moves(kind, derive(torch.arange(500), 1), 64)
    assert drawn.dtype == torch.uint8
    assert torch.equal(moves(kind, derive(torch.arange(500), 1), 9), drawn[:, :9])  # whatever the size of the batch
    values, counts = drawn.unique(return_counts=True)
    expected = {"flip": [80, 81], "crop": range(0, 162, 2), "crop-flip": range(162)}[kind]
    assert values.tolist() == list(expected)
    mean = 32000 / len(expected)
    assert float(((counts - mean) ** 2 / mean).sum()) < len(expected) + 5 * (2 * len(expected)) ** 0.5  # chi squared


def clients_with(augment="crop-flip", dtype=torch.uint8, sizes=(7, 12, 3)):
    draw = torch.Generator().manual_seed(0)

    def split(sizes):
        x = torch.randint(0, 256, (sum(sizes), 3, 6, 6), generator=draw, dtype=torch.uint8)
        x = x if dtype == torch.uint8 else x.to(dtype) / 255
        return Split(x, torch.randint(0, 3, (sum(sizes),), generator=draw), sizes)

    half = torch.full((3, 1, 1), 0.5)
    scale = (half, half) if dtype == torch.uint8 else (None, None)
    return Clients(("a", "b", "c"), split(sizes), split((2, 2, 2)), split((4, 3, 2)), 3, *scale, augment=augment)


def small_cnn():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def job(kind=FedAvg, clients=None, dtype=torch.float64, **changed):
    settings = {"epochs": 2, "batch_size": 5, "lr": 0.05, **changed}
    return Job(kind(Model(small_cnn, dtype=dtype), **settings), clients or clients_with(), seed=5)


def test_batches_of_training_change_and_means_do_not():
    plain, changed = clients_with("none"), clients_with("crop-flip")
    method = job().method
    data = {name: ClientData(c, 1, torch.tensor(3), method) for name, c in (("plain", plain), ("changed", changed))}
    theta = method.model.init(0)
    means = [
        each.mean(method.score, {"personal": theta}, split) for each in data.values() for split in ("train", "test")
    ]
    assert checks.difference(means[:2], means[2:]) == 0
    plan = data["plain"]._plan(None, None, 1, 0, None)
    before, after = (list(each._batches(plan, 0)) for each in data.values())
    assert [len(batch.y) for batch in after] == [5, 5, 2, 5, 5, 2]
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first.y, second.y)
        move = moves("crop-flip", second.key, len(first.y))
        black = torch.tensor(-1.0).double()  # of bytes, normalised
        expected = torch.stack([by_hand(x - black, m) + black for x, m in zip(first.x, move, strict=True)])
        torch.testing.assert_close(second.x, expected)
    assert not any(torch.equal(a.x, b.x) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize("kind", [FedAvg, PerFedAvg])  # Per-FedAvg: three batches in a step
def test_engines_agree(kind, dtype):
    clients = clients_with(dtype=dtype)
    expected = checks.play(Sequential(job(kind, clients)), COHORTS)
    for engine in (Vectorised(job(kind, clients)), Vectorised(job(kind, clients), block=2, sizes=(2, 3))):
        checks.compare(checks.play(engine, COHORTS), expected, engine.name, tolerance=1e-12)
    checks.compare(checks.play(Workers(job(kind, clients), workers=2), COHORTS), expected, "workers", tolerance=0)
    plain = checks.play(Sequential(job(kind, dataclasses.replace(clients, augment="none"))), COHORTS)
    assert checks.difference(plain.server, expected.server) > 1e-3


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-4)]
)  # without and with a kernel
def test_recorded_steps_augment(dtype, limit):
    pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
    make = lambda: job(clients=clients_with(sizes=(4, 6, 3)), dtype=dtype, epochs=1)
    expected = checks.play(Sequential(make()), COHORTS[:2])
    found = checks.play(Vectorised(make(), fast=True, notice=pytest.fail), COHORTS[:2])
    moved_by = (expected.server - make().method.init_server(3)).norm()
    assert float((found.server - expected.server).norm() / moved_by) < limit


def test_stragglers_see_the_same_images():
    from perfed.federation.faults import Faults
    from perfed.federation.federation import Federation

    servers = []
    for engine in (Sequential(job()), Vectorised(job())):
        federation = Federation(engine, faults=Faults(stragglers=0.7))
        for cohort in COHORTS:
            federation.step(cohort)
        servers.append(federation.server)
    assert checks.difference(*servers) < 1e-12


def test_what_cannot_be_augmented():
    table = dataclasses.replace(clients_with("none"), train=Split(torch.zeros(2, 4), torch.zeros(2).long(), (2,)))
    with pytest.raises(Problem, match=r"^run.augment = crop is for images \[channels, high, wide\], not for \(4,\)$"):
        augmented(table, RunConfig(augment="crop"))
    assert augmented(table, RunConfig()).augment == "none"
    with pytest.raises(Problem, match=r"need the same augmentation$"):
        Vectorised(job(clients=clients_with("flip")), job(clients=clients_with("crop")))
    assert BORDER == 4


# ---------------------------------------------------------------------- distorted copies


def by_scipy(image, draw):
    """The move of these draws, which kind of four it is, and how far along both axes it goes."""
    kind, by = int(4 * draw[0]), [2 * float(each) - 1 for each in draw[1:]]
    angle, (high, wide) = math.radians(25) * by[0], image.shape[1:]
    matrix, away = np.eye(2), np.zeros(2)  # of rows and columns, in this order
    if kind == 0:
        matrix = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    elif kind == 1:
        matrix = np.array([[1, 0], [math.tan(angle), 1]])
    elif kind == 2:
        matrix = np.eye(2) / (1 + 0.5 * by[0])
    else:
        away = np.array([0.1 * high * by[1], 0.1 * wide * by[0]])
    middle = np.array([(high - 1) / 2, (wide - 1) / 2])
    offset = middle - matrix @ middle + away
    return np.stack([affine_transform(each, matrix, offset, order=1, mode="nearest") for each in image.numpy()])


def test_a_distortion_is_what_scipy_makes_of_it():
    n = 40
    x = torch.rand(n, 2, 7, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = derive(torch.tensor(3), torch.arange(n))
    draws = uniform(keys, (3,), torch.float64)
    assert {int(4 * draw) for draw in draws[:, 0]} == {0, 1, 2, 3}
    found = distorted(x, keys)
    for image, draw, copy in zip(x, draws, found, strict=True):
        np.testing.assert_allclose(copy.numpy(), by_scipy(image, draw), atol=1e-9)
    assert ((found - x).abs().flatten(1).amax(1) > 1e-3).all()


def test_a_distortion_leaves_no_images_range_and_other_samples_as_they_are():
    x, keys = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(50)
    found = distorted(x, keys)
    assert (found.flatten(1).amin(1) >= x.flatten(1).amin(1) - 1e-6).all()
    assert (found.flatten(1).amax(1) <= x.flatten(1).amax(1) + 1e-6).all()
    assert found.dtype == x.dtype
    assert torch.equal(distorted(x.flatten(1), keys), x.flatten(1))


def test_a_distortion_follows_from_its_key_alone():
    x, keys = torch.rand(6, 1, 5, 5), derive(torch.tensor(1), torch.arange(6))
    alone = torch.cat([distorted(x[i : i + 1], keys[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(distorted(x, keys), alone)
    torch.testing.assert_close(vmap(distorted)(x.view(2, 3, 1, 5, 5), keys.view(2, 3)).flatten(0, 1), alone)
    assert not torch.allclose(distorted(x, keys + 1), alone)
