"""What a method can say, in toys that need it, on every engine."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from everywhere import ENGINES, SIZES, agrees, everywhere, run, toy_model
from torch import nn

import perfed
from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.further import further_model, models_of
from perfed.core.messages import Down, Up
from perfed.core.model import Model, average
from perfed.core.random import derive, normal, uniform
from perfed.core.width import width_mask
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation, step
from perfed.methods.fedavg import FedAvg
from perfed.studies import measures

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
        w = self.model.init(self.context.seed)
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
        return {"mean": self.model.init(self.context.seed), "rho": self.model.zeros() - 3.0}

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
        return {"w": self.model.init(self.context.seed), "z": z}

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


# ---------------------------------------------------------------------- further networks


@dataclass(frozen=True)
class Generating(FedAvg):
    """Clients learn from a generator of representations, which has dropout, and train it on their own ones."""

    noise: int = hyper(2, "numbers that a representation is made of", at_least=1)

    @further_model
    def generator(self):
        """From noise and a class to a representation."""
        (features,) = self.model.representation
        inputs = self.noise + self.model.outputs
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, features))

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "G": self.generator.init(self.context.seed)}

    def generated(self, G, batch, train=False):
        eps = normal(derive(batch.key, 1), (len(batch.y), self.noise), self.model.dtype)
        y = (batch.y[:, None] == torch.arange(self.model.outputs)).to(self.model.dtype)
        return self.generator.apply(G, torch.cat([eps, y], 1), train, batch.weight, derive(batch.key, 2))

    def step(self, carry, batch, given):
        w, G = carry["w"], carry["G"]

        def learns(w, batch, train):
            value, fresh = self.model.loss(w, batch, train)
            z, _ = self.generated(given, batch)
            each = F.cross_entropy(self.model.classify(w, z), batch.y, reduction="none")
            return value + average(each, batch.weight), fresh

        def generates(G, batch, train):
            z, fresh = self.generated(G, batch, train)
            _, own, _ = self.model.features(w, batch)
            return average(((z - own) ** 2).sum(1), batch.weight), fresh

        g, fresh, _ = self.model.grad(w, batch, learns)
        g_G, fresh_G, _ = self.generator.grad(G, batch, generates)
        return {"w": fresh - self.lr * g, "G": fresh_G - self.lr * g_G}

    def local(self, client, down, data):
        after = data.fold(self.step, down.shared, down.shared["G"])
        start = self.generator.init(self.context.seed)  # as the server's first
        return client, Up(mean={name: after[name] - down.shared[name] for name in after} | {"far": after["G"] - start})

    def aggregate(self, server, cohort):
        return {name: server[name] + cohort.mean[name] for name in server}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]


def generating():
    return Generating(toy_model(), **SETTINGS)


@everywhere
def test_a_further_network(engine, tmp_path):
    agrees(generating, engine, tmp_path)


def test_bytes_of_a_further_network_are_its_own():
    traffic, method = run(generating, rounds=1).traffic, Federation(Sequential(Job(generating(), toy.toy_clients())))
    w, G = method.engine.method.model, method.engine.method.generator
    assert traffic["down_shared"] == 3 * 8 * (w.size + G.size)
    assert traffic["up_mean"] == 3 * 8 * (w.size + 2 * G.size)
    assert G.size % 4  # some of a row is padding


def test_thetas_of_two_networks_have_two_lengths():
    @dataclass(frozen=True)
    class Twins(FedAvg):
        @further_model
        def first(self):
            return nn.Linear(6, 11)

        @further_model
        def second(self):
            return nn.Linear(5, 13)

    model = Model(lambda: nn.Linear(4, 16), dtype=torch.float64)
    method = Twins(model)
    assert [(each.size, each.width) for each in models_of(method).values()] == [(80, 80), (77, 84), (78, 88)]
    assert method.first is method.first
    assert models_of(FedAvg(model)) == {"model": model}


def test_several_runs_with_further_networks():
    jobs = [Job(generating(), toy.toy_clients(SIZES), seed=seed) for seed in (0, 3)]
    engine = Vectorised(*jobs)
    together = [Federation(engine, place) for place in range(2)]
    step(together)
    for federation, job in zip(together, jobs, strict=True):
        alone = Federation(Sequential(job))
        alone.step()
        assert checks.difference(federation.server, alone.server) < 1e-12


def test_memory_counts_further_networks(tmp_path):
    (tmp_path / "generates.py").write_text(GENERATES)
    tiny = {"clients": 3, "rounds": 1, "epochs": 1, "hidden": 4, "engine": "sequential", "baseline": False}
    ran = perfed.run(str(tmp_path / "generates.py"), out=tmp_path / "run", **tiny)
    entry = ran.entries["generates"]
    numbers = (64 * 4 + 4 + 4 * 10 + 10) + (3 * 10 + 10)
    assert measures.memory(ran.config, entry, ran.about)["server_state"] == 4 * numbers


GENERATES = '''"""Generates: FedAvg beside a network that nobody trains."""

from dataclasses import dataclass

from torch import nn

from perfed.core.further import further_model
from perfed.core.messages import Down, Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Generates(FedAvg):
    @further_model
    def generator(self):
        return nn.Linear(3, self.model.outputs)

    def init_server(self, clients):
        return {"w": self.model.init(self.context.seed), "G": self.generator.init(self.context.seed)}

    def local(self, client, down, data):
        return client, Up(mean=self.descend(down.shared["w"], data) - down.shared["w"])

    def aggregate(self, server, cohort):
        return {"w": server["w"] + cohort.mean, "G": server["G"]}

    def personalise(self, client, down, data):
        return down.shared["w"]

    def global_model(self, server):
        return server["w"]
'''


# ---------------------------------------------------------------------- masks


@dataclass(frozen=True)
class Narrow(FedAvg):
    """HeteroFL: every second client trains half of each layer; each entry's mean is that of the clients who have it."""

    narrow: float = hyper(0.5, "width of every second client", above=0, at_most=1)

    def masks(self, ids):
        widths = torch.stack([width_mask(self.model, share) for share in (self.narrow, 1.0)])
        return widths[ids % 2]

    def broadcast(self, server, ids):
        return Down(shared=server, mask=self.masks(ids))

    def show(self, server, ids):
        return Down(shared=server)

    def inside(self, theta, batch, mask):
        g, fresh, _ = self.model.grad(theta, batch)
        return torch.where(mask, g, 0), torch.where(mask, fresh, theta)

    def local(self, client, down, data):
        w = self.descend(down.shared, data, self.inside, down.mask)
        # What lies outside is neither sent nor used.
        return client, Up(mean=torch.where(down.mask, w - down.shared, torch.nan), weight=1.0, mask=down.mask)


