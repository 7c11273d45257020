"""What happens to an upload on its way: a client half and a server half, on every engine and in a run."""

import dataclasses
import re

import pytest
import torch

import perfed
from perfed.contract import checks, toy
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Up
from perfed.core.model import Model
from perfed.core.tree import tree_map
from perfed.engines.base import Job, Request
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods
from perfed.wire.base import Transform

ENGINES = {"sequential": Sequential, "workers": Workers, "vectorised": Vectorised}


class Doubled(Transform):
    """Clients send everything twice as large; the server halves it: powers of two change no bit of a mantissa."""

    def client(self, up, key):
        return dataclasses.replace(up, mean=tree_map(lambda t: t * 2, up.mean), own=tree_map(lambda t: t * 2, up.own))

    def server(self, uploads):
        half = lambda tree: tree_map(lambda t: (t / 2).to(t.dtype), tree)
        return dataclasses.replace(uploads, mean=half(uploads.mean), own=half(uploads.own))


class Halved(Transform):
    """Clients send half of it, and the server does not know."""

    def client(self, up, key):
        return dataclasses.replace(up, mean=tree_map(lambda t: t / 2, up.mean))


class Noisy(Transform):
    """Clients add noise of their own."""

    def client(self, up, key):
        from perfed.core.random import uniform

        return Up(up.mean + uniform(key, up.mean.shape, up.mean.dtype), up.own, up.weight, up.group)


def outcome(engine, wire, name="fedavg", rounds=2):
    made = ENGINES[engine](Job(toy.maker(methods()[name])(epochs=1), toy.toy_clients(), seed=5, wire=wire))
    return checks.play(made, [range(len(toy.SIZES))] * rounds)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "apple"])  # a mean; two means and a state; rows of its own
