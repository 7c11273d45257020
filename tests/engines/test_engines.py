"""What engines promise beyond the contract: refusals, tiny clients, streams, blocks, means."""

import functools
from dataclasses import dataclass

import pytest
import torch
from conftest import make_clients, norm_net, plain_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from perfed.contract import checks, toy
from perfed.core.clients import Clients, Split
from perfed.core.data import CHUNK, Plan
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Up, Uploads
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.random import derive, shuffle, uniform
from perfed.core.task import Regression
from perfed.engines.base import EvaluationRequest, Job
from perfed.engines.local import ClientData, Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation import reduce
from perfed.federation.federation import Federation, cohort_size
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.methods.pfedmb import PFedMB
from perfed.training.catalog import methods
from perfed.training.config import RunConfig
from perfed.training.engine import make_engine, pick_device, pick_engine

ENGINES = {
    "sequential": Sequential,
    "vectorised": Vectorised,
    "workers": functools.partial(Workers, workers=2),
}


def fedavg(**changed):
    base = {"lr": 0.05, "momentum": 0.9, "epochs": 2, "batch_size": 5}
    return FedAvg(Model(plain_net, dtype=torch.float64), **{**base, **changed})


@dataclass(frozen=True)
class Closure(FedAvg):
    """Its step holds a tensor from outside: in a block it would be another client's."""

    def local(self, client, down, data):
        held = down.shared * 2

        def step(self, carry, batch, given):
            return (carry[0] + held,)

        (w,) = data.fold(step.__get__(self), (down.shared,))
        return client, Up(mean=w)


@dataclass(frozen=True)
class Lambda(FedAvg):
    def local(self, client, down, data):
        (w,) = data.fold(lambda carry, batch, given: carry, (down.shared,))
        return client, Up(mean=w)


@dataclass(frozen=True)
class Partial(FedAvg):
    def step(self, held, carry, batch, given):
        return carry

    def local(self, client, down, data):
        (w,) = data.fold(functools.partial(self.step, down.shared), (down.shared,))
        return client, Up(mean=w)


@pytest.mark.parametrize("kind", [Closure, Lambda, Partial])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_step_that_holds_a_tensor_is_refused(kind, engine, clients):
    method = kind(Model(plain_net, dtype=torch.float64))
    with pytest.raises((TypeError, ClientError), match="`given`"):
        Federation(ENGINES[engine](Job(method, clients))).step()


def test_workers_report_a_failing_client(clients):
    engine = Workers(Job(Lambda(Model(plain_net, dtype=torch.float64)), clients), workers=2)
    with pytest.raises(
        RuntimeError, match=r"^client 'client_0' of Lambda: TypeError: a step .*`given`[^\n]*$"
    ) as caught:
        Federation(engine).step()
    assert "Traceback" in caught.value.__cause__.__notes__[0]  # for --debug
    assert not engine.workers  # nobody is left behind


def test_a_worker_that_dies_is_named(clients, monkeypatch):
    import os

    monkeypatch.setattr(FedAvg, "local", lambda *_: os._exit(1))
    with pytest.raises(RuntimeError, match="client 'client_2' of FedAvg: its worker process died 3 times"):
        Federation(Workers(Job(fedavg(), clients), workers=1)).step([2])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_below_one_batch_trains(engine, clients):
    method = Local(Model(plain_net, dtype=torch.float64), batch_size=64)
    federation = Federation(ENGINES[engine](Job(method, clients)))
    federation.step()
    federation.engine.close()
    start = federation.method.init_client()
    assert all(not torch.equal(state, start) for state in federation.engine.states[0].values())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    block=st.integers(0, 3),
)
def test_vectorised_equals_sequential_for_any_sizes(sizes, batch_size, epochs, block):
    clients = make_clients(tuple(sizes))
    make = lambda: FedAvg(Model(norm_net, dtype=torch.float64), batch_size=batch_size, epochs=epochs, momentum=0.9)
    everybody = [range(len(sizes))] * 2
    expected = checks.play(Sequential(Job(make(), clients)), everybody)
    checks.compare(checks.play(Vectorised(Job(make(), clients), block=block), everybody), expected, "vectorised")


