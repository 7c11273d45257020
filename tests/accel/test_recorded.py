"""What a recorded engine must not get wrong silently: cases that once were."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

pytest.importorskip("triton", reason="the fast engine needs Triton")

from perfed.accel import operators
from perfed.accel.kernels.conv import Layer
from perfed.accel.schedule import Program
from perfed.accel.trace import Rows, record
from perfed.contract import checks, toy
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.messages import Up
from perfed.core.model import Batch, Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation, step
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods


def picture_clients(last: bool) -> Clients:
    """Coloured pictures, either as PyTorch lays them out or with the channels last, as image files are read."""
    draw = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        x = torch.randint(0, 256, (2 * n, 8, 8, 3), generator=draw, dtype=torch.uint8).permute(0, 3, 1, 2)
        return Split(x if last else x.contiguous(), torch.arange(2 * n) % 3, (n, n))

    half = torch.full((3, 1, 1), 0.5)
    return Clients(("a", "b"), split(5), split(1), split(2), 3, half, half)


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True], ids=["first", "last"])
def test_pictures_in_any_layout(last):
    clients = picture_clients(last)
    make = lambda: FedAvg(Model(small_cnn), epochs=1, batch_size=4, lr=0.05)
    expected = checks.play(Sequential(Job(make(), clients)), [(0, 1)])
    actual = checks.play(Vectorised(Job(make(), clients), fast=True), [(0, 1)])
    moved = (expected.server - make().init_server(2)).norm()
    assert (actual.server - expected.server).norm() < 1e-4 * moved
    assert checks.difference(actual.scores, expected.scores) < 1e-4


@pytest.mark.parametrize(
    "task",
    [pytest.param(t, marks=[pytest.mark.slow] * (t.kind != "regression"), id=t.kind) for t in toy.TASKS],
)
def test_every_task_is_recorded_with_kernels(task, monkeypatch):
    """The loss and its gradient are one node each, so that a step has as many launches as one of classification."""
    called = []
    for name in ("cross_entropy", "binary_cross_entropy", "squared_error"):
        usual = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *given, usual=usual, name=name: called.append(name) or usual(*given)
        )
    clients, build = toy.task_clients(task), toy.networks_of(task)[0]
    make = lambda: FedAvg(Model(build, task=task), epochs=1, batch_size=5, lr=0.05)
    refused = lambda notice: pytest.fail(notice)
    expected = checks.play(Sequential(Job(make(), clients)), [(1, 3)])
    actual = checks.play(Vectorised(Job(make(), clients), fast=True, notice=refused), [(1, 3)])
    assert called
    moved = (expected.server - make().init_server(2)).norm()
    assert (actual.server - expected.server).norm() < 1e-4 * moved
    assert checks.difference(actual.scores, expected.scores) < 1e-4


def test_what_is_not_a_number_stays_so():
    nan = torch.tensor([[float("nan"), -1.0, 2.0]])
    for f in (
        lambda x: (x.relu() * 2,),
        lambda x: (x.clamp_min(0.0) + 1,),
        lambda x: (torch.where(x > 0, x, -torch.inf) + 0 * x,),
        lambda x: (torch.rsub(x, 1.0, alpha=2.0) + x,),
    ):
        assert torch.equal(Program(record(f, nan))(nan)[0], f(nan)[0]) or torch.allclose(
            Program(record(f, nan))(nan)[0], f(nan)[0], equal_nan=True
        )


def test_several_steps_to_a_graph(monkeypatch):
    from perfed.accel import loops

    monkeypatch.setattr(loops, "WORTH", 2)
    monkeypatch.setattr(loops, "MANY", 3)
    make = lambda: FedAvg(Model(toy.plain_net, dtype=torch.float64), epochs=2, batch_size=2, lr=0.05)
    clients = toy.toy_clients((4, 4))
    engine = Vectorised(Job(make(), clients), fast=True)
    cohorts = [(0, 1)] * 2
    checks.compare(checks.play(engine, cohorts), checks.play(Sequential(Job(make(), clients)), cohorts), "graphs")
    recorder = engine.runner.recorder
    assert recorder is not None
    assert {steps for loop in recorder.loops.values() for _, steps in loop.graphs} == {1, 3}


@dataclasses.dataclass(frozen=True)
class Growing(FedAvg):
    """A step that returns another form than it was given."""

    def step(self, carry, batch, given):
        return carry + 0.5

    def local(self, client, down, data):
        return client, Up(mean=down.shared * data.fold(self.step, torch.zeros(1, dtype=torch.int64)[0]))


def test_a_step_keeps_its_carrys_form():
    method = Growing(Model(toy.plain_net, dtype=torch.float64), epochs=1)
    with pytest.raises(TypeError, match="another form"):
        checks.play(Vectorised(Job(method, toy.toy_clients()), fast=True), [(0, 1)])


@dataclasses.dataclass(frozen=True)
class SeveralMeans(FedAvg):
    """Two exact means of the same function with another number of models."""

    def losses(self, batch, models):
        return torch.stack([self.model.loss(theta, batch)[0] for theta in models])

    def local(self, client, down, data):
        three = data.mean(self.losses, [down.shared, 2 * down.shared, 3 * down.shared])
        single = data.mean(self.losses, [down.shared])
        return client, Up(mean=(three, single))

    def aggregate(self, server, cohort):
        assert cohort.mean[0].shape == (3,)
        assert cohort.mean[1].shape == (1,)
        return server + 0 * cohort.mean[1]


def test_means_of_different_shapes_are_different_records():
    make = lambda: SeveralMeans(Model(toy.plain_net, dtype=torch.float64), epochs=1)
    checks.play(Vectorised(Job(make(), toy.toy_clients()), fast=True), [(1, 3)])


def test_a_step_that_is_no_straight_line_is_recorded_anew():
    half = lambda x: (x[: x.shape[0] // 2].sum() * x,)
    rows = Rows((9, record(half, torch.ones(9, 3))), (4, record(half, torch.ones(4, 3))))
    assert rows(6) is None
    counted = lambda x: (x * torch.tensor([float(x.shape[0])]),)
    assert not Rows((8, record(counted, torch.ones(8, 3))), (4, record(counted, torch.ones(4, 3)))).alike


@pytest.mark.slow
def test_a_client_without_samples_beside_many():
    sizes = (*(3,) * 33, 0)
    clients = toy.toy_clients(sizes)
    make = lambda: FedAvg(Model(toy.plain_net, dtype=torch.float64), epochs=1, batch_size=2, lr=0.05)
    expected = checks.play(Sequential(Job(make(), clients)), [range(34)])
    checks.compare(checks.play(Vectorised(Job(make(), clients), fast=True), [range(34)]), expected, "recorded")


def test_labels_out_of_range_are_refused():
    clients = toy.toy_clients()
    wrong = dataclasses.replace(clients, test=dataclasses.replace(clients.test, y=clients.test.y + 7))
    with pytest.raises(Problem, match="not one of the 3 classes"):
        Vectorised(Job(FedAvg(Model(toy.plain_net)), wrong), fast=True)


def test_runs_of_different_methods_or_networks_do_not_train_together():
    clients, model = toy.toy_clients(), Model(toy.plain_net)
    job = lambda name, model: Job(methods()[name].load()(model), clients)
    with pytest.raises(Problem, match="same method"):
        Vectorised(job("fedavg", model), job("local", model))
    with pytest.raises(Problem, match="same network"):
        Vectorised(job("fedavg", model), job("fedavg", Model(toy.norm_net)))


def test_apple_runs():
    make = toy.maker(methods()["apple"])
    Federation(Sequential(Job(make(), toy.toy_clients()))).step()


def test_a_network_whose_size_needs_no_padding():
    net = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))  # 92 numbers, a multiple of four
    make = lambda: FedAvg(Model(net, dtype=torch.float64), epochs=1, batch_size=5)
    clients = toy.toy_clients((7, 5))
    expected = checks.play(Sequential(Job(make(), clients)), [(0, 1)])
    checks.compare(checks.play(Vectorised(Job(make(), clients), fast=True), [(0, 1)]), expected, "recorded")


def test_an_empty_piece():
    theta, g = torch.randn(3, 8), torch.randn(3, 8)
    function = lambda theta, g: (theta - 0.1 * torch.cat([g[:, :5], g[:, 5:], torch.zeros(0)], 1),)
    assert torch.allclose(Program(record(function, theta, g))(theta, g)[0], function(theta, g)[0])


def test_runs_with_models_of_their_own():
    jobs = [Job(toy.maker(methods()["fedbabu"])(epochs=1), toy.toy_clients(), seed=s) for s in (0, 3)]
    engine = Vectorised(*jobs)
    step([Federation(engine, run) for run in range(2)])


def test_arithmetic_on_constants_alone():
    x = torch.randn(2, 3)
    function = lambda x: (torch.zeros_like(x) + torch.ones_like(x),)
    assert torch.equal(Program(record(function, x))(x)[0], function(x)[0])


def test_labels_in_another_layout():
    z, y = torch.randn(3, 5, 4), torch.randint(0, 4, (5, 3))
    expected = torch.stack([F.cross_entropy(z[c], y[:, c], reduction="none") for c in range(3)])
    assert torch.allclose(vmap(operators.cross_entropy, (0, 1))(z, y), expected)


def test_some_channels_of_a_layer():
    x, w, v = torch.randn(2, 2, 3, 8, 8), torch.randn(2, 4, 3, 3, 3), torch.randn(2, 4, 3, 3, 3)
    conv = lambda x, w: operators.conv(x, w, None, Layer(3))
    actual = vmap(lambda x, w, v: conv(conv(x, w)[:, 1:], v))(x, w, v)
    expected = torch.stack([F.conv2d(F.conv2d(x[c], w[c])[:, 1:], v[c]) for c in range(2)])
    assert torch.allclose(actual, expected, atol=1e-4)


def test_a_result_beyond_the_arguments_that_is_one():
    x = torch.randn(3, 5)
    place = x.clone()
    actual = Program(record(lambda x: (x + 1, x), x))(place, into=[place])
    assert torch.equal(actual[1], x)


def test_a_batch_of_runs_and_a_run_alone_have_records_of_their_own():
    """The engine records for the clients of all runs, then for one run's."""
    make = lambda: FedAvg(Model(toy.plain_net, dtype=torch.float64), epochs=1, batch_size=5)
    tables = [toy.toy_clients((7, 5), seed=seed) for seed in (0, 1)]
    engine = Vectorised(*(Job(make(), clients, seed=seed) for seed, clients in enumerate(tables)), fast=True)
    federations = [Federation(engine, run) for run in range(2)]
    step(federations)
    for federation in federations:
        federation.step()
    for seed, federation in enumerate(federations):
        expected = Federation(Sequential(Job(make(), tables[seed], seed=seed)))
        expected.step()
        expected.step()
        assert checks.difference(federation.server, expected.server) < 1e-9


