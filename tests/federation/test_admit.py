"""A client that fails, diverges or sends what cannot be used loses its turn: others end as if it were not there."""

import copy
import json
import re
from dataclasses import dataclass, replace

import pytest
import torch

import perfed
from perfed import api
from perfed.contract import checks, toy
from perfed.core.errors import Problem
from perfed.core.messages import Up, Uploads
from perfed.core.model import Model
from perfed.core.rounds import Phase
from perfed.core.tree import tree_map
from perfed.engines.base import Job, Reply
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation import reduce
from perfed.federation.admit import inspect
from perfed.federation.faults import Faults
from perfed.federation.federation import Federation, step
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg
from perfed.training.catalog import methods
from perfed.training.observers.checkpoint import Checkpoints
from perfed.wire.base import Transform

SIZES = (8, 7, 5, 9, 6)
BAD = 7  # the number of training samples by which a method knows its bad client
ENGINES = {"sequential": Sequential, "workers": Workers, "vectorised": Vectorised}
CLOSE = {"sequential": 0, "workers": 0, "vectorised": 1e-12}


def spoiling(kind, where, value=torch.nan):
    """A method whose client with 7 samples spoils what it sends, or its state."""

    @dataclass(frozen=True)
    class Spoils(kind):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            spoilt = lambda t: torch.where(data.size == BAD, value, t) if t.is_floating_point() else t
            if where == "weight":
                weight = torch.as_tensor(data.size if up.weight is None else up.weight).double()
                return state, Up(up.mean, up.own, spoilt(weight), up.group)
            if where == "state":
                return tree_map(spoilt, state), up
            changed = {"mean": up.mean, "own": up.own} | {where: tree_map(spoilt, getattr(up, where))}
            return state, Up(**changed, weight=up.weight, group=up.group)

    return Spoils


@dataclass(frozen=True)
class Raises(FedAvg):
    """FedAvg whose client with 7 samples raises."""

    def local(self, client, down, data):
        if int(data.size) == BAD:
            raise ValueError("a broken disk")
        return super().local(client, down, data)


@dataclass(frozen=True)
class RaisesOrSpoils(FedAvg):
    """FedAvg whose client with 7 samples raises, while that with 9 samples sends what is no number."""

    def local(self, client, down, data):
        if int(data.size) == BAD:
            raise ValueError("a broken disk")
        state, up = super().local(client, down, data)
        return state, Up(torch.where(data.size == 9, torch.inf, up.mean))


@dataclass(frozen=True)
class OtherForm(FedAvg):
    """FedAvg whose client with 7 samples sends another number of numbers."""

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        return state, Up(up.mean[:-1]) if int(data.size) == BAD else up


@dataclass(frozen=True)
class OtherState(FedAvg):
    """FedAvg whose client with 7 samples ends with a state of another form."""

    def init_client(self):
        return self.model.zeros()

    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        return state[:-1] if int(data.size) == BAD else state, up


def federation(engine, kind, like="fedavg", **options):
    settings = {name: getattr(toy.maker(methods()[like])(epochs=1), name) for name in methods()[like].fields}
    method = kind(Model(toy.plain_net, dtype=torch.float64), **settings)
    return Federation(ENGINES[engine](Job(method, toy.toy_clients(SIZES), seed=5)), **options)


def played(fed, cohorts):
    outcome = checks.play(fed.engine, cohorts, fed)
    return outcome.server, fed.engine.states[0].take(range(5)), outcome.models


CASES = [("fedavg", "mean"), ("scaffold", "mean"), ("ditto", "state"), ("fedavg", "weight"), ("apple", "own")]
CASES += [("fedfomo", "own"), ("pfedmt", "mean"), ("feddyn", "mean"), ("pgfed", "mean")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "where"), CASES)
def test_the_others_end_as_if_it_were_not_there(engine, name, where):
    kind = methods()[name].load()
    if engine == "vectorised" and not kind.vectorised:
        pytest.skip("not batched")
    fed = federation(engine, spoiling(kind, where), name)
    outcome = played(fed, [range(5), (0, 1, 2), (1, 3, 4)])
    expected = played(federation(engine, kind, name), [(0, 2, 3, 4), (0, 2), (3, 4)])
    assert checks.difference(outcome, expected) <= CLOSE[engine]
    refusals = fed.look()
    assert {(each.round, each.client) for each in refusals} == {(1, 1), (2, 1), (3, 1)}
    assert all(each.tensor.partition("/")[0] == where for each in refusals)
    assert not fed.diverged