def test_useful_share_is_counted():
    clients = make_clients((10, 10, 10))
    engine = Vectorised(Job(fedavg(batch_size=5), clients))
    Federation(engine).step()
    assert engine.useful == 1.0
    ragged = Vectorised(Job(fedavg(batch_size=5), make_clients((13, 4))))
    Federation(ragged).step()
    # Per epoch: 13 samples in three batches, 4 in one; executed slots 2*5 + 5 + 5, twice.
    assert ragged.useful == pytest.approx(17 / 20)
    padded = Vectorised(Job(fedavg(batch_size=5), make_clients((13, 4))), sizes=(2,))
    Federation(padded).step()
    assert padded.useful < ragged.useful


def test_convolutions_and_images_on_all_engines():
    draw = torch.Generator().manual_seed(0)

    def split(sizes):
        x = torch.randint(0, 256, (sum(sizes), 2, 6, 6), generator=draw, dtype=torch.uint8)
        return Split(x, torch.randint(0, 3, (sum(sizes),), generator=draw), sizes)

    mean, std = torch.tensor([0.4, 0.5]).view(2, 1, 1), torch.tensor([0.2, 0.3]).view(2, 1, 1)
    clients = Clients(("a", "b", "c"), split((7, 12, 3)), split((2, 2, 2)), split((4, 3, 2)), 3, mean, std)
    build = lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    make = lambda: FedAvg(Model(build, dtype=torch.float64), batch_size=4, epochs=2)
    everybody = [range(3)] * 2
    expected = checks.play(Sequential(Job(make(), clients)), everybody)
    for name in ("vectorised", "workers"):
        checks.compare(checks.play(ENGINES[name](Job(make(), clients)), everybody), expected, name)


@pytest.mark.parametrize("kind", [FedAvg, PFedMB])
def test_fine_tuning_is_the_same_on_all_engines(kind, clients):
    """Plain local training, and a method's own."""
    make = lambda: kind(Model(plain_net, dtype=torch.float64), batch_size=5, epochs=1, fine_tune=2)
    everybody = [range(len(clients))] * 2
    expected = checks.play(Sequential(Job(make(), clients)), everybody)
    for engine in (ENGINES["vectorised"], ENGINES["workers"], functools.partial(Vectorised, sizes=(2,))):
        checks.compare(checks.play(engine(Job(make(), clients)), everybody), expected, str(engine))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_mean_is_exact_over_chunks(engine):
    sizes = (CHUNK * 2 + 17, 5)
    clients = make_clients(sizes)
    method = fedavg()
    theta = method.init_server(2)
    down = method.broadcast(theta, torch.arange(2))
    (reply,) = engine(Job(method, clients)).evaluate([EvaluationRequest(0, 1, [0, 1], down)])
    for id in (0, 1):
        first, count = clients.test.start[id], clients.test.size[id]
        logits = method.model.apply(theta, clients.test.x[first : first + count])[0]
        right = (logits.argmax(1) == clients.test.y[first : first + count]).double().mean()
        assert reply.scores["personal"]["test"]["accuracy"][id].item() == pytest.approx(right.item(), abs=1e-12)


@dataclass(frozen=True)
class OneByOne(FedAvg):
    """FedAvg whose model nobody knows to be the same for all clients."""

    evaluates = "own"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [(4, 0, 2 * CHUNK + 3, 1, 9 * CHUNK, 0, 7, 0, 0), (0, 0, 3), (5, 0), (1, 8 * CHUNK)])
def test_a_shared_model_is_scored_as_if_client_by_client(engine, sizes):
    """Many small clients in one piece, a large one in several passes, clients without samples anywhere."""
    whole = make_clients((6,) * len(sizes))
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), *whole.train.x.shape[1:], generator=draw, dtype=torch.float64)
    test = Split(x, torch.randint(0, 3, (len(x),), generator=draw), sizes)
    clients = Clients(whole.names, whole.train, whole.val, test, 3)
    method = FedAvg(Model(norm_net, dtype=torch.float64), batch_size=5)
    federation = Federation(ENGINES[engine](Job(method, clients)))
    federation.step()
    scores, models = federation.evaluate().tables, {}
    assert checks.difference(federation.evaluate(models.__setitem__).tables, scores) == 0
    federation.engine.close()
    assert all(torch.equal(models[id]["personal"], federation.server) for id in range(len(sizes)))
    own = Federation(Sequential(Job(OneByOne(method.model, batch_size=5), clients)), server=federation.server)
    assert checks.difference(scores, own.evaluate().tables) < 1e-12
    assert scores["personal"]["test"]["loss"].isnan().tolist() == [size == 0 for size in sizes]