def test_what_is_kept_is_no_wrapper():
    """A table made first inside a trace outlives the trace: outside, it must be an ordinary tensor."""
    from perfed.core import random

    random._table.cache_clear()
    make = toy.maker(methods()["fedfomo"], "norm")
    checks.play(Vectorised(Job(make(epochs=1), toy.toy_clients((4, 3)), seed=5), fast=True), [(0, 1)])
    assert random._table.cache_info().currsize > 0
    table = random._table(torch.device("cpu"))
    assert not torch._is_functional_tensor(table)
    assert table.data_ptr() != 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_gradient_of_the_head_alone_goes_back_no_further(decay):
    """FedRep's first phase moves only the head, and so does the second gradient of FedRoD's step."""
    rod, rep = (methods()[name].load()(Model(small_cnn), weight_decay=decay) for name in ("fedrod", "fedrep"))
    theta, x, y = torch.randn(4, rod.model.width), torch.randn(4, 5, 3, 8, 8), torch.randint(3, (4, 5))

    def back_through_convolutions(step):
        batched = vmap(lambda theta, x, y: step(theta, Batch(x, y, None, torch.zeros(2, dtype=torch.long))))
        return sum("convolution_backward" in str(n.target) for n in record(batched, theta, x, y).nodes)

    descent = lambda only: lambda theta, batch: rep._descent(type(rep).gradient, only, (theta, theta[:0]), batch, ())
    assert back_through_convolutions(descent("head")) == 0
    assert back_through_convolutions(descent("body")) == 1
    both = lambda theta, batch: rod.step((theta, theta[:0], 0 * theta, theta[:0]), batch, theta[:3])
    assert back_through_convolutions(both) == 1


