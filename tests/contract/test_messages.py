"""What a method can say, in toys that need it, on every engine."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from everywhere import ENGINES, SIZES, agrees, everywhere, run, toy_model

from perfed.contract import toy
from perfed.core.errors import Problem
from perfed.core.messages import Up
from perfed.core.model import average
from perfed.core.random import derive, normal, uniform
from perfed.methods.fedavg import FedAvg

SETTINGS = dict(lr=0.05, epochs=2, batch_size=5)

# ---------------------------------------------------------------------- Batch.index


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Each client counts how often it met each of its samples, and learns less from those it knows."""

    def init_client(self):
        return torch.zeros(max(SIZES), dtype=self.model.dtype)

    def known(self, theta, batch, given):
        loss = lambda theta, batch, train: (
            average(F.cross_entropy(self.model.apply(theta, batch.x)[0], batch.y, reduction="none")
                    / (1 + given[batch.index]), batch.weight), theta)  # fmt: skip
        g, theta, _ = self.model.grad(theta, batch, loss)
        return g, theta

    def visit(self, met, batch, given):
        once = torch.ones_like(batch.y, dtype=met.dtype) if batch.weight is None else batch.weight
        return met.index_add(0, batch.index, once)

    def meetings(self, batch, met):
        return average(met[batch.index], batch.weight)

    def local(self, client, down, data):
        theta = self.descend(down.shared, data, self.known, client)
        met = data.fold(self.visit, client)
        means = torch.stack([data.mean(self.meetings, met, split) for split in ("train", "val")])
        return met, Up(mean=theta - down.shared, own=means)

    def aggregate(self, server, cohort):
        return server + cohort.mean + 1e-3 * cohort.own.sum()


def remembering():
    return Remembering(toy_model(), **SETTINGS)


@everywhere
def test_samples_have_a_number(engine, tmp_path):
    agrees(remembering, engine, tmp_path)


def test_every_sample_is_met_once_an_epoch():
    met = run(remembering, rounds=1).states["0"]
    epochs = met[0]
    assert epochs in (1, 2)  # a straggler's are fewer
    assert torch.equal(met, (torch.arange(max(SIZES)) < SIZES[0]) * epochs)


@everywhere
def test_numbers_of_several_draws(engine, tmp_path):
    agrees(drawing, engine, tmp_path)