def test_what_is_not_one_model_is_scored_client_by_client():
    model = Model(plain_net, dtype=torch.float64)
    assert FedAvg(model).one_for_all
    assert not any(method.one_for_all for method in (FedAvg(model, fine_tune=1), Local(model)))


@dataclass(frozen=True)
class Neighbours(FedAvg):
    """Predicts with a network and a table of the client's own samples: a tree that is no theta."""

    def first(self, batch, _):
        weight = torch.ones_like(batch.x[:, 0]) if batch.weight is None else batch.weight
        return (weight[:, None] * batch.x).sum(0) / weight.sum()

    def personalise(self, client, down, data):
        return {"personal": {"theta": down.shared, "mean": data.mean(self.first)}, "global": (down.shared, [])}

    def predict(self, model, x):
        if isinstance(model, tuple):
            return self.model.apply(model[0], x)[0]
        return self.model.apply(model["theta"], x - model["mean"])[0]

    evaluates = "adapted"


@pytest.mark.parametrize("engine", ENGINES)
def test_models_may_be_trees_that_a_method_predicts_with(engine, clients):
    method = Neighbours(Model(plain_net, dtype=torch.float64), batch_size=5)
    federation, saved = Federation(ENGINES[engine](Job(method, clients))), {}
    federation.step()
    scores = federation.evaluate(saved.__setitem__, full=True)
    federation.engine.close()
    for id, size in enumerate(clients.test.size):
        rows = slice(clients.test.start[id], clients.test.start[id] + size)
        x, y = clients.test.x[rows].double(), clients.test.y[rows]
        mean = clients.train.x[clients.train.start[id] :][: clients.train.size[id]].double().mean(0)
        assert torch.allclose(saved[id]["personal"]["mean"], mean)
        out = method.model.apply(saved[id]["personal"]["theta"], x - mean)[0]
        accuracy = (out.argmax(1) == y).double().mean()
        assert scores["personal"]["test"]["accuracy"][id].item() == pytest.approx(accuracy.item())
        full = method.model.task.full(out, y, [size])
        assert scores["personal"]["test"]["macro_f1"][id].item() == pytest.approx(full["macro_f1"].item())


def test_a_tree_needs_a_method_that_predicts_with_it(clients):
    @dataclass(frozen=True)
    class Silent(Neighbours):
        def predict(self, model, x):
            return Method.predict(self, model, x)

    federation = Federation(Sequential(Job(Silent(Model(plain_net, dtype=torch.float64)), clients)))
    with pytest.raises(Problem, match=r"not a dict of 'theta', 'mean': a model of another form needs a function `pred"):
        federation.evaluate()
    tuned = Federation(Sequential(Job(Neighbours(Model(plain_net, dtype=torch.float64), fine_tune=1), clients)))
    with pytest.raises(Problem, match="needs a function `tuned"):
        tuned.evaluate()


def test_a_model_of_another_task_than_its_clients_is_refused(clients):
    model = Model(plain_net, task=Regression(3))
    words = r"the model learns regression of 3 targets, but its clients' labels are of classification of 3 classes"
    with pytest.raises(Problem, match=words):
        Sequential(Job(FedAvg(model), clients))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_test_samples_has_no_score(engine):
    whole = make_clients((6, 6))
    empty = Clients(whole.names, whole.train, whole.val, Split(whole.test.x[:3], whole.test.y[:3], (3, 0)), 3)
    federation = Federation(ENGINES[engine](Job(fedavg(), empty)))
    accuracy = federation.evaluate()["personal"]["test"]["accuracy"]
    federation.engine.close()
    assert accuracy.isnan().tolist() == [False, True]


def test_every_epoch_sees_every_sample_once():
    clients = make_clients((23,))
    data = ClientData(clients, 0, derive(3), fedavg(epochs=3))
    seen = [tuple(row) for b in data._batches(Plan(5, 3, None), 0) for row in b.x.tolist()]
    assert len(seen) == 69
    for epoch in range(3):
        assert sorted(seen[epoch * 23 : (epoch + 1) * 23]) == sorted(map(tuple, clients.train.x.tolist()))
    assert seen[:23] != seen[23:46]  # shuffled anew