@pytest.mark.parametrize("engine", ["sequential", "workers"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Raises, "ValueError: a broken disk"), (OtherForm, "its shape is (83,), not (84,)"),
     (OtherState, "its shape is (83,), not (84,)")],
)  # fmt: skip
def test_who_raises_or_sends_another_form_loses_its_turn(engine, kind, reason):
    fed = federation(engine, kind)
    outcome = played(fed, [range(5), (0, 1, 2), (1, 3, 4)])
    expected = played(federation(engine, FedAvg), [(0, 2, 3, 4), (0, 2), (3, 4)])
    assert checks.difference((outcome[0], outcome[2]), (expected[0], expected[2])) == 0
    refusals = fed.look()
    assert [(each.round, each.client) for each in refusals] == [(1, 1), (2, 1), (3, 1)]
    assert all(reason in each.reason for each in refusals)


BAD_UPLOADS = {  # what the client with 7 samples sends in place of `mean`, and what is said of it
    "a number that would be broadcast": (lambda up: Up(up.mean[:1]), "mean", "its shape is (1,), not (84,)"),
    "a row": (lambda up: Up(up.mean[None]), "mean", "its shape is (1, 84), not (84,)"),
    "nothing": (lambda up: Up(), "mean", "it is missing"),
    "another key": (lambda up: Up({"w": up.mean}), "mean", "it is missing"),
    "one more": (lambda up: Up(up.mean, own=up.mean), "own", "the method does not send it"),
    "whole numbers": (lambda up: Up(up.mean.long()), "mean", "its numbers are int64, not float64"),
    "other numbers": (lambda up: Up(up.mean.float()), "mean", "its numbers are float32, not float64"),
    "complex numbers": (lambda up: Up(up.mean + 0j), "mean", "its numbers are complex128, not float64"),
    "no tensor": (lambda up: Up(0.0), "", "local must return tensors in its state and in Up, not float"),
    "a weight for a count": (lambda up: Up(up.mean, weight=1e12), "weight", "its numbers are float64, not int64"),
    "a weight of True": (lambda up: Up(up.mean, weight=True), "", "Up.weight must be a number of at least 0, not bool"),
    "two weights": (lambda up: Up(up.mean, weight=torch.ones(2)), "weight", "its shape is (2,), not ()"),
    "a group": (lambda up: Up(up.mean, group=torch.tensor(0)), "group", "the method does not send it"),
}


@pytest.mark.parametrize("engine", ["sequential", "workers"])
@pytest.mark.parametrize("name", BAD_UPLOADS)
def test_a_form_is_what_the_method_declares(engine, name):
    """Not what the first client sends: the bad one comes first and alone, then as half of a cohort, then as a third."""
    change, tensor, reason = BAD_UPLOADS[name]

    @dataclass(frozen=True)
    class Bad(FedAvg):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            return state, change(up) if int(data.size) == BAD else up

    if reason.startswith(("local", "Up.weight")):  # that ends the turn at the client, and a round of it alone the run
        cohorts, expected = [(1, 2), (0, 1, 2)], [(2,), (0, 2)]
    else:
        cohorts, expected = [(1,), (1, 2), (0, 1, 2)], [(2,), (0, 2)]
    fed, others = federation(engine, Bad), federation(engine, FedAvg)
    others.round = len(cohorts) - 2
    assert checks.difference(played(fed, cohorts)[0], played(others, expected)[0]) == 0
    refusals = fed.look()
    assert [(each.round, each.client) for each in refusals] == [(n + 1, 1) for n in range(len(cohorts))]
    assert all(each.tensor == tensor and reason in each.reason for each in refusals)


@dataclass(frozen=True)
class Choosy(OtherForm):
    """OtherForm that raises for samples of zeros alone, such as a specimen's."""

    def local(self, client, down, data):
        if not data.mean(self.largest):
            raise ValueError("there is nothing to learn")
        return super().local(client, down, data)

    def largest(self, batch, _):
        return batch.x.abs().max()