@dataclass(frozen=True)
class NarrowByOne(Narrow):
    """Clients of two groups, each evaluated at its own width; a row for each client, and a tensor without entries."""

    evaluates = "own"

    @property
    def groups(self):
        return 2

    def broadcast(self, server, ids):
        return Down(shared=(server,), own={"theta": server.expand(len(ids), -1), "id": ids}, mask=self.masks(ids))

    def show(self, server, ids):
        return self.broadcast(server, ids)

    def local(self, client, down, data):
        (w,) = down.shared
        change = self.descend(w, data, self.inside, down.mask) - down.own["theta"]
        mean = {"w": change, "n": data.size.to(change.dtype)}
        group = (down.own["id"] > 1).long()
        return client, Up(mean, weight={"w": change.abs(), "n": None}, mask=down.mask, group=group)

    def aggregate(self, server, cohort):
        return server + cohort.mean["w"].sum(0) + 1e-6 * cohort.mean["n"].sum()

    def personalise(self, client, down, data):
        return down.own["theta"]


def narrow(**changed):
    return Narrow(toy_model("norm"), **SETTINGS, **changed)


def narrow_by_one():
    return NarrowByOne(toy_model(), **SETTINGS)


@everywhere
@pytest.mark.parametrize("make", [narrow, narrow_by_one])
def test_masks(engine, make, tmp_path):
    agrees(make, engine, tmp_path)


def test_all_at_full_width_is_a_uniform_mean():
    @dataclass(frozen=True)
    class Uniform(FedAvg):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            return state, Up(up.mean, weight=1.0)

    full, plain = run(lambda: narrow(narrow=1.0)), run(lambda: Uniform(toy_model("norm"), **SETTINGS))
    assert checks.difference(full.server, plain.server) == 0
    assert full.traffic == plain.traffic


def test_bytes_are_counted_by_masks():
    for make in (narrow, narrow_by_one):
        federation = Federation(Sequential(Job(make(), toy.toy_clients(), seed=5)))
        method, traffic = federation.method, federation.traffic
        federation.step([0, 1, 2])
        inside = 8 * int(method.masks(torch.arange(3)).sum())
        assert inside < 8 * 3 * method.model.size
        assert traffic.down_shared == inside
        assert traffic.up_mean == (inside if make is narrow else 2 * inside + 3 * 8)
        assert traffic.down_own == (0 if make is narrow else inside + 3 * 8)


def test_entries_that_nobody_has_stay_as_they_are():
    federation = Federation(Sequential(Job(narrow(), toy.toy_clients(), seed=5)))
    before, mask = federation.server, federation.method.masks(torch.tensor([0]))[0]
    federation.step([0, 2])
    assert torch.equal((federation.server != before) & ~mask, torch.zeros_like(mask))
    assert ((federation.server != before) & mask)[federation.method.model.head.mask].any()