def test_streams_and_steps():
    clients = make_clients((23,))
    data = ClientData(clients, 0, derive(3), fedavg())
    take = lambda plan, draw=0: torch.cat([b.x for b in data._batches(plan, draw)])
    assert torch.equal(take(Plan(5, 2, None)), take(Plan(5, 2, None)))  # same stream, same batches
    assert not torch.equal(take(Plan(5, 2, None)), take(Plan(5, 2, None, stream=1)))
    assert not torch.equal(take(Plan(5, 2, None)), take(Plan(5, 2, None), draw=1))
    assert len(list(data._batches(Plan(5, None, 7), 0))) == 7
    assert [int(data.steps()), int(data.steps(epochs=1)), int(data.steps(steps=7))] == [10, 5, 7]


@dataclass(frozen=True)
class Draws(FedAvg):
    """Two batches a step and a given number of steps: what meta-learning methods use."""

    def two(self, carry, batches, given):
        first, second = batches
        w = carry[0] - self.lr * self.model.grad(carry[0], first)[0]
        return (carry[0] - self.lr * self.model.grad(w, second)[0] + given,)

    def local(self, client, down, data):
        (w,) = data.fold(self.two, (down.shared,), data.size / 1000.0, steps=4, draws=2, stream=3)
        return client, Up(mean=w - down.shared, weight=1.0)


def test_several_draws_a_step(clients):
    make = lambda: Draws(Model(plain_net, dtype=torch.float64), batch_size=4)
    expected = checks.play(Sequential(Job(make(), clients, seed=5)))
    for engine in (Vectorised, functools.partial(Vectorised, block=2, sizes=(2,))):
        checks.compare(checks.play(engine(Job(make(), clients, seed=5))), expected, "draws")


def mean(rows, weight, group=None, groups=1, used=None):
    """The cohort that a server is given."""
    uploads = Uploads(torch.arange(len(weight)), rows, (), weight, group)
    return reduce.mean(uploads, groups, Sequential(Job(fedavg(), make_clients((3,)))).weighted_sum, used)


def test_means_are_weighted_and_grouped():
    rows = torch.arange(8.0).view(4, 2)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    plain = mean({"a": rows}, weight)
    torch.testing.assert_close(plain.mean["a"], (weight[:, None] * rows).sum(0) / 10)
    assert plain.weight == 10
    grouped = mean(rows, weight, torch.tensor([0, 2, 0, 2]), 3)
    torch.testing.assert_close(grouped.mean[0], (rows[0] + 3 * rows[2]) / 4)
    assert not grouped.mean[1].any()  # an empty group changes nothing
    assert grouped.weight.tolist() == [4, 0, 6]


def test_size_ratio_of_ten_thousand():
    rows = torch.tensor([[1e-3], [1.0]])
    assert mean(rows, torch.tensor([10_000, 1])).mean.item() == pytest.approx((10_000 * 1e-3 + 1) / 10_001, rel=1e-6)


def test_random_streams():
    keys = derive(torch.tensor(5), torch.arange(1000))
    assert keys.unique().numel() == 1000
    assert torch.equal(derive(5, 7), derive(torch.tensor(5), torch.tensor(7)))  # integers and tensors alike
    draws = uniform(derive(1), (20_000,), torch.float64)
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 0.01
    order = shuffle(derive(torch.tensor(1), torch.arange(3)), torch.tensor([4, 6, 1]), 6)
    assert [sorted(x for x in row if x >= 0) for row in order.tolist()] == [[0, 1, 2, 3], [*range(6)], [0]]
    first = [int(shuffle(derive(k)[None], torch.tensor([5]), 5)[0, 0]) for k in range(2000)]
    counts = torch.bincount(torch.tensor(first), minlength=5)
    assert (counts - 400).abs().max() < 80  # every sample comes first equally often


def test_cohorts_follow_seed_and_round_alone(clients):
    pick = lambda method: [
        Federation(Sequential(Job(method, clients, 4, cohort=2)), round=r).sample() for r in range(20)
    ]
    cohorts = pick(fedavg())
    assert cohorts == pick(Local(Model(plain_net, dtype=torch.float64)))
    assert len({tuple(c) for c in cohorts}) > 5
    assert all(c == sorted(set(c)) and len(c) == 2 for c in cohorts)
    assert [cohort_size(20, share) for share in (1.0, 0.25, 0.3, 0.01)] == [20, 5, 6, 1]


