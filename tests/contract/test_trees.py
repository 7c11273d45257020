"""A method whose models are trees keeps the contract: two networks, a weight of each client, a list of one table."""

import pytest

from perfed.contract import checks, runner, toy
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.training.catalog import find

BLEND = '''
from dataclasses import dataclass

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Blend(FedAvg):
    """Blend: the outputs of an own and the shared network, by how much smaller the own loss is."""

    sharp: float = hyper(1.0, "how much a smaller loss counts", at_least=0)

    evaluates = "assembled"

    def init_client(self):
        return self.model.init(self.context.seed)

    def local(self, client, down, data):
        v = self.descend(client, data, stream=1)
        return v, Up(mean=self.descend(down.shared, data) - down.shared)

    def losses(self, batch, nets):
        return torch.stack([self.model.loss(net, batch)[0] for net in nets])

    def personalise(self, client, down, data):
        nets = [client, down.shared]
        own = (-self.sharp * data.mean(self.losses, nets)).softmax(0)
        return {"personal": {"nets": nets, "weights": (own,)}, "global": (down.shared,)}

    def predict(self, model, x):
        if isinstance(model, tuple):
            return self.model.apply(model[0], x)[0]
        out = torch.stack([self.model.apply(net, x)[0] for net in model["nets"]])
        return torch.tensordot(model["weights"][0], out, 1)
'''


@pytest.fixture
def blend(tmp_path):
    (tmp_path / "blend.py").write_text(BLEND)
    return find(str(tmp_path / "blend.py"))


@pytest.mark.parametrize("engine", checks.ENGINES)
def test_engines_agree_on_trees(blend, engine):
    checks.check_engines(blend, "norm", engine)


@pytest.mark.slow
def test_a_method_of_trees_keeps_the_contract(blend):
    wrong = [f"{verdict.check}: {verdict.error}" for verdict in runner.check_method(blend) if verdict.error]
    assert wrong == []


def test_trees_learn_every_task(blend):
    checks.check_tasks(blend)


def test_trees_on_recorded_steps(blend):
    pytest.importorskip("triton", reason="the fast engine needs Triton")
    make = toy.maker(blend)
    expected = checks.play(Sequential(toy.job(make(epochs=1))), toy.COHORTS[:1])
    recorded = Vectorised(toy.job(make(epochs=1)), fast=True, notice=pytest.fail)
    checks.compare(checks.play(recorded, toy.COHORTS[:1]), expected, "recorded")


@pytest.mark.slow
def test_trees_on_compiled_steps(blend):
    checks.check_compiled(blend, backend="eager")
