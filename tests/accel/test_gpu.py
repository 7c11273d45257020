"""The vectorised engine on a GPU against the reference on the CPU; the kernels' own tests run there too.

`pytest -m gpu` runs these; the other tests in this folder use compiled kernels where there is a GPU.
"""

import functools
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from perfed.accel import autotune
from perfed.accel.fast_model import FastModel
from perfed.contract import checks, toy
from perfed.core.augment import moved, moves
from perfed.core.clients import Clients, Split
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.core.rates import Rates
from perfed.core.tree import tree_map
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation, evaluate, step
from perfed.federation.optimizers import ServerOptimizer
from perfed.methods.fedavg import FedAvg
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.training.catalog import methods

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="recorded steps need Triton")
Recorded = functools.partial(Vectorised, fast=True)


def here(tree):
    """The same on the CPU."""
    return tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, tree)


def compare(actual, expected):
    checks.compare(checks.Outcome(*(here(getattr(actual, f)) for f in vars(actual))), expected, "the GPU")


def on(device, name, network, **changed):
    entry = methods()[name]
    like = toy.maker(entry, network)(**changed)
    settings = {field: getattr(like, field) for field in entry.fields}
    return entry.load()(Model(toy.NETWORKS[network], dtype=torch.float64, device=device), **settings)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("network", toy.NETWORKS)
@pytest.mark.parametrize("name", list(methods()))
def test_gpu_equals_cpu(name, network, compile):
    if network not in toy.networks(methods()[name]):
        pytest.skip("a network that this method refuses")
    if compile and name not in ("fedavg", "pgfed"):
        pytest.skip("compiling takes long: two methods stand for all")
    expected = checks.play(Sequential(Job(on("cpu", name, network), toy.toy_clients(), seed=5)))
    engine = Vectorised(
        Job(on("cuda", name, network), toy.toy_clients(), seed=5), compile=compile, sizes=(3,) if compile else ()
    )
    compare(checks.play(engine), expected)


@needs_triton
@pytest.mark.parametrize("network", toy.NETWORKS)
@pytest.mark.parametrize("name", list(methods()))
def test_recorded_on_a_gpu_equals_cpu(name, network):
    if network not in toy.networks(methods()[name]) or not methods()[name].load().vectorised:
        pytest.skip("a network that this method refuses, or a method that is not batched")
    expected = checks.play(Sequential(Job(on("cpu", name, network), toy.toy_clients(), seed=5)))
    compare(checks.play(Recorded(Job(on("cuda", name, network), toy.toy_clients(), seed=5))), expected)


@needs_triton
@pytest.mark.parametrize("kind", ["momentum", "yogi"])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "ifca", "pfedme", "perfedavg"])
def test_options_of_every_method_on_a_gpu(name, kind):
    """A schedule, clipping and an optimiser of the server, whose verdicts stay on the GPU; nothing is recorded anew."""
    outcomes = []
    for device, engine in (("cpu", Sequential), ("cuda", functools.partial(Recorded, notice=pytest.fail))):
        job = Job(on(device, name, "norm", clip=0.5), toy.toy_clients(), seed=5, rates=Rates("cosine", 3))
        trained = engine(job)
        federation = Federation(trained, optimizer=ServerOptimizer(kind, 0.05))
        outcomes.append(checks.play(trained, federation=federation))
    compare(outcomes[1], outcomes[0])
    federation.step(toy.COHORTS[0])
    known = len(trained.runner.recorder.loops)
    federation.step(toy.COHORTS[0])
    assert len(trained.runner.recorder.loops) == known


def images():
    """Three clients of different sizes, kept as bytes: their batches are made by a kernel."""
    draw = torch.Generator().manual_seed(0)

    def split(*counts):
        x = torch.randint(0, 256, (sum(counts), 3, 32, 32), generator=draw, dtype=torch.uint8)
        return Split(x, torch.arange(sum(counts)) % 10, counts)

    half = torch.full((3, 1, 1), 0.5)
    return Clients(("a", "b", "c"), split(40, 13, 27), split(5, 5, 5), split(9, 9, 9), 10, half, half)


