"""Clients with networks that differ: every engine trains each with its own, and no other client notices."""

import functools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from perfed.contract.checks import compare, difference, play
from perfed.contract.toy import CLASSES, FEATURES, conv_net, norm_net, plain_net, toy_clients
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.messages import Down, Up
from perfed.core.model import Model, average
from perfed.core.networks import Networks
from perfed.core.rates import Rates
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation, evaluate, step
from perfed.federation.optimizers import ServerOptimizer
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.training.catalog import methods

OF = (0, 1, 2, 1, 0)  # plain, norm, wide, norm, plain: two clients of the round have BatchNorm and dropout
SETTINGS = {"lr": 0.05, "momentum": 0.5, "epochs": 2, "batch_size": 5}
COHORTS = ((0, 2, 3), (1, 2, 4), (0, 1, 3))


def wide_net():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def networks(of=OF, builds=None):
    return Networks.of_one_width(
        builds or {"plain": plain_net, "norm": norm_net, "wide": wide_net}, of, dtype=torch.float64
    )


@dataclass(frozen=True)
class PerNetwork(FedAvg):
    """FedAvg among the clients of each network; what it has learned of its samples goes to all, and counts as given."""

    own_networks = True

    @property
    def groups(self):
        return len(self.networks)

    def init_server(self, clients):
        return {
            "models": torch.stack([model.init(self.context.seed) for model in self.networks]),
            "seen": torch.zeros(3),
        }

    def init_client(self):
        return {"last": self.model.init(self.context.seed)}

    def broadcast(self, server, ids):
        return Down(shared=server["seen"], own=server["models"][self.network_of[ids]])

    def local(self, client, down, data):
        theta = self.descend(down.own, data)
        loss = data.mean(self.risk, theta)
        return {"last": theta}, Up(mean=theta - down.own, own=loss[None], group=self.context.network)

    def risk(self, batch, theta):
        return self.model.loss(theta, batch)[0]

    def aggregate(self, server, cohort):
        seen = server["seen"] + cohort.own.mean().float()
        return {"models": server["models"] + cohort.mean, "seen": seen}

    def personalise(self, client, down, data):
        return {"personal": down.own, "last": client["last"]}