@pytest.mark.parametrize("engine", ENGINES)
def test_both_halves_of_a_doubling_cancel(engine, name):
    checks.compare(outcome(engine, Doubled(), name), outcome(engine, Transform(), name), engine, tolerance=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_client_half_is_what_the_server_receives(engine):
    start = toy.maker(methods()["fedavg"])(epochs=1).at(seed=5).init_server(len(toy.SIZES))
    plain, half = (outcome(engine, wire, rounds=1).server - start for wire in (Transform(), Halved()))
    torch.testing.assert_close(half, plain / 2)


def test_every_client_has_randomness_of_its_own():
    sequential = outcome("sequential", Noisy(), rounds=1)
    assert checks.difference(sequential.server, outcome("sequential", Transform(), rounds=1).server) > 1e-3
    for engine in ("workers", "vectorised"):
        checks.compare(outcome(engine, Noisy(), rounds=1), sequential, engine)
    federation = Federation(
        Sequential(Job(toy.maker(methods()["fedavg"])(lr=1e-12, weight_decay=0.0), toy.toy_clients(), wire=Noisy()))
    )
    federation.begin(range(3))
    (reply,) = federation.engine.exchange([next(federation.requests())])
    sent = reply.uploads.mean
    assert all(checks.difference(sent[i], sent[j]) > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_every_round_and_exchange_has_randomness_of_its_own():
    engine = Sequential(Job(toy.maker(methods()["fedavg"])(lr=1e-12), toy.toy_clients(), wire=Noisy()))
    down, places = (
        engine.method.broadcast(engine.method.init_server(5), torch.tensor([2])),
        ((1, 0), (2, 0), (1, 1), (1, 0)),
    )
    sent = [engine.exchange([Request(0, *place, [2], down)])[0].uploads.mean for place in places]
    assert torch.equal(sent[0], sent[3])
    assert all(checks.difference(sent[i], sent[j]) > 1e-3 for i, j in ((0, 1), (0, 2), (1, 2)))


@dataclasses.dataclass(frozen=True)
class Weighing(FedAvg):
    """FedAvg whose uploads say how many samples they come from, by which a treatment may know a client."""

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        return state, dataclasses.replace(up, weight=data.size)


class Breaking(Transform):
    """Clients with up to so many samples cannot treat what they send."""

    def __init__(self, most):
        self.most = most

    def client(self, up, key):
        if int(up.weight) <= self.most:
            raise ValueError("no room for the codebook\nwhich is large")
        return up


FEW = min(toy.SIZES)


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_a_client_that_cannot_treat_its_upload_loses_its_turn(engine):
    method, clients = Weighing(Model(toy.plain_net, dtype=torch.float64), epochs=1), toy.toy_clients()
    fed = Federation(ENGINES[engine](Job(method, clients, wire=Breaking(FEW))))
    everybody, bad = range(len(toy.SIZES)), toy.SIZES.index(FEW)
    outcome = checks.play(fed.engine, [everybody] * 2, fed)
    expected = checks.play(Sequential(Job(method, clients)), [[id for id in everybody if id != bad]] * 2)
    assert checks.difference(outcome.server, expected.server) == 0
    reason = r"wire 'Breaking', method Weighing \(test_wire.py, line \d+\): ValueError: no room for the codebook"
    refused = fed.look()
    assert [(each.round, each.client) for each in refused] == [(1, bad), (2, bad)]
    assert all(re.fullmatch(reason, each.reason) for each in refused), refused


@dataclasses.dataclass(frozen=True)
class Forgetful(FedAvg):
    """FedAvg whose clients all fail."""

    def local(self, client, down, data):
        raise KeyError("what was sent")


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_what_no_client_can_do_ends_the_run_and_names_the_first(engine):
    """Whether its method or a treatment failed: with every engine in the same words."""
    names, make = toy.toy_clients().names, lambda kind: kind(Model(toy.plain_net), epochs=1)
    for method, wire, reason in (
        (make(Weighing), Breaking(max(toy.SIZES)), r"wire 'Breaking', .*: ValueError: no room for the codebook"),
        (make(Forgetful), Transform(), "KeyError: 'what was sent'"),
    ):
        fed = Federation(ENGINES[engine](Job(method, toy.toy_clients(), wire=wire)))
        says = f"client '{names[2]}' of {type(method).__name__}: {reason}"
        with pytest.raises(ClientError, match=f"^{says}$"):
            fed.step([2, 3])
        fed.engine.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_uploads_are_inspected_after_the_server_half(lazy):
    """What cannot be decoded is refused like what was never a number."""

    class Undecodable(Transform):
        def server(self, uploads):
            return dataclasses.replace(uploads, mean=torch.where(uploads.ids[:, None] == 1, torch.nan, uploads.mean))

    make = lambda wire: Sequential(Job(toy.maker(methods()["fedavg"])(epochs=1), toy.toy_clients(), seed=5, wire=wire))
    fed, expected = Federation(make(Undecodable()), lazy=lazy), Federation(make(Transform()))
    fed.step(range(5))
    expected.step((0, 2, 3, 4))
    assert checks.difference(fed.server, expected.server) < 1e-12
    assert [(each.client, each.tensor) for each in fed.look()] == [(1, "mean")]


def test_runs_with_other_treatments_do_not_share_a_batch():
    make = lambda seed, wire: Job(toy.maker(methods()["fedavg"])(), toy.toy_clients(), seed, wire=wire)
    with pytest.raises(Problem, match="the same treatment of uploads"):
        Vectorised(make(0, Doubled()), make(1, Halved()))
    assert len(Vectorised(make(0, Doubled()), make(1, Doubled())).jobs) == 2


def test_bytes_are_those_on_the_wire():
    class Short(Transform):
        def client(self, up, key):
            return dataclasses.replace(up, mean=up.mean.float())

        def server(self, uploads):
            return dataclasses.replace(uploads, mean=uploads.mean.double())

    plain, short = (outcome("sequential", wire).traffic["up_mean"] for wire in (Transform(), Short()))
    assert short * 2 == plain


def test_a_run_names_its_treatment(tmp_path):
    settings = {"clients": 3, "rounds": 1, "epochs": 1, "hidden": 4, "engine": "sequential", "baseline": False}
    run = perfed.run("fedavg", out=tmp_path / "run", wire="identity", **settings)
    assert run.config.run.wire == "identity"
    with pytest.raises(Problem, match=r"run.wire: there is no treatment of uploads 'identiti'.*identity"):
        perfed.run("fedavg", out=tmp_path / "other", wire="identiti", **settings)
    assert not (tmp_path / "other").exists()
