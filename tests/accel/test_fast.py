"""The vectorised engine with recorded steps against the sequential one; without a GPU the steps run as they are."""

from functools import partial

import pytest
import torch
import zoo
from torch import nn
from torch.func import grad, jvp, vmap

pytest.importorskip("triton", reason="recorded steps need Triton, which comes for Linux")
from perfed.accel import autotune
from perfed.accel.fast_model import FastModel
from perfed.contract import checks, toy
from perfed.core.clients import Clients, Split
from perfed.core.data import Plan
from perfed.core.model import Batch, Model
from perfed.engines.base import Job
from perfed.engines.blocks import Runner
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedfomo import FedFomo
from perfed.training.catalog import methods

SIZES = (8, 3, 7, 5)  # few steps, because interpreted kernels are slow; partial batches, and a client below one
COHORTS = ((0, 1, 2), (1, 2, 3))


def check(method, cohorts=COHORTS, sizes=SIZES, **options):
    """Recorded steps end with what the sequential engine ends with. Returns the engine."""
    clients = toy.toy_clients(sizes)
    expected = checks.play(Sequential(Job(method, clients, seed=5)), cohorts)
    engine = Vectorised(Job(method, clients, seed=5), fast=True, **options)
    checks.compare(checks.play(engine, cohorts), expected, "recorded")
    return engine


def loops(engine):
    return engine.runner.recorder.loops


@pytest.mark.parametrize(("name", "network"), [("fedavg", "plain"), ("fedavg", "norm"), ("pfedmb", "plain")])
def test_recorded_equals_sequential(name, network):
    check(toy.maker(methods()[name], network)(epochs=1))


@pytest.mark.slow
@pytest.mark.parametrize("network", toy.NETWORKS)
@pytest.mark.parametrize("name", list(methods()))
def test_recorded_equals_sequential_for_all(name, network):
    make = toy.maker(methods()[name], network)
    if network not in toy.networks(methods()[name]) or not make().vectorised:
        pytest.skip("a network that this method refuses, or a method that is not batched")
    check(make(), (*COHORTS, (0, 1, 3)))


@pytest.mark.parametrize("name", ["fedavg", "ifca"])  # one mean, and a mean for each group
def test_what_the_engine_itself_does_in_kernels(name, monkeypatch):
    """Keys, orders, batches and weighted sums, which it leaves to PyTorch where there is no GPU."""
    calls = []

    def machine(runner, device):
        calls.append(device)
        return runner.recorder

    monkeypatch.setattr(Runner, "machine", machine)
    check(toy.maker(methods()[name])(epochs=2), COHORTS[:1])
    assert calls


def test_blocks_smaller_than_the_cohort():
    check(toy.maker(methods()["fedavg"])(epochs=1), block=2)


def test_two_instances_do_not_share_a_record():
    """One engine after another, in one process, with other settings."""
    for settings in ({"lr": 0.05}, {"lr": 0.02}):
        check(toy.maker(methods()["fedavg"])(epochs=1, **settings), [(1, 2)])


def test_records_of_one_engine_are_told_apart():
    """A method whose phases differ in a number alone: each has a record of its own."""
    make = toy.maker(methods()["fedavg"])
    engine = Vectorised(Job(make(), toy.toy_clients()), fast=True)
    identity = lambda method: engine.runner.identity(method._descent, (), [True])
    slow, quick = make(lr=0.05), make(lr=0.02)
    assert identity(slow) == identity(make(lr=0.05))
    assert identity(slow) != identity(quick)
    assert identity(slow) != identity(slow.at_rate(0.02))


@pytest.mark.slow
def test_a_second_run_uses_the_records_again():
    engine = Vectorised(Job(toy.maker(methods()["pgfed"])(epochs=1), toy.toy_clients(SIZES), seed=5), fast=True)
    first = checks.play(engine, COHORTS)
    made = {key: (loop, dict(loop.graphs)) for key, loop in loops(engine).items()}
    assert made
    second = checks.play(engine, COHORTS)
    checks.compare(second, first, "the second run", tolerance=0)
    assert loops(engine).keys() == made.keys()
    for key, (loop, graphs) in made.items():
        assert loops(engine)[key] is loop
        assert loop.graphs == graphs


def test_a_larger_cohort_gets_more_room():
    engine = check(toy.maker(methods()["fedavg"])(epochs=1), [(1, 3), (0, 1, 2, 3), (2, 3)])
    assert [loop.rows for loop in loops(engine).values()] == [4]


@pytest.mark.parametrize("fast", [False, True])
def test_useful_share(fast):
    """The samples that steps look at, over the places in the batches that were run."""
    method, clients = toy.maker(methods()["fedavg"])(epochs=1), toy.toy_clients((13, 7, 4))
    engine = Vectorised(Job(method, clients, seed=5), fast=fast)
    assert engine.useful == 0
    Federation(engine).step((0, 1, 2))
    plan = Plan(method.batch_size, 1, None)
    slots = sum(plan.total(n) for n in clients.train.size) * method.batch_size
    assert engine.useful == pytest.approx((13 + 7 + 4) / slots)


def lenet():
    """LeNet's layers, small: convolution, ReLU and pooling, and a convolution that is no multiple of four wide."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 5),
    )  # fmt: skip


def residual():
    """Padded convolutions without a bias, and GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, bias=False),
        nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(512, 5),
    )  # fmt: skip


def images(sizes=(5, 5), normal=True, side=16):
    draw = torch.Generator().manual_seed(0)

    def split(counts):
        x = torch.randint(0, 256, (sum(counts), 3, side, side), generator=draw, dtype=torch.uint8)
        return Split(x, torch.arange(sum(counts)) % 5, tuple(counts))

    mean = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1) if normal else None
    names = tuple(f"client_{number}" for number in range(len(sizes)))
    return Clients(names, split(sizes), split([2] * len(sizes)), split([3] * len(sizes)), 5, mean, mean)