@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_where_a_specimen_cannot_train_the_form_is_that_of_most(engine):
    fed = federation(engine, Choosy)
    outcome = played(fed, [range(5), (1, 2)])
    expected = played(federation(engine, FedAvg), [(0, 2, 3, 4), (2,)])
    assert checks.difference(outcome[0], expected[0]) == 0
    assert [(each.round, each.client) for each in fed.look()] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda up: Up((up.mean > 0).long()), "Changed sends int64 as 'mean', and a mean of those would be cut to whole"),
     (lambda up: Up(own={"z": up.mean + 0j}), "Changed sends complex numbers as 'own/z'"),
     (lambda up: Up(up.mean, weight=torch.ones(2)), "Changed sends a weight of shape (2,)"),
     (lambda up: Up(up.mean, group=up.mean.sum()), "Changed sends a group of float64")],
)  # fmt: skip
def test_a_form_that_no_server_can_use_is_refused_at_once(engine, change, says):
    @dataclass(frozen=True)
    class Changed(FedAvg):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            return state, change(up)

    fed = federation(engine, Changed)
    with pytest.raises(Problem, match=re.escape(says)):
        fed.step()
    fed.engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_cannot_change_its_mind(engine):
    """Clients that all send another form than in round 1 lose their turns, where clients are run one by one."""
    rounds = []

    @dataclass(frozen=True)
    class Fickle(FedAvg):
        def broadcast(self, server, ids):
            rounds.append(ids)
            return super().broadcast(server, ids)

        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            return state, up if len(rounds) < 2 else Up(up.mean[:1])

    fed = federation(engine, Fickle)
    fed.step(range(5))
    if engine == "vectorised":
        with pytest.raises(TypeError, match=r"Fickle: uploads changed their form \(mean: its shape is \(1,\)"):
            fed.step(range(5))
    elif engine == "sequential":  # a worker has rounds of its own
        server = fed.server.clone()
        fed.step(range(5))
        assert torch.equal(fed.server, server)
        assert [each.client for each in fed.look()] == [0, 1, 2, 3, 4]
    fed.engine.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_group_that_is_none_is_refused(engine, lazy):
    """Also where nobody looks at once: such a row is in no group's mean."""
    kind = methods()["ifca"].load()

    @dataclass(frozen=True)
    class Lost(kind):
        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            return state, replace(up, group=torch.where(data.size == BAD, 7, up.group))

    fed = federation(engine, Lost, "ifca", lazy=lazy)
    outcome = played(fed, [range(5), (0, 1, 2)])
    expected = played(federation(engine, kind, "ifca"), [(0, 2, 3, 4), (0, 2)])
    assert checks.difference(outcome[0], expected[0]) <= 1e-12
    assert [(each.client, each.tensor, each.reason) for each in fed.look()] == [
        (1, "group", "there is no such group")
    ] * 2


@pytest.mark.parametrize("engine", ["sequential", "workers"])
@pytest.mark.parametrize("lazy", [False, True])
def test_one_reply_may_hold_failures_and_spoiled_rows(engine, lazy):
    """Both count against the quorum: three of five are left."""
    fed = federation(engine, RaisesOrSpoils, quorum=0.6, lazy=lazy)
    outcome = played(fed, [range(5), (0, 1, 2)])
    assert checks.difference(outcome, played(federation(engine, FedAvg), [(0, 2, 4), (0, 2)])) == 0
    refused = [(each.round, each.client, each.tensor) for each in fed.look()]
    assert refused == [(1, 1, ""), (1, 3, "mean"), (2, 1, "")]
    fed = federation(engine, RaisesOrSpoils, quorum=0.61, lazy=lazy)
    played(fed, [range(5), range(5)])
    fed.look()
    assert torch.equal(fed.server, fed.method.init_server(5))
    assert fed.strikes == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["apple", "fedfomo", "pgfed"])
