"""Public samples and training at the server, in toys that need them, on every engine."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from everywhere import agrees, everywhere, run, toy_model

from perfed.contract import checks, runner, toy
from perfed.core.errors import Problem
from perfed.core.messages import Down, Up
from perfed.core.model import average
from perfed.core.optim import adam, adam_start
from perfed.core.tree import leaves
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation, step
from perfed.federation.traffic import PUBLIC_DATA
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local
from perfed.training import catalog

SETTINGS = dict(lr=0.05, epochs=2, batch_size=5)


@dataclass(frozen=True)
class Digest(Local):
    """Clients agree on outputs for the public samples, and learn from what they agree on (as FedMD does)."""

    public = "unlabelled"
    sends_public = True

    def init_server(self, clients):
        return {"targets": torch.zeros(self.context.public, toy.CLASSES, dtype=self.model.dtype), "digests": 0}

    def broadcast(self, server, ids):
        return Down(shared={"targets": server["targets"]})

    def outputs(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def learned(self, theta, batch, targets):
        def loss(theta, batch, train):
            out, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
            return average((out - targets[batch.index]).square().mean(-1), batch.weight), fresh

        g, theta, _ = self.model.grad(theta, batch, loss)
        return g, theta

    def digest(self, theta, batch, targets):
        g, theta = self.learned(theta, batch, targets)
        return theta - 0.1 * g

    def distance(self, batch, given):
        theta, targets = given
        return average((self.outputs(batch, theta) - targets[batch.index]).square().sum(-1), batch.weight)

    def local(self, client, down, data):
        theta = data.public.fold(self.digest, client, down.shared["targets"], epochs=2, batch_size=4)
        theta = self.descend(theta, data)
        away = data.public.mean(self.distance, (theta, down.shared["targets"]))
        steps = data.public.steps(epochs=1, batch_size=4) + data.public.size
        own = {"away": away, "steps": steps, "outputs": data.map(self.outputs, theta, "val"), "mask": data.mask("val")}
        return theta, Up(mean=data.public.map(self.outputs, theta), own=own)

    def aggregate(self, server, cohort):
        assert (cohort.own["outputs"].abs().sum(-1) > 0).equal(cohort.own["mask"])
        change = 1e-3 * (cohort.own["away"] * cohort.own["steps"]).sum()
        return {"targets": cohort.mean + change, "digests": server["digests"] + 1}


def digest(network="plain"):
    return lambda: Digest(toy_model(network), **SETTINGS)


DIGEST, DIGEST_NORM = digest(), digest("norm")


@everywhere
def test_clients_learn_from_public_samples(engine, tmp_path):
    agrees(DIGEST, engine, tmp_path)


@pytest.mark.parametrize("engine", ["vectorised", pytest.param("recorded", marks=pytest.mark.slow)])
def test_with_batch_norm(engine, tmp_path):
    agrees(DIGEST_NORM, engine, tmp_path)


def alone_and_together(make, clients, rounds=2):
    """Return runs with several seeds and rates, each alone and all in one batch."""
    rates = {0: {}, 3: {}, 7: {"lr": 0.02}}  # by seed
    jobs = [Job(make(**more), clients[at % len(clients)], seed=seed) for at, (seed, more) in enumerate(rates.items())]
    alone, engine = [Federation(Vectorised(job)) for job in jobs], Vectorised(*jobs)
    together = [Federation(engine, run) for run in range(len(jobs))]
    for _ in range(rounds):
        step(together)
        for federation in alone:
            federation.step()
    return alone, together


SEVERAL = {
    "the same samples": [toy.toy_clients()],
    "samples of their own": [toy.toy_clients(), toy.toy_clients(seed=1), toy.toy_clients(seed=2)],
}


@pytest.mark.parametrize("clients", SEVERAL.values(), ids=SEVERAL)
def test_several_runs_in_one_batch(clients):
    make = lambda **changed: Digest(toy_model(), **SETTINGS | changed)
    for single, batched in zip(*alone_and_together(make, clients), strict=True):
        assert checks.difference(batched.server, single.server) < 1e-12
        assert checks.difference(checks.states_of(batched), checks.states_of(single)) < 1e-12
        assert dataclasses.asdict(batched.traffic) == dataclasses.asdict(single.traffic)


def test_public_samples_are_sent_to_each_client_once():
    outcome = run(DIGEST, rounds=3)  # everybody takes part, some more than once
    assert outcome.traffic["extra"] == {PUBLIC_DATA: len(toy.SIZES) * toy.PUBLIC * toy.FEATURES * 8}
    labelled = dataclasses.make_dataclass(
        "Labelled", [], bases=(Digest,), frozen=True, namespace={"public": "labelled"}
    )
    outcome = run(lambda: labelled(toy_model(), **SETTINGS), rounds=1)
    assert outcome.traffic["extra"] == {PUBLIC_DATA: len(toy.COHORTS[0]) * toy.PUBLIC * (toy.FEATURES + 1) * 8}


def test_a_part_of_them_may_be_sent():
    part = variant(Digest, public_sent=property(lambda self: self.context.public // 2))
    outcome = run(lambda: part(toy_model(), **SETTINGS), rounds=1)
    assert outcome.traffic["extra"] == {PUBLIC_DATA: len(toy.COHORTS[0]) * (toy.PUBLIC // 2) * toy.FEATURES * 8}


@dataclass(frozen=True)
class Peeking(FedAvg):
    """A method that looks at the labels of public samples."""

    public = "unlabelled"
    sends_public = True

    def labels(self, batch, given):
        return average(batch.y.double(), batch.weight)

    def local(self, client, down, data):
        return client, Up(mean=down.shared, own=data.public.mean(self.labels))

    def aggregate(self, server, cohort):
        assert (cohort.own == -1).all()
        return server


@pytest.mark.parametrize("engine", ["vectorised", "workers"])
def test_labels_are_hidden(engine, tmp_path):
    agrees(lambda: Peeking(toy_model(), **SETTINGS), engine, tmp_path)


def variant(kind, **constants):
    return dataclasses.make_dataclass("Other", [], bases=(kind,), frozen=True, namespace=constants)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_what_is_refused(engine):
    without = dataclasses.replace(toy.toy_clients(), public=None)
    public = toy.toy_clients().public
    unlabelled = dataclasses.replace(toy.toy_clients(), public=dataclasses.replace(public, labelled=False))
    for kind, clients, words in (
        (Digest, without, "needs public samples, and there are none"),
        (variant(Digest, public="labelled"), unlabelled, "labels of these are unknown"),
        (variant(Digest, public="", sends_public=False), toy.toy_clients(), "sends_public"),
        (variant(Digest, public=""), toy.toy_clients(), "public says which"),
        (variant(Digest, public="some"), toy.toy_clients(), "unlabelled, labelled"),
    ):
        with pytest.raises(Problem, match=words):
            Federation(engine(Job(kind(toy_model(), **SETTINGS), clients))).step([0, 1])


def test_a_map_gives_a_row_for_each_sample():
    @dataclass(frozen=True)
    class Mean(Digest):
        def outputs(self, batch, theta):
            return super().outputs(batch, theta).mean(0)

    for engine in (Sequential, Vectorised):
        with pytest.raises((TypeError, RuntimeError), match="a row for each of its"):
            Federation(engine(Job(Mean(toy_model(), **SETTINGS), toy.toy_clients()))).step([0, 1])


# ---------------------------------------------------------------------- training at the server


@dataclass(frozen=True)
class Distilled(FedAvg):
    """The server teaches the mean of the models what all of them say of public samples (as FedDF does)."""

    public = "unlabelled"
    refine_before = True

    def init_server(self, clients):
        theta = super().init_server(clients)
        return {"theta": theta, "adam": adam_start(theta), "rounds": 0}

    def broadcast(self, server, ids):
        return dataclasses.replace(super().broadcast(server, ids), shared=server["theta"])

    def global_model(self, server):
        return server["theta"]

    def local(self, client, down, data):
        client, up = super().local(client, down, data)
        return client, Up(mean=up.mean, own=down.shared + up.mean)

    def aggregate(self, server, cohort):
        return {**server, "theta": super().aggregate(server["theta"], cohort), "rounds": server["rounds"] + 1}

    def outputs(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def teach(self, carry, batch, said):
        def loss(theta, batch, train):
            out, fresh = self.model.apply(theta, batch.x, train, batch.weight, batch.key)
            each = F.kl_div(out.log_softmax(-1), said[batch.index].softmax(-1), reduction="none").sum(-1)
            return average(each, batch.weight), fresh

        theta, state = carry
        g, theta, _ = self.model.grad(theta, batch, loss)
        return adam(theta, state, g, self.lr)

    def loss(self, batch, given):
        theta, said = given
        return average((self.outputs(batch, theta) - said[batch.index]).square().sum(-1), batch.weight)

    def refine(self, server, cohort, public):
        if cohort is None:  # before round 1
            said = public.map(self.outputs, 0.5 * server["theta"])
        else:
            said = torch.stack([public.map(self.outputs, theta) for theta in cohort.own]).mean(0)
        carry = public.fold(self.teach, (server["theta"], server["adam"]), said, steps=7, batch_size=4)
        theta, state = carry
        away = public.mean(self.loss, (theta, said))
        return {"theta": theta + 1e-3 * away, "adam": state, "rounds": server["rounds"]}


def distilled(network="plain", **changed):
    return lambda: Distilled(toy_model(network), **SETTINGS | changed)


DISTILLED, DISTILLED_NORM = distilled(), distilled("norm")


@everywhere
def test_the_server_trains(engine, tmp_path):
    agrees(DISTILLED, engine, tmp_path)


@pytest.mark.parametrize("engine", ["vectorised", pytest.param("recorded", marks=pytest.mark.slow)])
def test_the_server_trains_a_network_with_batch_norm(engine, tmp_path):
    agrees(DISTILLED_NORM, engine, tmp_path, tolerance=checks.CLOSE)  # Adam, and biases without a gradient


@pytest.mark.parametrize("clients", SEVERAL.values(), ids=SEVERAL)
def test_servers_of_several_runs(clients):
    make = lambda **changed: Distilled(toy_model(), **SETTINGS | changed)
    for single, batched in zip(*alone_and_together(make, clients), strict=True):
        assert checks.difference(batched.server, single.server) < 1e-12


@pytest.mark.slow
def test_steps_of_servers_of_several_runs_are_recorded_once():
    pytest.importorskip("triton")
    jobs = [Job(Distilled(toy_model(), **SETTINGS), toy.toy_clients(), seed=seed) for seed in (0, 3)]
    engine = Vectorised(*jobs, fast=True)
    before = None
    for _ in range(2):
        step([Federation(engine, run) for run in range(2)])
        recorder = engine.runner.recorder
        assert recorder is not None
        assert before in (None, len(recorder.loops))
        before = len(recorder.loops)


def test_the_server_trains_before_the_first_round_and_after_every_exchange():
    federation = Federation(Sequential(Job(DISTILLED(), toy.toy_clients())))
    start = federation.server
    federation.begin()
    assert checks.difference(federation.server["theta"], start["theta"]) > 1e-3
    assert federation.server["rounds"] == 0
    assert federation.engine.refining[0] > 0


@dataclass(frozen=True)
class Generating(FedAvg):
    """The server trains on nothing but random numbers (as FedGen's does): it needs no public samples."""

    def init_server(self, clients):
        return {"theta": super().init_server(clients), "drawn": torch.zeros(3, dtype=self.model.dtype)}

    def broadcast(self, server, ids):
        return dataclasses.replace(super().broadcast(server, ids), shared=server["theta"])

    def global_model(self, server):
        return server["theta"]

    def aggregate(self, server, cohort):
        return {**server, "theta": super().aggregate(server["theta"], cohort)}

    def draw(self, drawn, batch, given):
        from perfed.core.random import uniform

        return drawn + uniform(batch.key, (3,), self.model.dtype) + given

    def refine(self, server, cohort, public):
        drawn = public.fold(self.draw, server["drawn"], cohort.weight.to(self.model.dtype) * 1e-3, steps=4)
        return {"theta": server["theta"] + 1e-3 * drawn.sum(), "drawn": drawn}


def generating():
    return Generating(toy_model(), **SETTINGS)


@everywhere
def test_the_server_trains_without_samples(engine, tmp_path):
    agrees(generating, engine, tmp_path)
    if engine == "vectorised":
        assert leaves(run(generating, rounds=1).server["drawn"])[0].std() > 0


def test_with_uploads_that_are_not_looked_at():
    """On a GPU verdicts stay on the device, and so does the choice between the old and the refined state."""
    federations = []
    for lazy in (False, True):
        engine = Sequential(Job(generating(), toy.toy_clients(), seed=5))
        federations.append(Federation(engine, lazy=lazy))
        for cohort in toy.COHORTS:
            federations[-1].step(cohort)
        federations[-1].look()
    assert checks.difference(federations[0].server, federations[1].server) == 0


def test_an_engine_is_not_asked_where_no_server_trains():
    class Deaf(Sequential):
        def _refine(self, *args):
            raise AssertionError("asked")

    Federation(Deaf(Job(FedAvg(toy_model(), **SETTINGS), toy.toy_clients()))).step()


# ---------------------------------------------------------------------- the whole contract


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distils", "shares"])
def test_methods_of_the_guide_keep_the_contract(name, tmp_path):
    guide = (Path(__file__).parent.parent.parent / "docs" / "methods.md").read_text()
    shown = guide[guide.index(f"# file: {name}.py") :]
    (tmp_path / f"{name}.py").write_text(shown[: shown.index("```")])
    verdicts = list(runner.check_method(catalog.find(str(tmp_path / f"{name}.py"))))
    assert [verdict for verdict in verdicts if not verdict.ok] == []
