"""Means whose tensors and entries have weights of their own."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Up, Uploads
from perfed.core.model import Model
from perfed.core.tree import tree_map
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation import reduce
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.wire.base import Transform

MODEL = Model(toy.plain_net, dtype=torch.float64)


def add(share, rows):
    return Sequential.weighted_sum(None, share, rows)  # pyright: ignore[reportArgumentType]


def mean(rows, weight, group=None, groups=1, used=None):
    return reduce.mean(Uploads(torch.arange(4), rows, (), weight, group), groups, add, used)


def test_each_tensor_has_its_weight():
    a, b = torch.randn(4, 3), torch.randn(4, 2, 3)
    samples, alike = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4).double()
    cohort = mean({"a": a, "b": b}, {"a": samples, "b": alike})
    torch.testing.assert_close(cohort.mean["a"], (samples[:, None] * a).sum(0).float() / 10)
    torch.testing.assert_close(cohort.mean["b"], b.mean(0))
    assert {name: total.item() for name, total in cohort.weight.items()} == {"a": 10, "b": 4}


def test_each_entry_has_its_weight_and_nobody_is_zero():
    rows, weight = torch.randn(4, 2, 3, dtype=torch.float64), torch.rand(4, 3)
    weight[:, 1], weight[0, 2] = 0, 0
    rows[:, :, 1] = torch.nan  # nobody counts there
    cohort = mean(rows, weight)
    assert not cohort.mean[:, 1].any()
    for column in (0, 2):
        share = weight[:, column].double()
        torch.testing.assert_close(cohort.mean[:, column], (share[:, None] * rows[:, :, column]).sum(0) / share.sum())
    torch.testing.assert_close(cohort.weight, weight.double().sum(0))


def test_entries_by_group_and_without_those_refused():
    rows, weight, group = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3).double(), torch.tensor([0, 2, 0, 2])
    used = torch.tensor([True, True, False, True])
    rows[2] = weight[2] = torch.nan
    cohort = mean({"a": rows, "b": rows[:, :1]}, {"a": weight, "b": used.double()}, group, 3, used)
    torch.testing.assert_close(cohort.mean["a"][0], rows[0])
    assert not cohort.mean["a"][1].any()
    pair = weight[[1, 3]]
    torch.testing.assert_close(cohort.mean["a"][2], (pair * rows[[1, 3]]).sum(0) / pair.sum(0))
    assert cohort.weight["a"].shape == (3, 3)
    assert cohort.weight["b"].tolist() == [1, 0, 2]
    assert cohort.size == 3


@dataclass(frozen=True)
class Weighing(FedAvg):
    """FedAvg whose entries have weights by their size."""

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        return state, Up({"w": up.mean, "n": up.mean[:1]}, weight={"w": up.mean.abs(), "n": 1.0})

    def aggregate(self, server, cohort):
        return server + cohort.mean["w"]


def federation(kind, wire=None, lazy=False):
    job = Job(kind(MODEL, lr=0.05, epochs=1, batch_size=5), toy.toy_clients(), seed=5)
    return Federation(Sequential(job if wire is None else replace(job, wire=wire)), lazy=lazy, quorum=0.1)


def test_weights_of_entries_are_sent_and_a_number_is_not():
    fed = federation(Weighing)
    fed.step(range(5))
    assert fed.traffic.up_mean == 5 * (2 * MODEL.size + 1) * 8


@pytest.mark.parametrize("value", [-1.0, torch.nan, torch.inf])
def test_a_client_with_a_weight_that_cannot_be_used_loses_its_turn(value):
    @dataclass(frozen=True)
    class Bad(Weighing):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            bad = torch.where((data.size == 7) & (torch.arange(len(up.weight["w"])) == 9), value, up.weight["w"])
            return state, replace(up, weight=up.weight | {"w": bad})

    servers = []
    for lazy in (False, True):  # the other way leaves the verdict where it is
        fed = federation(Bad, lazy=lazy)
        fed.step(range(5))
        assert [(each.client, each.tensor) for each in fed.look()] == [(1, "weight/w")]
        servers.append(fed.server)
    without = federation(Weighing)
    without.step([0, 2, 3, 4])
    assert checks.difference(servers, [without.server] * 2) < 1e-15


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (lambda t: torch.ones(2), "Weighs sends the weights weight for mean/a, mean/b: Up.weight is one number, or"),
        (lambda t: {"a": 1.0}, "Weighs sends the weights weight/a for mean/a, mean/b"),
        (lambda t: {"a": t[:3], "b": 1.0}, "Weighs sends a weight of shape (3,) for 'mean/a' of shape (84,)"),
        (lambda t: {"a": 1.0, "b": t[None]}, "Weighs sends a weight of shape (1, 84) for 'mean/b' of shape (84,)"),
    ],
)  # fmt: skip
def test_weights_that_belong_to_nothing_are_refused(weight, says):
    @dataclass(frozen=True)
    class Weighs(FedAvg):
        def local(self, client, down, data):
            return client, Up({"a": down.shared, "b": down.shared}, weight=weight(down.shared.abs()))

    for wire in (None, Other()):
        with pytest.raises(Problem, match=re.escape(says)):
            federation(Weighs, wire).step()


class Other(Transform):
    """Another way that changes nothing."""


class Short(Transform):
    """Send changes and weights of entries in half the bits."""

    def client(self, up, key):
        return replace(up, mean=self.shorter(up.mean), weight=self.shorter(up.weight))

    def server(self, uploads):
        longer = lambda tree: tree_map(lambda t: t.double(), tree)
        return replace(uploads, mean=longer(uploads.mean), weight=longer(uploads.weight))

    def shorter(self, tree):
        return tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dim() else t, tree)


def test_a_treatment_reaches_weights_of_entries():
    plain, short = federation(Weighing), federation(Weighing, Short())
    for fed in (plain, short):
        fed.step()
    assert 2 * short.traffic.up_mean == plain.traffic.up_mean
    assert 0 < checks.difference(short.server, plain.server) < 1e-6