@needs_triton
@pytest.mark.parametrize("kind", ["flip", "crop", "crop-flip"])
def test_images_move_inside_the_kernel(kind):
    from perfed.accel.kernels.rows import gather

    clients = images().to("cuda")
    source, normal = clients.train, (clients.mean, clients.std)
    table = torch.arange(3 * 4 * 5, device="cuda").view(3, 4, 5) % 11
    table[1, :, 3:] = -1
    drawn = moves(kind, derive(torch.arange(12, device="cuda").view(3, 4), 1), 5)
    counter = torch.tensor([2], device="cuda")
    x, y, weight = gather(source, normal, table, counter, source.starts, 3, drawn)
    rows = (table[:, 2].clamp_min(0) + source.starts[:, None]).flatten()
    expected = clients.ready(moved(source.x[rows], drawn[:, 2].flatten()), torch.float32).view(3, 5, 3, 32, 32)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(y.flatten(), source.y[rows])
    assert torch.equal(weight, (table[:, 2] >= 0).float())


def network(name, norm="group"):
    return make_network(ModelConfig(name=name, norm=norm), (3, 32, 32), 10)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to("cuda")


@needs_triton
@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("layer", [(5, 1, 0), (3, 1, 1), (3, 2, 1), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("pool", [False, True], ids=["plain", "average"])
def test_a_layer_of_full_size_in_single_precision(layer, pool):
    """Without ReLU, which near zero may be on in one precision and off in the other."""
    from perfed.accel import operators
    from perfed.accel.kernels import conv

    kernel, stride, padding = layer
    x, w, b = random(3, 64, 16, 28, 28), random(3, 32, 16, kernel, kernel), random(3, 32)
    shape = conv.Layer(kernel, stride, padding, pool=conv.AVG if pool else conv.NONE)

    def plain(x, w, b):
        y = F.conv2d(x, w, b, stride, padding)
        return F.avg_pool2d(y, 2) if pool else y

    ours = lambda *t: operators.conv(*t, shape)
    g = random(*torch.func.vmap(ours)(x, w, b).shape)
    actual, expected = (
        torch.func.vmap(torch.func.grad(lambda x, w, b, g, f=f: (f(x, w, b) * g).sum(), argnums=(0, 1, 2)))(*tensors)
        for f, tensors in ((ours, (x, w, b, g)), (plain, (x.double(), w.double(), b.double(), g.double())))
    )
    for mine, other in zip(actual, expected, strict=True):
        assert checks.difference(mine, other) < 1e-5
    double = torch.func.vmap(plain)(x.double(), w.double(), b.double())
    assert checks.difference(torch.func.vmap(ours)(x, w, b), double) < 1e-5


@needs_triton
@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("name", ["lenet", "fedavgcnn", "resnet"])
def test_networks_in_single_precision(name):
    """Losses and gradients of three clients: kernels in float32 against PyTorch's layers in float64."""
    x, y = random(3, 8, 3, 32, 32), torch.arange(24, device="cuda").remainder(10).view(3, 8)
    actual = []
    for dtype in (torch.float32, torch.float64):
        model = FastModel(Model(network(name), device="cuda", dtype=dtype), kernels=True)  # not for double precision
        theta = torch.stack([model.init(seed) for seed in range(3)])
        gradient = lambda theta, x, y, model=model: model.grad(theta, Batch(x, y, None, y[0]))
        actual.append(torch.func.vmap(gradient)(theta, x.to(dtype), y))
    (g, _, loss), (exact, _, value) = actual
    assert checks.difference(loss, value) < 1e-5
    assert checks.difference(g, exact) < 1e-3  # a ReLU near zero may be on in one and off in the other


@needs_triton
@pytest.mark.parametrize("name", ["fedavg", "pfedmb"])
def test_fine_tuning_on_a_gpu_equals_cpu(name):
    make = lambda device: on(device, name, "plain", fine_tune=2)
    expected = checks.play(Sequential(Job(make("cpu"), toy.toy_clients(), seed=5)))
    for engine in (Vectorised, Recorded):
        compare(checks.play(engine(Job(make("cuda"), toy.toy_clients(), seed=5))), expected)


@pytest.mark.parametrize("engine", [Sequential, Vectorised, pytest.param(Recorded, marks=needs_triton)])
@pytest.mark.parametrize(("name", "norm"), [("lenet", "batch"), ("resnet", "batch"), ("resnet", "group")])
def test_a_gpu_run_can_be_repeated(name, norm, engine):
    """Bit for bit, with convolutions in float32: what resuming to the byte needs."""
    clients = images().to("cuda")
    torch.backends.cudnn.deterministic = True  # as every run sets it
    make = lambda: FedAvg(Model(network(name, norm), device="cuda"), epochs=2, lr=0.05)
    first, second = (checks.play(engine(Job(make(), clients)), [range(3)] * 2) for _ in range(2))
    assert checks.difference(first.server, second.server) == 0
    assert checks.difference(first.scores, second.scores) == 0


@needs_triton
@pytest.mark.parametrize("name", ["fedavg", "ditto", "pgfed"])
def test_several_runs_in_one_batch(name):
    """Recorded steps with seeds as rows: each run ends as the reference does alone."""
    clients, rates = toy.toy_clients(), {0: 0.05, 3: 0.05, 7: 0.02}
    engine = Recorded(*(Job(on("cuda", name, "norm", lr=lr), clients, seed=s) for s, lr in rates.items()))
    federations = [Federation(engine, run) for run in range(len(rates))]
    for _ in range(2):
        step(federations)
    scores = evaluate(federations, [None] * len(federations))
    for place, (seed, lr) in enumerate(rates.items()):
        alone = Federation(Sequential(Job(on("cpu", name, "norm", lr=lr), clients, seed=seed)))
        for _ in range(2):
            alone.step()
        assert checks.difference(here(federations[place].server), alone.server) < 1e-9
        assert checks.difference(scores[place].tables, alone.evaluate().tables) < 1e-9


@needs_triton
def test_launch_parameters_are_kept(tmp_path, monkeypatch):
    """Timed once, written to $PERFED_CACHE, and read by the next process."""
    monkeypatch.setenv("PERFED_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr(autotune, "_loaded", set())
    method = FedAvg(Model(network("lenet"), device="cuda"), epochs=1, batch_size=7)
    Federation(Recorded(Job(method, images()))).step()
    chosen = dict(autotune._chosen)
    assert {key[0] for key in chosen} == {"forward", "weights", "inputs"}
    assert len(list(tmp_path.glob("kernels-*.json"))) == 1
    monkeypatch.setattr(autotune, "_chosen", {})
    monkeypatch.setattr(autotune, "_loaded", set())
    autotune._load(torch.device("cuda"))
    assert autotune._chosen == chosen


@needs_triton
@pytest.mark.parametrize("name", ["fedavg", "ditto"])  # one model for all, one for each
def test_failing_clients_and_all_scores(name):
    ends = []
    for engine, device in ((Sequential, "cpu"), (Recorded, "cuda")):
        method = on(device, name, "norm", epochs=3)
        federation = Federation(
            engine(Job(method, toy.toy_clients(), seed=5, cohort=4)), faults=Faults(dropout=0.3, stragglers=0.7)
        )
        for _ in range(4):
            federation.step()
        ends.append(here((federation.server, dict(federation.engine.states[0]), federation.evaluate(full=True).tables)))
    assert checks.difference(ends[1], ends[0]) < 1e-9


@needs_triton
@pytest.mark.parametrize("name", ["fedavg", "moon", "fedrod"])
def test_classes_have_weights_in_recorded_steps(full_precision, name):
    weights, clients = (0.2, 5.0, 1.5), toy.toy_clients()
    entry = methods()[name]
    settings = {"epochs": 1, "batch_size": 4, "lr": 0.05}
    make = lambda device, **more: entry.load()(Model(toy.plain_net, device=device, **more), **settings)
    expected = checks.play(Sequential(Job(make("cpu", class_weights=weights), clients)), [(0, 2, 3)])
    job = Job(make("cuda", class_weights=weights), clients.to("cuda"))
    actual = checks.play(Recorded(job), [(0, 2, 3)])
    moved = (expected.server - make("cpu").init_server(5)).norm()
    assert (actual.server.cpu() - expected.server).norm() < 1e-3 * moved
    plain = checks.play(Sequential(Job(make("cpu"), clients)), [(0, 2, 3)])
    assert (plain.server - expected.server).norm() > 0.1 * moved