def test_picking_an_engine():
    assert pick_engine(RunConfig(), "cuda", 5) == "vectorised"
    assert pick_engine(RunConfig(workers=2), "cpu", 5) == "workers"
    assert pick_engine(RunConfig(workers=1), "cpu", 5) == "sequential"
    assert pick_engine(RunConfig(workers=2), "cpu", 1) == "sequential"
    assert pick_engine(RunConfig(engine="vectorised"), "cpu", 5) == "vectorised"
    with pytest.raises(Problem, match="trains on the CPU"):
        pick_engine(RunConfig(engine="workers"), "cuda", 5)
    with pytest.raises(Problem, match="auto, cpu or cuda"):
        pick_device("tpu")


def test_a_method_that_cannot_be_vectorised_runs_one_by_one(clients):
    @dataclass(frozen=True)
    class Single(FedAvg):
        vectorised = False

    method = Single(Model(plain_net))
    assert make_engine("vectorised", [Job(method, clients)], RunConfig()).name == "sequential"
    assert make_engine("vectorised", [Job(fedavg(), clients)], RunConfig()).name == "vectorised"


@pytest.mark.slow
def test_several_methods_and_instances_compiled_in_one_process(clients):
    """A cache keyed by a function's name would give the second instance the first one's settings."""
    for name, changed in (("fedprox", {"mu": 0.1}), ("fedprox", {"mu": 1.0}), ("fedavg", {}), ("fedprox", {"lr": 0.3})):
        make = toy.maker(methods()[name], "plain")
        kind = lambda: make(epochs=1, **changed)  # noqa: B023
        engine = Vectorised(Job(kind(), clients), compile="aot_eager", sizes=(3,))
        expected = checks.play(Sequential(Job(kind(), clients)), toy.COHORTS[:1])
        checks.compare(checks.play(engine, toy.COHORTS[:1]), expected, f"{name} {changed}")


@dataclass(frozen=True)
class Named(FedAvg):
    def scaled(self, carry, batch, given, scale=1.0):
        return carry

    def local(self, client, down, data):
        (w,) = data.fold(functools.partial(self.scaled, scale=0.5), (down.shared,))
        return client, Up(mean=w)


@dataclass(frozen=True)
class Converting(FedAvg):
    def step(self, carry, batch, given):
        return (carry[0].float(),)

    def local(self, client, down, data):
        (w,) = data.fold(self.step, (down.shared,))
        return client, Up(mean=w)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_what_a_batched_engine_would_do_otherwise_is_refused_by_all(engine, clients):
    with pytest.raises((TypeError, ClientError), match="by place, not by name"):
        Federation(ENGINES[engine](Job(Named(Model(plain_net, dtype=torch.float64)), clients))).step()
    with pytest.raises((TypeError, ClientError), match="another form"):
        Federation(ENGINES[engine](Job(Converting(Model(plain_net, dtype=torch.float64)), clients))).step()


def test_a_client_without_training_samples_takes_no_step():
    whole = make_clients((7, 1, 12))
    train = Split(
        torch.cat([whole.train.x[:7], whole.train.x[8:]]), torch.cat([whole.train.y[:7], whole.train.y[8:]]), (7, 0, 12)
    )
    clients = Clients(whole.names, train, whole.val, whole.test, 3)
    outcomes = [checks.play(engine(Job(fedavg(), clients)), [range(3)]) for engine in (Sequential, Vectorised)]
    checks.compare(outcomes[1], outcomes[0], "vectorised")


def test_steps_beyond_an_epoch_for_small_and_large_clients():
    """Forty steps are thirteen epochs for one client and not one for another."""

    @dataclass(frozen=True)
    class Steps(FedAvg):
        def local(self, client, down, data):
            return client, Up(mean=self.descend(down.shared, data, steps=40) - down.shared)

    clients = make_clients((12, 300, 4))
    make = lambda: Steps(Model(plain_net, dtype=torch.float64), batch_size=4, lr=0.02)
    outcomes = [checks.play(engine(Job(make(), clients)), [range(3)]) for engine in (Sequential, Vectorised)]
    checks.compare(outcomes[1], outcomes[0], "vectorised")