@dataclass(frozen=True)
class Drawing(Remembering):
    def visit(self, met, batch, given):
        return super().visit(super().visit(met, batch[0], given), batch[1], given)

    def local(self, client, down, data):
        return data.fold(self.visit, client, draws=2, steps=3), Up(mean=0 * down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean


def drawing():
    return Drawing(toy_model(), **SETTINGS)


def test_what_no_step_reads_is_not_made():
    pytest.importorskip("triton")
    from perfed.engines.base import Job
    from perfed.engines.vectorised import Vectorised
    from perfed.federation.federation import Federation

    for make, reads in ((remembering, True), (lambda: FedAvg(toy_model(), **SETTINGS), False)):
        engine = Vectorised(Job(make(), toy.toy_clients(SIZES), seed=5), fast=True)
        Federation(engine).step()
        assert engine.runner.recorder is not None
        assert any(loop.looks_up for loop in engine.runner.recorder.loops.values()) == reads


# ---------------------------------------------------------------------- weights of tensors and of entries


@dataclass(frozen=True)
class Curved(FedAvg):
    """FedCurv's sums: models by samples, importances by clients, and a mean in which each entry has its importance."""

    @property
    def groups(self):
        return 2

    def init_server(self, clients):
        w = self.model.init(self.seed)
        return {"w": w, "sum": 0 * w, "by_entry": 0 * w, "rows": w.new_zeros(2, 3), "total": w.new_zeros(2)}

    def local(self, client, down, data):
        w = self.descend(down.shared["w"], data)
        change = w - down.shared["w"]
        # Importances of 0: nobody has the first four entries, and one client alone the next.
        some = change.abs() * (torch.arange(len(change)) >= torch.where(data.size == 12, 4, 8))
        rows = torch.stack([change[:3], change[3:6]])
        mean = {"w": change, "sum": change**2, "by_entry": change, "rows": rows}
        weight = {"w": None, "sum": 1.0, "by_entry": some, "rows": some[8:10, None]}
        return client, Up(mean=mean, weight=weight, group=(data.size > 8).long())

    def aggregate(self, server, cohort):
        mean, weight = cohort.mean, cohort.weight
        assert all(torch.equal(mean["by_entry"] == 0, weight["by_entry"] == 0) for _ in [0])
        return {
            "w": server["w"] + mean["w"].mean(0),
            "sum": server["sum"] + (mean["sum"] * weight["sum"][:, None]).sum(0).to(server["w"].dtype),
            "by_entry": server["by_entry"] + mean["by_entry"].sum(0),
            "rows": server["rows"] + mean["rows"].mean(0),
            "total": weight["w"].to(server["w"].dtype),
        }

    def personalise(self, client, down, data):
        return down.shared["w"] + 0.1 * down.shared["by_entry"]


def curved(dtype=torch.float64):
    return Curved(toy_model(dtype=dtype), **SETTINGS)


@everywhere
def test_weights_of_tensors_and_entries(engine, tmp_path):
    agrees(curved, engine, tmp_path)


# ---------------------------------------------------------------------- normal draws


@dataclass(frozen=True)
class Bayes(FedAvg):
    """A distribution over weights: a mean and a spread, trained through samples drawn from it."""

    def init_server(self, clients):
        return {"mean": self.model.init(self.seed), "rho": self.model.zeros() - 3.0}

    def sampled(self, carry, batch, given):
        noise = normal(derive(batch.key, 7), (self.model.width,), self.model.dtype)
        spread = F.softplus(carry["rho"])
        g, fresh, _ = self.model.grad(carry["mean"] + spread * noise, batch)
        slope = torch.sigmoid(carry["rho"])
        return {
            "mean": self.model.weights.only(carry["mean"] - self.lr * g, fresh),
            "rho": self.model.weights.only(carry["rho"] - self.lr * (g * noise - 0.01 / spread) * slope),
        }

    def local(self, client, down, data):
        after = data.fold(self.sampled, down.shared)
        return client, Up(mean={name: after[name] - down.shared[name] for name in after})

    def aggregate(self, server, cohort):
        return {name: server[name] + cohort.mean[name] for name in server}

    def personalise(self, client, down, data):
        return down.shared["mean"]

    def global_model(self, server):
        return server["mean"]


def bayes(dtype=torch.float64):
    return Bayes(toy_model(dtype=dtype), **SETTINGS)


@everywhere
def test_normal_draws(engine, tmp_path):
    agrees(bayes, engine, tmp_path)


# ---------------------------------------------------------------------- outputs from features


@dataclass(frozen=True)
class Invented(FedAvg):
    """Clients train on representations that nobody has, and on their own samples through the head alone."""

    def init_server(self, clients):
        z = uniform(derive(3), (4, *self.model.representation), self.model.dtype)
        return {"w": self.model.init(self.seed), "z": z}

    def invented(self, theta, batch, given):
        y = torch.arange(4) % self.model.outputs

        def loss(theta, batch, train):
            _, z, fresh = self.model.features(theta, batch, train)
            own = F.cross_entropy(self.model.classify(theta, z), batch.y, reduction="none")
            return average(own, batch.weight) + F.cross_entropy(self.model.classify(theta, given), y), fresh

        g, theta, _ = self.model.grad(theta, batch, loss)
        return g, theta

    def local(self, client, down, data):
        w = self.descend(down.shared["w"], data, self.invented, down.shared["z"])
        loss = lambda z: F.cross_entropy(self.model.classify(w, z), torch.arange(4) % self.model.outputs)
        z = down.shared["z"] - torch.func.grad(loss)(down.shared["z"])
        return client, Up(mean={"w": w - down.shared["w"], "z": z - down.shared["z"]})

    def aggregate(self, server, cohort):
        return {name: server[name] + cohort.mean[name] for name in server}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]


def invented(network="plain", dtype=torch.float64):
    return Invented(toy_model(network, dtype), **SETTINGS)


@everywhere
def test_outputs_from_features(engine, tmp_path):
    agrees(invented, engine, tmp_path)


# ---------------------------------------------------------------------- gradients of samples


@dataclass(frozen=True)
class Fisher(FedAvg):
    """Each client sends how much each entry of its model matters: the mean of the squared gradients of its samples."""

    def matters(self, batch, theta):
        assert len(batch.y) <= 4
        return average(self.model.grads(theta, batch) ** 2, batch.weight)

    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        return client, Up(mean=w - down.shared, weight=1e-6 + data.mean(self.matters, w, chunk=4))


def fisher(network="plain", dtype=torch.float64):
    return Fisher(toy_model(network, dtype), **SETTINGS)


@everywhere
def test_gradients_of_samples_in_chunks(engine, tmp_path):
    agrees(fisher, engine, tmp_path)


def test_a_chunk_has_a_sample():
    @dataclass(frozen=True)
    class Empty(FedAvg):
        def local(self, client, down, data):
            return client, Up(mean=data.mean(self.zero, down.shared, chunk=0))

        def zero(self, batch, theta):
            return theta

    with pytest.raises(Problem, match="at least 1, not 0"):
        run(lambda: Empty(toy_model(), **SETTINGS), rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [invented, fisher])
def test_kernels_in_gradients_of_samples_and_heads(make):
    """In float32, where convolutions, norms and losses of a block are kernels."""
    pytest.importorskip("triton")
    start = make("conv", torch.float32)
    expected = run(lambda: start, rounds=1)
    actual = run(lambda: start, ENGINES["recorded"], rounds=1)
    weights = lambda server: server["w"] if isinstance(server, dict) else server
    moved = (weights(expected.server) - start.model.init(0)).norm()
    assert (weights(actual.server) - weights(expected.server)).norm() < 1e-3 * moved