def test_all_rows_may_be_spoiled_where_a_server_reads_rows(engine, name):
    """There is nothing to give to `aggregate`, so the round is abandoned, whatever the quorum."""
    kind = methods()[name].load()
    if engine == "vectorised" and not kind.vectorised:
        pytest.skip("not batched")
    fed = federation(engine, spoiling(kind, "own"), name, quorum=0.0)
    server, states = copy.deepcopy(fed.server), fed.engine.states[0].take(range(5))
    for round in (1, 2):
        assert fed.step([1]) == [1]
        assert checks.difference((fed.server, fed.engine.states[0].take(range(5))), (server, states)) == 0
        assert (fed.strikes, fed.diverged) == (round, "")
    fed.step([1])
    fed.engine.close()
    assert fed.diverged
    assert [(each.round, each.client) for each in fed.look()] == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("quorum", "asked", "counts"),
    [(0.0, (1,), False), (0.0, (0, 1), True), (0.5, (0, 1), True), (0.51, (0, 1), False), (1.0, (0, 2), True),
     (0.75, (0, 1, 2, 3), True), (0.76, (0, 1, 2, 3), False), (0.8, range(5), True), (0.81, range(5), False)],
)  # fmt: skip
@pytest.mark.parametrize("lazy", [False, True])
def test_a_quorum_is_a_share_of_those_who_were_asked(quorum, asked, counts, lazy):
    fed = federation("sequential", spoiling(FedAvg, "mean"), quorum=quorum, lazy=lazy)
    fed.step(asked)
    fed.look()
    assert fed.strikes == (not counts)
    assert torch.equal(fed.server, fed.method.init_server(5)) != counts


def test_the_first_bad_tensor_is_named():
    """States before means before rows before weights; a negative weight is as bad as one that is no number."""
    nan, fine = torch.tensor([0.0, torch.nan]), torch.zeros(2)
    row = lambda bad: torch.stack([nan if bad else fine])

    def reason(state=False, mean=False, own=False, weight=1.0):
        uploads = Uploads(torch.tensor([4]), {"a": row(False), "b": row(mean)}, (row(own),), torch.tensor([weight]))
        reply = Reply([4], uploads, torch.tensor([0 if state else -1]), ["state/v"], [], lambda _: None)
        verdict = inspect(3, reply, uploads)
        refusals = verdict.refusals(verdict.wrong.tolist())
        assert all((each.round, each.client) == (3, 4) for each in refusals)
        return [(each.tensor, each.reason) for each in refusals]

    assert reason() == []
    assert reason(weight=0.0) == []
    assert reason(True, True, True, -1.0) == [("state/v", "it holds numbers that are not finite")]
    assert reason(False, True, True, -1.0) == [("mean/b", "it holds numbers that are not finite")]
    assert reason(False, False, True, -1.0) == [("own/0", "it holds numbers that are not finite")]
    for weight in (-1.0, torch.inf, torch.nan):
        assert reason(weight=weight) == [("weight", "it is negative or not finite")]
    for count in (-3, 0):
        assert reason(weight=count) == [("weight", "a number of training samples is 1 or more")]
    assert reason(weight=1) == []


def test_uploads_that_are_refused_have_travelled():
    """Their bytes count; who delivers nothing costs a download alone."""
    traffic = {}
    for kind in (FedAvg, spoiling(FedAvg, "mean"), Raises):
        fed = federation("sequential", kind)
        fed.step(range(5))
        traffic[kind.__name__] = (fed.traffic.down, fed.traffic.up)
    size = fed.method.model.size * 8
    assert traffic == {"FedAvg": (5 * size, 5 * size), "Spoils": (5 * size, 5 * size), "Raises": (5 * size, 4 * size)}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(("name", "where"), [("fedavg", "mean"), ("feddyn", "mean"), ("scaffold", "weight")])
def test_where_nobody_waits_numbers_are_zeroed_in_their_place(engine, name, where):
    """As on a GPU: verdicts stay where they are until somebody looks, and no shape changes."""
    kind, cohorts = methods()[name].load(), [range(5), (0, 1, 2), (1, 3, 4)]
    fed = federation(engine, spoiling(kind, where), name, lazy=True)
    outcome = played(fed, cohorts)
    expected = played(federation(engine, kind, name), [(0, 2, 3, 4), (0, 2), (3, 4)])
    assert checks.difference(outcome, expected) < 1e-12
    assert [(each.round, each.client) for each in fed.look()] == [(1, 1), (2, 1), (3, 1)]
    assert fed.look() == []  # said once


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_where_nobody_waits_nothing_is_read(name, monkeypatch):
    """Between two looks the host asks the device for no number: it would wait until all that was begun is done."""
    fed = federation("sequential", spoiling(methods()[name].load(), "mean"), name, quorum=1.0, lazy=True)
    finite = lambda stacked: torch.where(stacked.isfinite(), stacked, 0).double()
    as_on_a_gpu = lambda share, stacked: torch.tensordot(share.T, finite(stacked), 1)
    monkeypatch.setattr(fed.engine, "weighted_sum", as_on_a_gpu)

    def refuse(*_):
        raise AssertionError("a number was read")

    for cohort in ((0, 1), (0, 2), (1, 2), (1, 3), (0, 1)):
        fed.begin(cohort)
        request = next(fed.requests())
        (reply,) = fed.engine.exchange([request])
        with monkeypatch.context() as patch:
            for reading in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "numpy"):
                patch.setattr(torch.Tensor, reading, refuse)
            fed.receive(request, reply)
            fed.end()
            assert (fed.strikes, fed.diverged) == (0, "")
    assert [each.round for each in fed.look()] == [1, 3, 4, 5]
    assert "the last of them round 5" in fed.diverged


