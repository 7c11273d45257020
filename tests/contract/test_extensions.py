"""Samples that join clients' training sets, in toys that need them, on every engine."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from everywhere import agrees, everywhere, run, toy_model

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Down, Extension, Up
from perfed.core.model import average
from perfed.core.random import derive, uniform
from perfed.core.rounds import Phase
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation, step
from perfed.methods.fedavg import FedAvg

SETTINGS = dict(lr=0.05, epochs=2, batch_size=5)
COPIES = 2


@dataclass(frozen=True)
class Rebalanced(FedAvg):
    """Clients leave out samples of frequent classes, and make up others of rare ones (as Astraea's do)."""

    def broadcast(self, server, ids):
        rates = torch.tensor([0.5, 1.0, 2.4], dtype=self.model.dtype, device=server.device)
        return Down(shared={"theta": server, "rates": rates})

    def altered(self, batch, shared):
        """A copy of each sample with some noise, a draw for it, and what becomes of its class."""
        keys = derive(batch.key, batch.index)
        draws = uniform(keys, (1 + COPIES, *batch.x.shape[1:]), self.model.dtype)
        copies, rates = batch.x[:, None] + (draws[:, 1:] - 0.5) * shared["theta"].mean(), shared["rates"]
        return {"copies": copies, "draw": draws[:, 0].flatten(1)[:, 0], "y": batch.y, "rate": rates[batch.y]}

    def extend(self, client, down, data):
        mine = data.map(self.altered, down.shared)
        copies = torch.arange(COPIES, device=mine["y"].device)
        wanted = (mine["rate"] - 1).clamp_min(0)
        wanted = wanted.floor() + (mine["draw"] < wanted - wanted.floor())
        made = data.mask()[:, None] & (copies < wanted[:, None])
        y = mine["y"][:, None].expand(-1, COPIES)
        return Extension(mine["copies"].flatten(0, 1), y.flatten(), made.flatten(), mine["draw"] < mine["rate"])

    def features(self, batch, given):
        return average(batch.x.flatten(1).sum(1), batch.weight)

    def local(self, client, down, data):
        theta = self.descend(down.shared["theta"], data)
        return client, Up(mean=theta - down.shared["theta"] + 1e-3 * data.mean(self.features))

    def personalise(self, client, down, data):
        return self.descend(down.shared["theta"], data, epochs=1, stream=1)


Rebalanced.evaluates = "adapted"


def rebalanced(network="plain", **changed):
    return lambda: Rebalanced(toy_model(network), **SETTINGS | changed)


REBALANCED, REBALANCED_NORM = rebalanced(), rebalanced("norm")


@everywhere
def test_samples_join(engine, tmp_path):
    agrees(REBALANCED, engine, tmp_path)


@pytest.mark.parametrize("engine", ["vectorised", pytest.param("recorded", marks=pytest.mark.slow)])
def test_with_batch_norm(engine, tmp_path):
    agrees(REBALANCED_NORM, engine, tmp_path, rounds=3)


def test_what_joins_and_what_is_left_out():
    clients = toy.toy_clients()
    engine = Sequential(Job(REBALANCED(), clients, seed=5))
    federation = Federation(engine)
    federation.step([0, 2])
    federation.step([1, 2])
    known = engine.extended[0].known
    assert sorted(known) == [0, 1, 2]
    assert [known[id].round for id in (0, 1, 2)] == [1, 2, 1]
    train = engine.jobs[0].clients.train
    assert train.size[3:] == clients.train.size[3:]
    for id, size in enumerate(toy.SIZES[:3]):
        own = slice(clients.train.start[id], clients.train.start[id] + size)
        y, kept = clients.train.y[own], known[id].kept
        assert kept[y > 0].all()
        made = train.y[train.start[id] + int(kept.sum()) : train.start[id] + train.size[id]]
        assert len(made) == known[id].made
        assert (made == 2).all()
        assert (y == 2).sum() <= len(made) <= COPIES * (y == 2).sum()
        assert torch.equal(train.x[train.start[id] : train.start[id] + int(kept.sum())], clients.train.x[own][kept])
        assert known[id].counts == {
            "train": train.size[id], "made": len(made), "left_out": size - int(kept.sum())
        }  # fmt: skip
    assert sum(each.kept.numel() - int(each.kept.sum()) for each in known.values()) > 0


def test_weights_follow():
    """A mean over clients is weighted by the samples that they train on."""
    weights = {}

    class Watched(Federation):
        def _reduced(self, uploads, used=None):
            weights.update(zip(uploads.ids.tolist(), uploads.weight.tolist(), strict=True))
            return super()._reduced(uploads, used)

    engine = Sequential(Job(REBALANCED(), toy.toy_clients(), seed=5))
    Watched(engine).step([0, 1, 2])
    assert weights == {id: engine.jobs[0].clients.train.size[id] for id in (0, 1, 2)}
    assert list(weights.values()) != list(toy.SIZES[:3])


@pytest.mark.parametrize("same", [True, False])
def test_several_runs_in_one_batch(same):
    seeds = (0, 3, 7)
    clients = [toy.toy_clients(seed=0 if same else seed) for seed in seeds]
    jobs = [Job(REBALANCED(), each, seed=seed) for seed, each in zip(seeds, clients, strict=True)]
    engine = Vectorised(*jobs)
    together = [Federation(engine, run) for run in range(len(jobs))]
    alone = [Federation(Vectorised(job)) for job in jobs]
    for cohort in toy.COHORTS:
        step(together, [cohort] * len(jobs))
        for federation in alone:
            federation.step(cohort)
    for single, batched in zip(alone, together, strict=True):
        assert checks.difference(batched.server, single.server) < 1e-12
        assert batched.evaluate().tables.keys() == single.evaluate().tables.keys()
        assert checks.difference(batched.evaluate().tables, single.evaluate().tables) < 1e-12
    assert together[0].engine.extended[0].known.keys() == set(range(5))


@pytest.mark.parametrize("kind", ["adapted", "global"])
def test_training_scores_are_those_of_the_samples_that_were_trained_on(kind):
    namespace = {"evaluates": kind}
    if kind == "global":
        namespace["personalise"] = lambda self, client, down, data: down.shared["theta"]
    method = dataclasses.make_dataclass("Scored", [], bases=(Rebalanced,), frozen=True, namespace=namespace)
    scores = []
    for engine in (Sequential, Vectorised):
        federation = Federation(
            engine(Job(method(toy_model(), **SETTINGS), toy.toy_clients(), seed=5), train_scores=True)
        )
        federation.step([0, 1, 2])
        scores.append(federation.evaluate().tables)
    assert checks.difference(*scores) < 1e-12
    assert "train" in scores[0]["personal"]


@pytest.mark.slow
def test_records_go_on_when_others_get_samples():
    pytest.importorskip("triton")
    engine = Vectorised(Job(REBALANCED(), toy.toy_clients((20, 20, 20, 20)), seed=5), fast=True)
    federation, loops = Federation(engine), []
    for cohort in ((0, 1), (0, 1), (2,), (3,), (0, 3)):
        federation.step(cohort)
        assert engine.runner.recorder is not None
        loops.append(len({id(loop.clients.train.x) for loop in engine.runner.recorder.loops.values()}))
    assert max(loops) <= 4  # the table is written in place, and doubles where it is full


def variant(**namespace):
    return dataclasses.make_dataclass("Other", [], bases=(Rebalanced,), frozen=True, namespace=namespace)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_what_is_refused(engine):
    def giving(**more):
        def extend(self, client, down, data):
            mine = data.map(self.altered, down.shared)
            given = {"x": mine["copies"][:, 0], "y": mine["y"], "made": data.mask()}
            return Extension(**given | {name: value(mine, data) for name, value in more.items()})

        return variant(extend=extend)

    nothing = lambda mine, data: torch.zeros_like(data.mask())
    for kind, words in (
        (giving(y=lambda mine, data: mine["y"] + 3), "label that is not one of the 3 classes"),
        (giving(x=lambda mine, data: mine["copies"]), "its own are"),
        (giving(made=lambda mine, data: data.mask()[:-1]), "but made of shape"),
        (giving(keep=lambda mine, data: data.mask()[:-1]), "keep of shape"),
        (giving(keep=nothing, made=nothing), "without any training sample"),
        (giving(x=lambda mine, data: mine["copies"][:, 0] / 0), "not finite"),
        (variant(extend=lambda self, client, down, data: None), "must return an Extension"),
    ):
        with pytest.raises(Problem, match=words):
            Federation(engine(Job(kind(toy_model(), **SETTINGS), toy.toy_clients()))).step([0, 1])


@dataclass(frozen=True)
class Counted(Rebalanced):
    """All clients say first how many samples of each class they have; rates follow from the sums."""

    extends_in = "train"

    def init_server(self, clients):
        rates = torch.ones(toy.CLASSES, dtype=self.model.dtype)
        return {"theta": super().init_server(clients), "rates": rates, "counted": 0}

    def phase(self, server):
        return Phase("train") if server["counted"] else Phase("count", everybody=True)

    def broadcast(self, server, ids):
        return Down(shared={"theta": server["theta"], "rates": server["rates"]})

    def counts(self, batch, given):
        held = [(batch.y == kind).to(self.model.dtype) for kind in range(toy.CLASSES)]
        return torch.stack([average(each, batch.weight) for each in held])

    def local_count(self, client, down, data):
        return client, Up(mean={"theta": 0 * down.shared["theta"], "share": data.mean(self.counts)})

    def local(self, client, down, data):
        client, up = super().local(client, down, data)
        return client, Up(mean={"theta": up.mean, "share": data.mean(self.counts)})

    def aggregate(self, server, cohort):
        rates = server["rates"] if server["counted"] else 0.4 / cohort.mean["share"]
        return {"theta": server["theta"] + cohort.mean["theta"], "rates": rates, "counted": 1}

    def global_model(self, server):
        return server["theta"]


def counted():
    return Counted(toy_model(), **SETTINGS)


@everywhere
def test_a_phase_before(engine, tmp_path):
    agrees(counted, engine, tmp_path, rounds=3)


def test_samples_join_in_the_phase_that_is_named():
    engine = Sequential(Job(counted(), toy.toy_clients(), seed=5))
    federation = Federation(engine)
    federation.step()
    assert not engine.extended[0].known
    federation.step([0, 1])
    assert sorted(engine.extended[0].known) == [0, 1]


@dataclass(frozen=True)
class Shared(FedAvg):
    """Each client adds a random part of the public samples to its own (as Zhao et al. do)."""

    public = "labelled"
    sends_public = True

    def sample(self, batch, given):
        return {"x": batch.x, "y": batch.y, "draw": uniform(derive(batch.key, batch.index), (), self.model.dtype)}

    def extend(self, client, down, data):
        given = data.public.map(self.sample)
        return Extension(given["x"], given["y"], (given["draw"] < 0.5) & data.public.mask())


def shared():
    return Shared(toy_model(), **SETTINGS)


@everywhere
def test_public_samples_join(engine, tmp_path):
    agrees(shared, engine, tmp_path)
    if engine == "vectorised":
        assert checks.difference(run(shared, rounds=1).server, run(lambda: FedAvg(toy_model(), **SETTINGS), rounds=1).server) > 0  # fmt: skip  # noqa: E501


def test_crops_of_samples_that_clients_make_are_refused():
    clients = dataclasses.replace(toy.toy_clients(), augment="flip")
    with pytest.raises(Problem, match=r"clients of Rebalanced make samples of their own, .* run.augment"):
        Sequential(Job(REBALANCED(), clients))