# ---------------------------------------------------------------------- what fails where it is recorded


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch):
    """The machine's own error costs time and one line, not the run."""
    from perfed.accel import loops

    def failing(*_):
        raise RuntimeError("NYI: Tensor.clone(memory_format) inside vmap\nis a long story")

    make = lambda: FedAvg(Model(toy.norm_net, dtype=torch.float64), epochs=1, batch_size=5)
    clients, cohorts, notices = toy.toy_clients((7, 5)), [(0, 1)] * 2, []
    expected = checks.play(Vectorised(Job(make(), clients)), cohorts)
    monkeypatch.setattr(loops, "record", failing)
    engine = Vectorised(Job(make(), clients), fast=True, notice=notices.append)
    checks.compare(checks.play(engine, cohorts), expected, "after all not recorded", tolerance=0)
    (notice,) = notices
    assert notice == (
        "recording the steps failed, so they run as they are, several times slower "
        "(RuntimeError: NYI: Tensor.clone(memory_format) inside vmap)"
    )
    assert engine.recording_seconds is None


def test_kernels_that_fail_are_left_alone(monkeypatch):
    """In an evaluation, too, and for several runs with starts of their own."""
    from perfed.accel import cohort_layers

    def failing(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(cohort_layers, "cross_entropy", failing)
    notices = []
    jobs = [Job(FedAvg(Model(small_cnn), epochs=1, batch_size=4), picture_clients(False), s) for s in (0, 3)]
    engine = Vectorised(*jobs, fast=True, notice=notices.append)
    federations = [Federation(engine, run) for run in range(2)]
    step(federations)
    for seed, federation in zip((0, 3), federations, strict=True):
        alone = Federation(Sequential(Job(FedAvg(Model(small_cnn), epochs=1, batch_size=4),
                                          picture_clients(False), seed)))  # fmt: skip
        alone.step()
        assert checks.difference(federation.server, alone.server) < 1e-5
        assert checks.difference(federation.evaluate().tables, alone.evaluate().tables) < 1e-3
    assert len(notices) == 1


@dataclasses.dataclass(frozen=True)
class Curious(FedAvg):
    """A step that looks at a number, which no batched engine can."""

    def step(self, carry, batch, given):
        return carry * 2 if carry.sum() > 0 else carry

    def local(self, client, down, data):
        return client, Up(mean=data.fold(self.step, down.shared))


@dataclasses.dataclass(frozen=True)
class Mistaken(FedAvg):
    """A step with a mistake."""

    def step(self, carry, batch, given):
        raise KeyError("mine")

    def local(self, client, down, data):
        return client, Up(mean=data.fold(self.step, down.shared))


@pytest.mark.parametrize(
    ("kind", "error", "words"), [(Curious, Problem, "over a tensor"), (Mistaken, KeyError, "mine")]
)
def test_errors_of_ones_own_code_come_out_as_they_are(kind, error, words):
    notices = []
    method = kind(Model(toy.plain_net, dtype=torch.float64), epochs=1)
    with pytest.raises(error, match=words):
        checks.play(Vectorised(Job(method, toy.toy_clients()), fast=True, notice=notices.append), [(0, 1)])
    assert not notices


def test_a_compiler_that_fails_is_left_alone():
    def backend(*_):
        raise RuntimeError("no compiler")

    torch._dynamo.register_backend(backend, name="failing")
    notices, make = [], lambda: FedAvg(Model(toy.plain_net, dtype=torch.float64), epochs=1, batch_size=5)
    clients = toy.toy_clients((5, 5))
    engine = Vectorised(Job(make(), clients), compile="failing", notice=notices.append)
    actual = checks.play(engine, [(0, 1)])
    checks.compare(actual, checks.play(Sequential(Job(make(), clients)), [(0, 1)]), "not compiled")
    assert len(notices) == 1
    assert notices[0].startswith("compiling the steps failed")


def test_dropout_as_a_function_is_not_compiled():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(F.dropout(x, 0.5, self.training))

    notices, make = [], lambda: FedAvg(Model(Net, dtype=torch.float64), epochs=1, batch_size=5)
    clients = toy.toy_clients((5, 5))
    engine = Vectorised(Job(make(), clients), compile="eager", notice=notices.append)
    actual = checks.play(engine, [(0, 1)])
    checks.compare(actual, checks.play(Sequential(Job(make(), clients)), [(0, 1)]), "not compiled")
    assert notices == ["steps whose dropout is a function are not compiled: they run as they are"]


def test_batch_norm_has_one_layout_under_vmap(monkeypatch):
    """cuDNN asks for the gradient in the layout of the input, which vmap can only give where there is one alone."""
    model = Model(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)))
    theta, x = torch.stack([model.init(0)] * 2), torch.randn(2, 4, 3, 8, 8)
    seen, plain = set(), F.batch_norm
    monkeypatch.setattr(F, "batch_norm", lambda x, *rest, **more: seen.add(x.dim()) or plain(x, *rest, **more))
    many = vmap(lambda t, x: model.apply(t, x, train=True)[0])(theta, x.to(memory_format=torch.channels_last_3d))
    assert seen == {3}
    alone = torch.stack([model.apply(theta[0], rows, train=True)[0] for rows in x])
    torch.testing.assert_close(many, alone)


@pytest.mark.parametrize("name", ["fedavg", "fedbabu"])  # all of the model, and a part of it
def test_every_client_is_clipped_by_its_own_norm(name):
    make = lambda clip: toy.maker(methods()[name])(epochs=1, clip=clip)
    clients, cohorts = toy.toy_clients((8, 3, 5)), [(0, 1, 2)]
    expected = checks.play(Sequential(Job(make(0.3), clients)), cohorts)
    checks.compare(checks.play(Vectorised(Job(make(0.3), clients), fast=True), cohorts), expected, "recorded", 1e-12)
    assert checks.difference(checks.play(Sequential(Job(make(0.0), clients)), cohorts).server, expected.server) > 1e-3
