"""Data sharing: a part of a public data set joins every client's samples, after a warm-up on all of it."""

from dataclasses import replace

import pytest
import torch
from public_samples import refine_batches, samples_of
from reference import (
    ORDER,
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
)

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.random import EXTEND, PUBLIC, derive, uniform
from perfed.data import load
from perfed.data.config import DataConfig
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.federation.traffic import PUBLIC_DATA
from perfed.methods.fedavg import FedAvg
from perfed.methods.zhao import Zhao


def part_of(clients, i, count):
    """The places of the public samples that client i gets: class by class in random order, all classes at one pace."""
    _, y = samples_of(clients)
    key = derive(ORDER, EXTEND, i, PUBLIC)
    draw = [float(uniform(derive(key, torch.tensor(k)), ())) for k in range(len(y))]
    pace = {}
    for c in y.unique().tolist():
        mine = sorted((k for k in range(len(y)) if y[k] == c), key=lambda k: draw[k])
        pace |= {k: (at / len(mine), draw[k]) for at, k in enumerate(mine, 1)}
    return sorted(pace, key=pace.__getitem__)[:count]


def extended(clients, count):
    """Clients of whom each has `count` public samples behind its own."""
    x, y = samples_of(clients)
    parts = [part_of(clients, i, count) for i in range(len(clients.names))]
    train, xs, ys = clients.train, [], []
    for i, part in enumerate(parts):
        own = slice(train.start[i], train.start[i] + train.size[i])
        xs += [train.x[own], x[part]]
        ys += [train.y[own], y[part]]
    return replace(clients, train=Split(torch.cat(xs), torch.cat(ys), tuple(n + count for n in train.size)))


def reference(world, count, warmup, rounds=ROUNDS):
    batches = refine_batches(world.clients, ORDER, 0, warmup, world.settings["batch_size"])
    w = world.train(world.net(), batches)
    sharing = World(world.build, extended(world.clients, count), **world.settings)
    for round, cohort in enumerate(rounds, 1):
        nets = [sharing.train(w, sharing.batches(i, round)) for i in cohort]
        w = average(nets, [sharing.count(i) for i in cohort])
    return w


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    world = World(build, clients, momentum=0.9, batch_size=9)
    fed = world.run(Zhao, share=0.5, warmup=5)
    close(fed.server, flat(reference(world, 6, 5)))  # half of 13, rounded to even as Python does
    assert differs(fed.server, world.run(FedAvg).server)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_share_and_warm_up_it_is_fedavg_bit_for_bit(build, clients):
    world = World(build, clients, momentum=0.9)
    found, expected = world.run(Zhao, share=0.0, warmup=0), world.run(FedAvg)
    assert torch.equal(found.server, expected.server)
    assert torch.equal(personal(found), personal(expected))


def test_a_warm_up_alone_is_fedavg_from_a_warm_model(clients):
    """The control: one may see what sharing adds to it."""
    world = World(plain_net, clients)
    close(world.run(Zhao, share=0.0, warmup=7).server, flat(reference(world, 0, 7)))
    assert differs(world.run(Zhao, share=0.0, warmup=7).server, world.run(Zhao, share=0.0, warmup=6).server)


def test_the_warm_up_is_once_and_before_the_first_round(clients):
    fed = World(plain_net, clients).federation(Zhao, warmup=4)
    cold = fed.server.clone()
    fed.begin((0, 1))
    warm = fed.server.clone()
    assert differs(warm, cold)
    fed = World(plain_net, clients).federation(Zhao, warmup=4, lr=1e-9)
    fed.step((0, 1))
    moved = float((fed.server - cold).norm())
    fed.step((0, 1))
    assert 0 < float((fed.server - cold).norm()) < 3 * moved  # no second one