@pytest.fixture
def large_tiles(monkeypatch):
    """Few large tiles: how a product is cut into them is of no interest here, and the interpreter walks through all."""
    if not torch.cuda.is_available():
        tiles = {
            "forward": {"BM": 1024, "BN": 64, "BK": 128, "warps": 1, "stages": 1},
            "weights": {"BM": 1024, "BK": 128, "SPLIT": 1, "TURNED": 0, "FUSED": 1, "warps": 1, "stages": 1},
            "inputs": {"BM": 1024, "BO": 32, "warps": 1, "stages": 1},
        }
        monkeypatch.setattr(autotune, "CANDIDATES", {kind: [choice] for kind, choice in tiles.items()})


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("network", "normal"),
    [pytest.param(lenet, True, marks=pytest.mark.slow), pytest.param(residual, False, marks=pytest.mark.slow)],
)
def test_images_in_single_precision(network, normal):
    """The kernels of the layers, inside recorded steps, on images that are kept as bytes."""
    clients = images(normal=normal)
    make = lambda: FedAvg(Model(network), lr=0.1, momentum=0.5, epochs=1, batch_size=4)
    run = lambda fast: checks.play(Vectorised(Job(make(), clients, seed=5), fast=fast), [(0, 1)])
    actual, expected = run(True), run(False)
    checks.compare(actual, expected, "with kernels", tolerance=1e-4)
    start = make().model.init(0)
    assert checks.difference(expected.server, start) > 1e-3  # it moved, far more than what is allowed above


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("network", [lenet, residual])
def test_several_models_of_a_client(network, capfd):
    """FedFomo scores the models it downloads in a vmap of its own: all clients' are rows of one block."""
    clients = images((5, 4, 3))
    make = lambda: FedFomo(Model(network), lr=0.1, epochs=1, batch_size=4, downloads=2, warmup=0)
    run = lambda fast: checks.play(Vectorised(Job(make(), clients, seed=5), fast=fast), [(0, 1), (0, 2)])
    actual, expected = run(True), run(False)
    checks.compare(actual, expected, "with kernels", tolerance=1e-4)
    assert "performance drop" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("name", ["resnet-batch", "mobilenet", "unet"])
def test_networks_as_people_bring_them(name):
    """In single precision, where layers are kernels. What cannot be recorded would be a warning, an error here."""
    animal = zoo.ZOO[name]
    few = zoo.clients(animal.shape, zoo.EVEN, torch.float32)
    make = lambda: FedAvg(Model(animal.build), lr=0.1, epochs=1, batch_size=4)
    run = lambda fast: checks.play(Vectorised(Job(make(), few, seed=5), fast=fast), [(0, 1)])
    actual, expected = run(True), run(False)
    checks.compare(actual, expected, "with kernels", tolerance=1e-4)


def both(network):
    """A model with kernels and one without."""
    model = Model(network)
    return FastModel(model, kernels=True), FastModel(model)


def test_a_gradient_through_a_clients_own_vmap():
    """Of several models of one client: kernels have no gradient there, so PyTorch's layers are used."""
    draw = torch.Generator().manual_seed(3)
    thetas = Model(residual).init(0) + 0.01 * torch.randn(2, 3, Model(residual).width, generator=draw)
    x, y = torch.rand(2, 2, 3, 16, 16, generator=draw), torch.tensor([[0, 1], [2, 3]])

    def gradient(model, thetas, x, y):
        loss = lambda theta: model.loss(theta, Batch(x, y, None, torch.zeros(())))[0]
        return grad(lambda many: vmap(loss)(many).square().sum())(thetas)

    actual, expected = (vmap(partial(gradient, model))(thetas, x, y) for model in both(residual))
    assert torch.equal(actual, expected)
    assert expected.abs().sum() > 0


def test_a_forward_derivative_through_a_clients_own_vmap():
    """Kernels have none, and PyTorch takes what has none for constant."""
    draw = torch.Generator().manual_seed(3)
    thetas = Model(residual).init(0) + 0.01 * torch.randn(2, 3, Model(residual).width, generator=draw)
    x, y = torch.rand(2, 2, 3, 16, 16, generator=draw), torch.tensor([[0, 1], [2, 3]])

    def change(model, thetas, x, y):
        loss = lambda theta: model.loss(theta, Batch(x, y, None, torch.zeros(())))[0]
        return jvp(lambda many: vmap(loss)(many), (thetas,), (thetas,))[1]

    actual, expected = (vmap(partial(change, model))(thetas, x, y) for model in both(residual))
    assert torch.equal(actual, expected)
    assert expected.abs().min() > 0


@pytest.mark.parametrize("many", [1, 2])
def test_gradients_of_one_model_for_several_weightings_of_a_clients_samples(many):
    """A client's own vmap over what the loss is made of: all else is the same for its rows, also in a block of one."""
    draw = torch.Generator().manual_seed(3)
    thetas = Model(residual).init(0) + 0.01 * torch.randn(many, Model(residual).width, generator=draw)
    x, y = torch.rand(many, 2, 3, 16, 16, generator=draw), torch.tensor([[0, 1], [2, 3]])[:many]

    def gradients(model, theta, x, y):
        return vmap(lambda weight: model.grad(theta, Batch(x, y, weight, torch.zeros(())))[0])(torch.eye(2))

    actual, expected = (vmap(partial(gradients, model))(thetas, x, y) for model in both(residual))
    assert (actual - expected).norm() > 0
    assert (actual - expected).norm() < 1e-4 * expected.norm()