@pytest.mark.parametrize(("name", "where"), [("apple", "own"), ("fedfomo", "own"), ("lgfedavg", "mean")])
def test_a_server_that_reads_rows_or_counts_is_never_left_waiting(name, where):
    """A row of weight 0 would still be a row, and a plain number cannot be chosen by the device."""
    kind, cohorts = methods()[name].load(), [range(5), (0, 1, 2)]
    fed = federation("sequential", spoiling(kind, where), name, lazy=True)
    expected = federation("sequential", kind, name)
    outcomes = played(fed, cohorts), played(expected, [(0, 2, 3, 4), (0, 2)])
    assert checks.difference(*outcomes) == 0
    assert tree_map(type, fed.server) == tree_map(type, expected.server)


@pytest.mark.parametrize("lazy", [False, True])
def test_below_the_quorum_a_round_is_abandoned(lazy):
    """Two of three are needed: with one the server and its clients stay; then it goes on as if nothing had been."""
    fed = federation("sequential", spoiling(Ditto, "mean"), "ditto", quorum=0.6, lazy=lazy)
    fed.step((0, 2, 3))
    server, states = fed.server.clone(), fed.engine.states[0].take(range(5))
    for _ in range(2):
        fed.step((1, 3))
        assert torch.equal(fed.server, server)
        assert torch.equal(fed.engine.states[0].take(range(5)), states)  # also that of 3, whose upload was usable
    fed.look()
    assert fed.strikes == 2
    fed.step((2, 3))
    fed.look()
    assert (fed.strikes, fed.diverged) == (0, "")
    assert not torch.equal(fed.server, server)


@pytest.mark.parametrize("lazy", [False, True])
def test_three_abandoned_rounds_in_a_row_end_a_run(lazy):
    fed = federation("sequential", spoiling(FedAvg, "mean"), quorum=1.0, lazy=lazy)
    fed.step((0, 2))
    server = fed.server.clone()
    for cohort in ((0, 1), (1, 2), (1, 3), (0, 2), (1, 4)):
        fed.step(cohort)
    fed.look()
    assert torch.equal(fed.server, server)  # the last round could have been used, but the run was over
    assert fed.diverged.startswith("training diverged: too few clients of Spoils sent something usable in 3 rounds")
    assert "in a row, the last of them round 4 (" in fed.diverged
    assert "client 'client_1', mean: it holds numbers that are not finite" in fed.diverged
    assert "a smaller lr (now 0.05)" in fed.diverged


@pytest.mark.parametrize("lazy", [False, True])
def test_a_run_that_is_over_asks_nobody(lazy):
    fed = federation("sequential", spoiling(Ditto, "mean"), "ditto", quorum=1.0, patience=1, lazy=lazy)
    server, states = fed.server.clone(), fed.engine.states[0].take(range(5))
    fed.step((1, 2))
    if lazy:  # nobody knows yet
        fed.step((0, 2))
    fed.look()
    assert "something usable in round 1 (client 'client_1', mean: " in fed.diverged
    sent = fed.traffic.down
    fed.step((0, 2))
    assert fed.look() == []
    assert (fed.traffic.down, fed.round) == (sent, 2 + lazy)
    assert torch.equal(fed.server, server)
    assert torch.equal(fed.engine.states[0].take(range(5)), states)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_strikes_are_rounds_in_a_row_in_which_somebody_answered(lazy, looks):
    """Neither a look in between nor a round without answers changes their number; a round that counts sets it to 0."""
    fed = federation("sequential", spoiling(FedAvg, "mean"), quorum=1.0, lazy=lazy)
    for cohort, strikes in (((0, 1), 1), ((0, 2), 0), ((1, 3), 1), ((), 1), ((1, 2), 2), ((), 2), ((1, 4), 3)):
        assert not fed.diverged
        fed.faults = Faults() if cohort else Faults(stragglers=1.0, discard=True)
        assert fed.step(cohort or (0, 2)) == list(cohort)
        if looks:
            fed.look()
        if looks or not lazy:
            assert fed.strikes == strikes
    fed.look()
    assert fed.strikes == 3
    assert "the last of them round 7 (client 'client_1'" in fed.diverged