@pytest.mark.parametrize(
    ("down", "says"),
    [
        (lambda w, n: Down(w, mask=torch.ones(n, len(w))), "Down.mask is True or False .* not float32 of shape"),
        (lambda w, n: Down(w, mask=w > 0), "a row for each of 5 clients, not bool of shape"),
        (
            lambda w, n: Down(w, mask=torch.ones(n, 3) > 0),
            "rows of 3 entries, but no tensor of the message has so many",
        ),
    ],
)
def test_masks_that_cannot_be(down, says):
    @dataclass(frozen=True)
    class Masks(FedAvg):
        def broadcast(self, server, ids):
            return down(server, len(ids))

    with pytest.raises(Problem, match=says):
        Federation(Sequential(Job(Masks(toy_model()), toy.toy_clients()))).step()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (lambda w: w, "sends a mask of float64 of shape"),
        (lambda w: w[None] > 0, "sends a mask of bool of shape"),
        (lambda w: w[:3] > 0, "a mask of 3 entries, but no tensor in Up.mean has so many"),
    ],
)
def test_masks_of_uploads_that_cannot_be(mask, says):
    @dataclass(frozen=True)
    class Masks(FedAvg):
        def local(self, client, down, data):
            return client, Up(down.shared, mask=mask(down.shared))

    with pytest.raises(Problem, match=says):
        Federation(Sequential(Job(Masks(toy_model()), toy.toy_clients()))).step()


# ---------------------------------------------------------------------- clusters up to a maximum


@dataclass(frozen=True)
class Splitting(FedAvg):
    """Clusters that split where their clients move apart (CFL's idea), up to a declared number."""

    most: int = hyper(3, "clusters at most", at_least=1)

    evaluates = "assembled"

    @property
    def groups(self):
        return self.most

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        of = torch.zeros(clients, dtype=torch.int64)
        return {"models": w.repeat(self.most, 1), "of": of, "used": torch.tensor(1)}

    def broadcast(self, server, ids):
        k = server["of"][ids]
        return Down(own={"w": server["models"][k], "k": k})

    def local(self, client, down, data):
        change = self.descend(down.own["w"], data) - down.own["w"]
        return client, Up(mean=change, own=self.model.head.take(change), group=down.own["k"])

    def aggregate(self, server, cohort):
        models, of, used = server["models"] + cohort.mean, server["of"].clone(), int(server["used"])
        for k in range(used):
            here = (of[cohort.ids] == k).nonzero().flatten().tolist()
            apart = [row for row in here if cohort.own[row] @ cohort.own[here[0]] < 0]
            if apart and used < self.most:
                models[used], of[cohort.ids[apart]] = models[k], used
                used += 1
        return {"models": models, "of": of, "used": torch.tensor(used)}

    def personalise(self, client, down, data):
        return down.own["w"]

    def notes(self, server):
        return {"cluster_sizes": server["of"].bincount(minlength=self.most)[: int(server["used"])].tolist()}


def splitting(**changed):
    return Splitting(toy_model(), **(SETTINGS | changed))


@everywhere
def test_clusters_up_to_a_maximum(engine, tmp_path):
    agrees(splitting, engine, tmp_path, rounds=3)


def test_clusters_grow_and_the_rest_waits():
    federation = Federation(Sequential(Job(splitting(epochs=5), toy.disagreeing_clients(3))))
    sizes = []
    for _ in range(3):
        before = federation.server
        federation.step()
        used = int(before["used"])
        assert torch.equal(before["models"][used:], federation.method.init_server(9)["models"][used:])
        sizes.append(federation.method.notes(federation.server)["cluster_sizes"])
    assert [len(each) for each in sizes] == sorted(len(each) for each in sizes)
    assert sizes[-1] == [3, 3, 3]


# ---------------------------------------------------------------------- messages of every batch


@dataclass(frozen=True)
class Split(FedAvg):
    """Split learning: for every sample what enters the head goes up with its label, and its gradient comes down."""

    def batch_traffic(self, samples):
        (features,) = self.model.representation
        return {"up": samples * (features + 1), "down": samples * features}


def split():
    return Split(toy_model(), **SETTINGS)


@everywhere
def test_messages_of_every_batch(engine, tmp_path):
    agrees(split, engine, tmp_path)


def test_bytes_of_every_batch_and_of_stragglers_who_have_fewer():
    def bytes_of(share, ids):
        job = Job(split(), toy.toy_clients(SIZES), seed=5)
        federation = Federation(Sequential(job), faults=Faults(stragglers=share))
        federation.step(ids)
        return federation.traffic, federation.answers

    traffic, _ = bytes_of(0, [0, 1, 3])
    samples = 2 * (11 + 7 + 3)
    assert (traffic.up_own, traffic.down_own) == (8 * 9 * samples, 8 * 8 * samples)
    traffic, answers = bytes_of(1, [0, 1, 3])
    samples = sum(n * done for n, done in zip((11, 7, 3), answers.done, strict=True))
    assert samples < 2 * 21
    assert traffic.down_own == 8 * 8 * samples


def test_directions_of_batches():
    @dataclass(frozen=True)
    class Sideways(FedAvg):
        def batch_traffic(self, samples):
            return {"sideways": samples}

    with pytest.raises(Problem, match=r"Sideways\.batch_traffic returns 'sideways'"):
        run(lambda: Sideways(toy_model(), **SETTINGS), rounds=1)