def of_one_class(classes=10, each=20, public=4):
    """As many clients as classes, one class each, and a balanced public data set; all classes alike in all."""
    draw = torch.Generator().manual_seed(3)

    def split(labels, size):
        return Split(torch.randn(len(labels), 6, generator=draw, dtype=torch.float64), labels, size)

    y, sizes = torch.arange(classes).repeat_interleave(each), (each,) * classes
    names = tuple(f"client_{id}" for id in range(classes))
    shared = torch.arange(classes).repeat(public)
    return Clients(
        names, split(y, sizes), split(y, sizes), split(y, sizes), classes, public=split(shared, (len(shared),))
    )


def shares(y, classes=10):
    return y.bincount(minlength=classes) / len(y)


def ten_net():
    return torch.nn.Linear(6, 10)


@pytest.mark.parametrize(("share", "after"), [(0.5, 0.9), (1.0, 0.6), (0.25, 1.2)])
def test_the_distance_to_all_classes_shrinks_by_n_over_n_plus_the_part(share, after):
    """EMD_i = sum_y |p_i(y) - p(y)| is 1.8 with one class of ten; times n_i / (n_i + share |G|) after sharing."""
    world = World(ten_net, of_one_class(), epochs=1)
    fed = world.run(Zhao, [range(10)], share=share, warmup=0)
    train, uniform_share = fed.engine.jobs[0].clients.train, torch.full((10,), 0.1)
    for i in range(10):
        _, y = world.samples(i)
        before = float((shares(y) - uniform_share).abs().sum())
        y = train.y[train.start[i] : train.start[i] + train.size[i]]
        assert before == pytest.approx(1.8)
        assert float((shares(y) - uniform_share).abs().sum()) == pytest.approx(before * 20 / (20 + share * 40))
        assert before * 20 / (20 + share * 40) == pytest.approx(after)


def test_parts_are_of_each_client_and_no_sample_is_in_one_twice():
    world = World(ten_net, of_one_class(), epochs=1)
    fed = world.run(Zhao, [range(10)], share=0.5, warmup=0)
    train, (x, _) = fed.engine.jobs[0].clients.train, samples_of(world.clients)
    parts = []
    for i in range(10):
        joined = train.x[train.start[i] + 20 : train.start[i] + 40]
        parts.append(tuple(sorted(int((x == row).all(1).nonzero()) for row in joined)))
        assert len({*parts[-1]}) == 20
        assert torch.equal(train.x[train.start[i] : train.start[i] + 20], world.samples(i)[0])  # its own stay
    assert len({*parts}) == 10
    fed.step(range(10))
    assert fed.engine.jobs[0].clients.train.size == (40,) * 10  # they join once


def test_what_is_shared_is_nobodys_test_sample():
    clients = load(DataConfig(name="digits", clients=5, public=0.1), seed=0)
    rows = lambda split: {row.numpy().tobytes() for row in split.x}
    public, others = rows(clients.public), rows(clients.test) | rows(clients.val) | rows(clients.train)
    assert clients.public.labelled
    assert len(public) == 180
    assert not public & others


def test_a_model_each_way_and_a_part_of_the_samples_once(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(Zhao, share=0.5)
    assert per_client(fed) == (size, size)
    assert fed.traffic.extra == {PUBLIC_DATA: 4 * 6 * (6 + 1) * 8}  # 4 clients, 6 samples of 6 numbers and a label
    assert world.run(Zhao, share=0.0).traffic.extra == {PUBLIC_DATA: 0}
    check_no_alias(fed)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_what_is_refused(engine, clients):
    world = World(plain_net, clients)
    for settings, words in (({"share": 1.5}, "share must be at most 1"), ({"warmup": -1}, "warmup must be at least 0")):
        with pytest.raises(Problem, match=words):
            world.federation(Zhao, **settings)
    method = world.federation(Zhao).method
    for public, words in (
        (None, "Zhao needs public samples, and there are none"),
        (replace(clients.public, labelled=False), "Zhao needs labelled public samples"),
    ):
        with pytest.raises(Problem, match=words):
            Federation(engine(Job(method, replace(clients, public=public)))).step((0, 1))