@pytest.mark.parametrize("lazy", [False, True])
def test_strikes_go_on_where_a_run_was_stopped(lazy):
    fed = federation("sequential", spoiling(FedAvg, "mean"), quorum=1.0, lazy=lazy, round=9)
    fed.strikes = 2
    fed.step((0, 1))
    fed.look()
    assert "the last of them round 10" in fed.diverged


def test_the_second_exchange_of_a_round_may_fail():
    """pFedMT's rounds have several exchanges: an abandoned one leaves the server as it was before the first."""
    kind = methods()["pfedmt"].load()
    exchanges = []

    @dataclass(frozen=True)
    class Late(kind):
        def aggregate(self, server, cohort):
            exchanges.append(len(cohort.ids))
            return super().aggregate(server, cohort)

        def local(self, client, down, data):
            state, up = super().local(client, down, data)
            spoilt = self.context.exchange > 0
            mean = tree_map(lambda t: t * torch.nan, up.mean) if spoilt else up.mean
            return state, Up(mean, up.own, up.weight, up.group)

    fed = federation("sequential", Late, "pfedmt")
    assert fed.method.phase(fed.server).exchanges > 1
    before = copy.deepcopy(fed.server)
    fed.step()
    assert len(exchanges) == 1
    assert checks.difference(fed.server, before) == 0
    assert fed.strikes == 1


@dataclass(frozen=True)
class Twice(Ditto):
    """Ditto with two exchanges in a round."""

    def phase(self, server):
        return Phase(exchanges=2)


class Unreadable(Transform):
    """A treatment whose server half fails in the exchanges of these numbers."""

    def __init__(self, *exchanges):
        self.exchanges, self.seen = exchanges, 0

    def server(self, uploads):
        self.seen += 1
        return replace(uploads, mean=uploads.mean * torch.nan) if self.seen - 1 in self.exchanges else uploads


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_any_exchange_of_a_round_may_be_abandoned(bad, lazy):
    """Then the server is as before the round. Clients keep the states of exchanges that counted until then."""
    make = lambda kind: kind(Model(toy.plain_net, dtype=torch.float64), lr=0.05, epochs=1, batch_size=5)
    clients, wire = toy.toy_clients(SIZES), Unreadable(*bad)
    fed = Federation(Sequential(Job(make(Twice), clients, wire=wire)), lazy=lazy)
    server, states = fed.server.clone(), fed.engine.states[0].take(range(5))
    fed.step()
    fed.look()
    assert wire.seen == (1 if 0 in bad and not lazy else 2)
    assert fed.strikes == bool(bad)
    assert torch.equal(fed.server, server) == bool(bad)
    moved = fed.engine.states[0].take(range(5))
    assert torch.equal(moved, states) == (0 in bad)
    if bad == (1,):
        once = Federation(Sequential(Job(make(Ditto), clients)))
        once.step()
        assert torch.equal(moved, once.engine.states[0].take(range(5)))


def test_simulated_drop_outs_do_not_count_against_the_quorum():
    fed = federation("sequential", spoiling(FedAvg, "mean"), quorum=1.0, faults=Faults(dropout=0.6))
    for _ in range(12):
        ids = fed.step((0, 2, 3, 4))
        assert len(ids) in (1, 2)
    assert fed.strikes == 0