@dataclass(frozen=True)
class Ensemble(PerNetwork):
    """As FedDF does: the server teaches each network's model what the models of all say of public samples."""

    public = "unlabelled"

    def outputs(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def distil(self, theta, batch, targets):
        def loss(theta, batch, train):
            out, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
            return average((out - targets[batch.index]).square().mean(-1), batch.weight), fresh

        g, theta, _ = self.model.grad(theta, batch, loss)
        return theta - 0.1 * g

    def refine(self, server, cohort, public):
        pairs = [(self.with_network(number), theta) for number, theta in enumerate(server["models"].unbind())]
        targets = torch.stack([public.map(method.outputs, theta) for method, theta in pairs]).mean(0)
        taught = [public.fold(method.distil, theta, targets, epochs=2, batch_size=4) for method, theta in pairs]
        return server | {"models": torch.stack(taught)}


def job(kind=PerNetwork, of=OF, seed=5, **changed):
    several = networks(of)
    method = kind(several.models[0], **(SETTINGS | changed)).at(networks=several)
    return Job(method, toy_clients(), seed, cohort=3)


def recorded(*jobs):
    pytest.importorskip("triton", reason="the fast engine needs Triton")
    return Vectorised(*jobs, fast=True, notice=refuse)


def refuse(notice):
    raise AssertionError(notice)


ENGINES = {
    "vectorised": Vectorised,
    "blocks": lambda *jobs: Vectorised(*jobs, block=2, sizes=(2, 3)),
    "compiled": lambda *jobs: Vectorised(*jobs, compile="eager", notice=refuse),
    "recorded": recorded,
    "workers": lambda *jobs: Workers(*jobs, workers=2),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name in ("compiled", "recorded") else name for name in ENGINES]


def faulty(engine):
    optimizer = ServerOptimizer("adam", 0.01)
    return Federation(engine, faults=Faults(dropout=0.3, stragglers=0.7), optimizer=optimizer)


@pytest.mark.parametrize("kind", [PerNetwork, Local, Ensemble])
@pytest.mark.parametrize("engine", SLOW)
def test_engines_agree(engine, kind):
    make = ENGINES[engine]
    compare(play(make(job(kind)), COHORTS), play(Sequential(job(kind)), COHORTS), engine, 1e-12)


OF_PERFED = [name for name, entry in methods().items() if entry.load().own_networks]


@functools.cache
def side_by_side(name):
    """A job whose clients have an MLP, a LeNet and a ResNet with BatchNorm, for images of 16x16 pixels."""
    draw, shape, counts = torch.Generator().manual_seed(0), (1, 16, 16), (7, 6, 9)
    split = lambda *sizes: Split(
        torch.randn(sum(sizes), *shape, generator=draw, dtype=torch.float64), torch.arange(sum(sizes)) % 3, sizes
    )
    clients = Clients(tuple("abc"), split(*counts), split(2, 2, 2), split(3, 3, 3), 3, public=split(8))
    config = ModelConfig(hidden=8, norm="batch")
    builds = {each: make_network(replace(config, name=each), shape, 3) for each in ("mlp", "lenet", "resnet")}
    several = Networks.of_one_width(builds, (0, 1, 2), dtype=torch.float64)
    about = {"lr": 0.05, "epochs": 1, "batch_size": 4} | dict.fromkeys(("public_epochs", "private_epochs"), 2)
    kind = methods()[name].load()
    known = {field.name for field in fields(kind)}
    method = kind(several.models[0], **{key: value for key, value in about.items() if key in known})
    return Job(method.at(networks=several), clients, 5, cohort=3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorised", "blocks", "workers"])
@pytest.mark.parametrize("name", OF_PERFED)
def test_an_mlp_a_lenet_and_a_resnet_side_by_side(name, engine):
    rounds = [(0, 1, 2), (1, 2)]
    outcome = play(ENGINES[engine](side_by_side(name)), rounds)
    compare(outcome, play(Sequential(side_by_side(name)), rounds), engine, 1e-9)


@pytest.mark.parametrize("engine", ["blocks", "workers"])
def test_clients_that_fail_rates_that_fall_and_a_servers_optimizer(engine):
    about = replace(job(), rates=Rates("step", every=1))
    engine, expected = ENGINES[engine](about), Sequential(about)
    outcome, wanted = play(engine, COHORTS, faulty(engine)), play(expected, COHORTS, faulty(expected))
    compare(outcome, wanted, "with faults", 1e-12)
    assert difference(play(Sequential(job()), COHORTS, faulty(Sequential(job()))).server, wanted.server) > 1e-3


def test_a_servers_optimizer_leaves_each_networks_statistics_as_they_are():
    optimizer = ServerOptimizer("adam", 0.01)
    with_it, without = Federation(Sequential(job()), optimizer=optimizer), Federation(Sequential(job()))
    with_it.step([0, 2, 3])
    without.step([0, 2, 3])
    for model, mine, plain in zip(networks().models, with_it.server["models"], without.server["models"], strict=True):
        assert torch.equal(mine[model.P :], plain[model.P :])
        assert not torch.equal(mine[: model.P], plain[: model.P])


def test_a_client_trains_as_where_all_have_its_network():
    mixed, several = play(Sequential(job(Local)), [range(5)] * 2), networks()
    for number, build in enumerate((plain_net, norm_net, wide_net)):
        model = Model(build, dtype=torch.float64)
        alone = play(Sequential(Job(Local(model, **SETTINGS), toy_clients(), 5)), [range(5)] * 2)
        for id in several.members(number, range(5)):
            assert torch.equal(mixed.states[str(id)][: model.size], alone.states[str(id)][: model.size])
            assert not mixed.states[str(id)][model.size :].any()
            for split in ("val", "test"):
                of = lambda outcome, split=split, id=id: outcome.scores["personal"][split]["loss"][id]
                assert torch.equal(of(mixed), of(alone))


@pytest.mark.parametrize("engine", [Sequential, Vectorised, ENGINES["workers"]])
def test_all_scores_are_of_the_clients_own_network(engine):
    several, federation = networks(), Federation(engine(job(Local)))
    scores = federation.evaluate(full=True)
    federation.engine.close()
    for number, build in enumerate((plain_net, norm_net, wide_net)):
        method = Local(Model(build, dtype=torch.float64), **SETTINGS)
        alone = Federation(Sequential(Job(method, toy_clients(), 5))).evaluate(full=True)
        for metric in ("macro_f1", "auc"):
            mine, theirs = (each["personal"]["test"][metric] for each in (scores, alone))
            for id in several.members(number, range(5)):
                torch.testing.assert_close(mine[id], theirs[id], equal_nan=True)


def test_bytes_are_those_of_each_clients_network():
    federation = Federation(Sequential(job()))
    federation.step([0, 2, 3])  # plain, wide and norm
    sizes = {model: Model(model).size for model in (plain_net, wide_net, norm_net)}
    sent = 8 * sum(sizes.values())
    assert (federation.traffic.down_own, federation.traffic.up_mean) == (sent, sent)
    assert (federation.traffic.down_shared, federation.traffic.up_own) == (3 * 3 * 4, 3 * 8)
    lost = Federation(Sequential(job()), faults=Faults(dropout=0.5))
    lost.step([0, 2, 3])
    there = {0: plain_net, 2: wide_net, 3: norm_net}
    answered = 8 * sum(sizes[there[id]] for id in lost.answers.ids)
    assert 0 < answered < sent  # who does not answer was sent a model, too
    assert (lost.traffic.down_own, lost.traffic.up_mean) == (sent, answered)


def test_a_run_goes_on_from_what_was_saved():
    expected = play(Vectorised(job()), COHORTS)
    half = Federation(Vectorised(job()))
    half.step(COHORTS[0])
    ids, pieces = half.engine.save(0)
    content = b"".join(bytes(piece) for piece in pieces)
    engine = Vectorised(job())
    begun = iter([content])
    engine.restore(0, ids, lambda count: next(begun)[:count])
    rest = Federation(engine, server=half.server, round=1, traffic=half.traffic)
    compare(play(engine, COHORTS[1:], rest), expected, "resumed", 0)


@pytest.mark.parametrize("kind", [PerNetwork, Ensemble])
def test_several_runs_in_one_batch(kind):
    jobs = lambda: [job(kind, seed=3), job(kind, seed=5, of=(1, 1, 0, 2, 0)), job(kind, seed=7, lr=0.02)]
    alone, engine = [Federation(Vectorised(each)) for each in jobs()], Vectorised(*jobs())
    batched = [Federation(engine, run) for run in range(3)]
    for _ in range(2):
        step(batched)
        for federation in alone:
            federation.step()
    for federation, single, scores in zip(batched, alone, evaluate(batched, [None] * 3), strict=True):
        for mine, theirs in (
            (federation.server["models"], single.server["models"]),
            (scores["personal"]["test"]["loss"], single.evaluate()["personal"]["test"]["loss"]),
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_runs_with_other_networks_are_no_batch():
    several = networks(OF, {"plain": plain_net, "norm": norm_net, "conv": conv_net})
    other = PerNetwork(several.models[0], **SETTINGS).at(networks=several)
    with pytest.raises(Problem, match="need the same network"):
        Vectorised(job(), Job(other, toy_clients(), 6, cohort=3))


# ---------------------------------------------------------------------- what is refused


def test_a_method_says_that_it_is_made_for_them():
    several = networks()
    with pytest.raises(Problem, match=r"FedAvg is not made for clients whose networks differ \(plain, norm, wide\)"):
        FedAvg(several.models[0]).at(networks=several)


@dataclass(frozen=True)
class MixedUp(PerNetwork):
    """Averages models over all networks."""

    def local(self, client, down, data):
        client, up = super().local(client, down, data)
        return client, replace(up, group=None)


@dataclass(frozen=True)
class OtherForms(PerNetwork):
    """Sends as many numbers as its own network has."""

    def local(self, client, down, data):
        client, up = super().local(client, down, data)
        return client, replace(up, mean=self.model.weights.take(up.mean))


@dataclass(frozen=True)
class OtherStates(PerNetwork):
    """Keeps as many numbers as its own network has."""

    def init_client(self):
        return {"last": self.model.zeros()[: self.model.P]}


@pytest.mark.parametrize("engine", [Sequential, Vectorised, ENGINES["workers"]])
@pytest.mark.parametrize(("kind", "words"), [
    (MixedUp, r"MixedUp averages models of clients whose networks differ \(plain, norm, wide\)"),
    (OtherForms, "with the network 'norm' 'mean' has another form than with 'plain'"),
    (OtherStates, "with the network 'norm' 'state/last' has another form than with 'plain'"),
])  # fmt: skip
def test_what_cannot_be_is_told_in_a_sentence(kind, words, engine):
    with pytest.raises(Problem, match=words):
        play(engine(job(kind)), COHORTS[1:])


def test_there_is_no_model_for_everybody():
    federation = Federation(Sequential(job()))
    with pytest.raises(Problem, match="PerNetwork has no model for everybody"):
        federation.method.global_model(federation.server)


def test_networks_of_one_run_fit_together():
    models = Model(plain_net), Model(norm_net)
    with pytest.raises(Problem, match="of one width"):
        Networks(("plain", "norm"), models, (0, 1))
    with pytest.raises(Problem, match="numbers 0 to 0"):
        Networks(("plain",), models[:1], (0, 1))
    several = networks((0, 1))
    with pytest.raises(Problem, match="2 clients have a network, but there are 5"):
        Sequential(Job(Local(several.models[0]).at(networks=several), toy_clients()))