def test_one_of_several_runs_may_end():
    """The runs of one batch are judged each for itself; one that is over asks nobody any more."""
    bad, clients = spoiling(FedAvg, "mean"), toy.toy_clients(SIZES)
    make = lambda: bad(Model(toy.plain_net, dtype=torch.float64), epochs=1, lr=0.05)
    engine = Vectorised(*(Job(make(), clients, seed=seed) for seed in (0, 3)))
    first, second = (Federation(engine, run, quorum=1.0) for run in range(2))
    for _ in range(4):
        step([first, second], [(0, 1), (0, 2)])
    assert first.diverged
    assert not second.diverged
    single = Federation(Vectorised(Job(make(), clients, seed=3)))
    for _ in range(4):
        single.step((0, 2))
    assert checks.difference(second.server, single.server) < 1e-12


# ---------------------------------------------------------------------- in a run

METHOD = '''"""Frail: FedAvg, one of whose clients sends what is no number in every other round."""

from dataclasses import dataclass

import torch

from perfed import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Frail(FedAvg):
    def local(self, client, down, data):
        state, up = super().local(client, down, data)
        bad = data.size == SIZE
        return state, Up(mean=torch.where(bad, torch.nan, up.mean))
'''
TINY = {"clients": 4, "rounds": 3, "epochs": 1, "hidden": 8, "baseline": False}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_says_who_was_refused(tmp_path, engine, monkeypatch):
    """In the log, in the result, and below the table."""
    size = perfed.run("fedavg", out=tmp_path / "first", **TINY, engine="sequential").about["clients"][2]["train"]
    (tmp_path / "frail.py").write_text(METHOD.replace("SIZE", str(size)))
    run = perfed.run(str(tmp_path / "frail.py"), out=tmp_path / "run", **TINY, engine=engine)
    name = run.about["clients"][2]["name"]
    expected = [{"round": round, "client": name, "tensor": "mean", "reason": "it holds numbers that are not finite"}
                for round in (1, 2, 3)]  # fmt: skip
    lines = [json.loads(line) for line in (run.path / "frail" / "rounds.jsonl").read_text().splitlines()]
    assert [refusal for line in lines for refusal in line["refused"]] == expected
    assert run.result("frail")["refused"] == {"count": 3, "first": expected}
    words = f"Frail: 3 uploads not used: client '{name}' in round 1 (mean: it holds numbers that are not finite)"
    assert words in (run.path / "report" / "summary.md").read_text()


@pytest.mark.parametrize(("quorum", "rounds"), [(0.5, 4), (1.0, 3)])
def test_a_resumed_run_refuses_alike(tmp_path, quorum, rounds, monkeypatch):
    """Stopped after round 2, it goes on from its checkpoint, strikes included, and ends with the same bytes."""
    settings = TINY | {"engine": "sequential", "checkpoint_every": 1, "quorum": quorum, "rounds": 4}
    size = perfed.run("fedavg", out=tmp_path / "first", **settings | {"rounds": 1}).about["clients"][2]["train"]
    (tmp_path / "frail.py").write_text(METHOD.replace("SIZE", str(size)))
    run = lambda folder: perfed.run(str(tmp_path / "frail.py"), out=tmp_path / folder, **settings)
    whole, write = run("whole").path / "frail", Checkpoints.write

    def stop(self, federation):
        write(self, federation)
        if federation.round == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    monkeypatch.undo()
    api.resume(tmp_path / "stopped", api.Console(quiet=True))
    for name in ("rounds.jsonl", "metrics.jsonl", "result.json", "server.safetensors"):
        assert (tmp_path / "stopped" / "frail" / name).read_bytes() == (whole / name).read_bytes(), name
    lines = [json.loads(line) for line in (whole / "rounds.jsonl").read_text().splitlines()]
    assert [len(line["refused"]) for line in lines] == [1] * rounds
    assert ("diverged" in json.loads((whole / "result.json").read_text())) == (quorum == 1.0)


def test_a_count_of_uploads_is_as_exact_unread():
    """A third of the clients is a third in double precision, also where nobody has looked at who is refused."""
    uploads = Uploads(torch.arange(2), torch.ones(2, 3), (), torch.ones(2, dtype=torch.float64))
    add = lambda share, rows: share.T @ rows.double()
    read, unread = (reduce.mean(uploads, 1, add, used).size for used in (None, torch.tensor([True, False])))
    assert (read, float(unread)) == (2, 1)
    assert float(unread / 3) == 1 / 3
