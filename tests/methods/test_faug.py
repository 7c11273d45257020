"""FAug: seeds of rare classes, a generator that is trained on them, and clients that fill up their classes with it."""

from dataclasses import replace

import pytest
import torch
from reference import ORDER, SEED, World, average, close, flat, norm_net, personal, plain_net, same
from torch import nn

from perfed.contract.toy import FEATURES, task_clients
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.random import EXTEND, REFINE, TRAIN, derive, normal, pick, shuffle, uniform
from perfed.core.task import Binary
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.faug import FAug
from perfed.methods.fedavg import FedAvg
from perfed.methods.shared import cgan
from perfed.methods.shared.seeds import filling, gathered
from perfed.training.newcomers import visited

K, NOISE = 3, 64
EVERYBODY = range(5)
ROUNDS = (EVERYBODY, (0, 1, 3), (1, 2, 3), (0, 2, 4))  # the first gathers seeds
QUICK = {"few": 0.75, "k": 3, "r": 1, "gan_steps": 4, "gan_lr": 0.01}


@pytest.fixture
def uneven(clients):
    """The toy's clients with few samples of one class and many of another."""
    draw = torch.rand(len(clients.train.y), generator=torch.Generator().manual_seed(3))
    return replace(clients, train=replace(clients.train, y=(draw > 0.68).long() + (draw > 0.92).long()))


# ---------------------------------------------------------------------- the reference


def networks():
    """The generator and the critic of vectors, as they are with the run's seed."""
    found = []
    for build in (
        lambda: nn.Sequential(
            nn.Linear(NOISE + K, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, FEATURES), nn.Tanh()
        ),
        lambda: nn.Sequential(nn.Linear(FEATURES + K, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)),
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            found.append(build().double())
    return found


def one_hot(y):
    return torch.eye(K, dtype=torch.float64)[y]


def seeds(world, i, few, k, r):
    """Of a client: what it sends, (rank, class, sample) each, and its targets and their cover."""
    x, y = world.samples(i)
    key, counts = derive(ORDER, TRAIN, 1, 0, i), y.bincount(minlength=K).tolist()
    draws = uniform(derive(derive(key, 1, torch.arange(len(y))), 1), ())
    targets = [c for c in range(K) if 0 < counts[c] < few * len(y) / K]
    others = sorted(
        (c for c in range(K) if counts[c] and c not in targets), key=uniform(derive(key, 2), (K,)).__getitem__
    )
    cover, sent = others[:r] if targets else [], []
    for c in targets + cover:
        rows = sorted((n for n in range(len(y)) if y[n] == c), key=draws.__getitem__)[:k]
        sent += [(rank, c, x[row]) for rank, row in enumerate(rows)]
    return sorted(sent, key=lambda each: each[:2]), targets, cover


def adversaries(pool, steps, lr):
    """The generator after its training on the seeds, and the extent of these."""
    x, y = torch.stack([x for _, _, x in pool]), torch.tensor([c for _, c, _ in pool])
    low, high = x.min(), x.max()
    x, weight = 2 * (x - low) / (high - low) - 1, 1 / y.bincount()[y].double()
    G, D = networks()
    of_G, of_D = (torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.999)) for net in (G, D))
    look, ones = nn.BCEWithLogitsLoss(), torch.ones(64, 1, dtype=torch.float64)
    for step in range(steps):
        key = derive(ORDER, REFINE, 1, 0, 0, 0, 1, step)
        rows = pick(derive(key, 1), 64, weight)
        classes = one_hot(y[rows])
        made = G(torch.cat([normal(derive(key, 3), (64, NOISE), torch.float64), classes], 1))
        of_D.zero_grad()
        judge = lambda x, classes=classes: D(torch.cat([x, classes], 1))
        (look(judge(x[rows]), ones) + look(judge(made.detach()), 0 * ones)).backward()
        of_D.step()
        of_G.zero_grad()
        look(judge(made), ones).backward()
        of_G.step()
    return G, low, high


def filled(world, i, G, low, high, known, ratio=1):
    """A client's samples, and those that the generator adds."""
    x, y = world.samples(i)
    counts = y.bincount(minlength=K).tolist()
    wanted = [(max(counts) - c) * (kind in known) for kind, c in enumerate(counts)]
    most = min(1, ratio * len(y) / max(sum(wanted), 1))
    ends = [round(most * sum(wanted[: kind + 1])) for kind in range(K)]
    new = torch.tensor([sum(place >= end for end in ends) for place in range(ends[-1])], dtype=torch.int64)
    noise = normal(derive(derive(ORDER, EXTEND, i, 1, torch.arange(len(y))), 2), (ratio, NOISE), torch.float64)
    with torch.no_grad():
        made = G(torch.cat([noise.flatten(0, 1)[: len(new)], one_hot(new)], 1))
    return torch.cat([x, low + (made + 1) / 2 * (high - low)]), torch.cat([y, new])


def batches(data, round, i, settings):
    x, y = data
    key = derive(ORDER, TRAIN, round, 0, i, 0, 0)
    for epoch in range(settings["epochs"]):
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        yield from ((x[rows], y[rows]) for rows in order.split(settings["batch_size"]))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, uneven):
    world = World(build, uneven, momentum=0.9)
    fed = world.run(FAug, ROUNDS, **QUICK)
    sent = {i: seeds(world, i, QUICK["few"], QUICK["k"], QUICK["r"]) for i in EVERYBODY}
    pool = [each for i in EVERYBODY for each in sent[i][0]]
    G, low, high = adversaries(pool, QUICK["gan_steps"], QUICK["gan_lr"])
    data = {i: filled(world, i, G, low, high, {c for _, c, _ in pool}) for i in EVERYBODY}
    close(fed.server["G"], flat(G))
    assert fed.engine.jobs[0].clients.train.size == tuple(len(data[i][1]) for i in EVERYBODY)
    w = world.net()
    for round, cohort in enumerate(ROUNDS[1:], 2):
        nets = [world.train(w, batches(data[i], round, i, world.settings)) for i in cohort]
        w = average(nets, [len(data[i][1]) for i in cohort])
    close(fed.server["w"], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))
    # The case has clients with and without targets, classes of which not all is sent, and several others as a cover.
    targets, covers = zip(*(sent[i][1:] for i in EVERYBODY), strict=True)
    assert sum(map(bool, targets)) > 1
    leakage = [len(t) / max(len(t) + len(c), 1) for t, c in zip(targets, covers, strict=True)]
    assert fed.method.notes(fed.server)["leakage"] == pytest.approx(sum(leakage) / 5)
    assert 0 < sum(leakage) < 5


def later(world, kind, rounds, **more):
    """A method that goes on where the seeds were gathered in the first round."""
    fed = world.federation(kind, **more)
    fed.round = 1
    for cohort in rounds:
        fed.step(cohort)
    return fed


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_targets_it_is_fedavg(build, uneven):
    world = World(build, uneven, momentum=0.9)
    plain, none = world.run(FedAvg), world.run(FAug, few=0)
    assert torch.equal(none.server["w"], plain.server)
    assert none.traffic == plain.traffic
    nobody = world.run(FAug, ROUNDS, few=1e-6)  # seeds are asked for, but no class is so rare
    assert torch.equal(nobody.server["w"], later(world, FedAvg, ROUNDS[1:]).server)
    assert nobody.method.notes(nobody.server) == {"leakage": 0.0, "classes_in_pool": 0}
    assert not nobody.engine.extended[0].known
    assert (world.run(FAug, ROUNDS, **QUICK).server["w"] - nobody.server["w"]).abs().max() > 1e-3


# ---------------------------------------------------------------------- seeds


def message(y, few=0.5, k=2, r=1, cover=(0.3, 0.2, 0.1, 0.4), classes=4):
    """What a client with these labels sends, its samples being their numbers from 1 on; -1 is filling of a map."""
    y = torch.tensor(y)
    real = (y >= 0).long()
    of = nn.functional.one_hot(y.clamp_min(0), classes) * real[:, None]
    x = (torch.arange(len(y)) + 1.0)[:, None] * real[:, None]
    draw = torch.linspace(0.9, 0.1, len(y))  # the last ones first
    return gathered({"x": x, "of": of, "draw": draw, "cover": torch.tensor(cover).expand(len(y), -1)}, few, k, r)


def sent(up):
    """The samples that are sent, by class."""
    x, real = up.own["x"].squeeze(-1), up.own["real"]
    assert not x[~real].any()
    return {c: x[real[:, c], c].tolist() for c in range(x.shape[1]) if real[:, c].any()}


def test_targets_are_sent_with_a_cover():
    y = [0] * 5 + [1] * 4 + [2, -1, -1]
    up = message(y)  # 10 samples of 4 classes: below 1.25 of a class it is rare, and class 3 is not there at all
    assert sent(up) == {2: [10.0], 1: [9.0, 8.0]}
    assert float(up.mean) == 0.5
    assert sent(message(y, r=0)) == {2: [10.0]}
    assert float(message(y, r=0).mean) == 1
    assert sent(message(y, r=5)) == {2: [10.0], 1: [9.0, 8.0], 0: [5.0, 4.0]}  # all others that there are
    assert float(message(y, r=5).mean) == pytest.approx(1 / 3)
    assert sent(message(y, cover=(0.1, 0.2, 0.3, 0.4))) == {2: [10.0], 0: [5.0, 4.0]}
    assert sent(message(y, few=1.0, k=1)) == {2: [10.0], 1: [9.0]}


def test_who_has_no_target_sends_nothing():
    up = message([0, 0, 1, 1, 2, 2, 3, 3])
    assert sent(up) == {}
    assert float(up.mean) == 0
    assert up.own["x"].shape == (2, 4, 1)


def test_a_class_that_nobody_has_is_never_made(uneven):
    none = replace(uneven, train=replace(uneven.train, y=uneven.train.y.clamp_max(1)))
    fed = World(plain_net, none).run(FAug, ROUNDS, **QUICK | {"few": 0.9})
    assert fed.server["known"].tolist() == [True, True, False]
    train = fed.engine.jobs[0].clients.train
    assert max(int(train.y[s : s + n].max()) for s, n in zip(train.start, train.size, strict=True)) == 1


def test_a_client_without_a_class_gets_it_of_the_others_seeds(uneven):
    world = World(plain_net, uneven)
    assert (world.samples(1)[1] == 0).all()  # it has no seed of another class, nor a target
    assert seeds(world, 1, 0.9, 3, 1) == ([], [], [])
    fed = world.run(FAug, ROUNDS, **QUICK | {"few": 0.9})
    train = fed.engine.jobs[0].clients.train
    own, made = train.y[train.start[1] :][:7], train.y[train.start[1] + 7 :][: train.size[1] - 7]
    assert (own == 0).all()
    assert sorted({*made.tolist()}) == [1, 2]


# ---------------------------------------------------------------------- samples that are made


def added(counts, known=(True,) * 3, ratio=1.0, places=40):
    of = one_hot(torch.repeat_interleave(torch.arange(3), torch.tensor(counts))).long()
    of = torch.cat([of, torch.zeros(4, 3).long()])  # filling of a map
    y, made = filling(of, torch.tensor(known), ratio, places)
    assert made.tolist() == sorted(made.tolist(), reverse=True)
    return y[made].bincount(minlength=3).tolist()


def test_classes_are_filled_up_until_all_are_alike():
    assert added([10, 8, 6], ratio=4) == [0, 2, 4]
    assert added([10, 4, 0], ratio=4) == [0, 6, 10]
    assert added([5, 5, 5]) == [0, 0, 0]
    assert added([10, 4, 0], (True, True, False), ratio=4) == [0, 6, 0]


def test_no_more_join_than_the_ratio_allows():
    assert added([10, 0, 0]) == [0, 5, 5]  # twenty are wanted, and there are ten
    assert added([10, 0, 0], ratio=0.4) == [0, 2, 2]
    assert added([9, 3, 0], ratio=0.5) == [0, 2, 4]
    assert added([10, 8, 6], ratio=0.25) == [0, 2, 4]


def test_seeds_are_drawn_class_by_class_alike():
    x, y = torch.tensor([[2.0], [4.0], [6.0], [3.0]]), torch.tensor([0, 0, 0, 2])
    (scaled, classes, weight), extent = cgan.pool_of(x, y)
    assert extent.tolist() == [2, 6]
    assert scaled.flatten().tolist() == [-1, 0, 1, -0.5]
    assert weight.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert torch.equal(classes, y)
    (scaled, _, _), _ = cgan.pool_of(torch.ones(2, 1), torch.tensor([0, 1]))
    assert scaled.isfinite().all()


def trained_generator(steps=150):
    """A generator for two classes of points that lie apart."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.where(y[:, None] > 0, 0.7, -0.7) + 0.1 * torch.randn(40, 4, generator=draw)
    G, D = Model(lambda: cgan.generator_network(2, (4,))), Model(lambda: cgan.critic_network(2, (4,)))
    given, extent = cgan.pool_of(x, y)
    carry, lr = cgan.start(G, D, 0), torch.tensor(3e-3)
    for step in range(steps):
        carry = cgan.duel(G, D, carry, Batch(x, y, None, derive(1, step)), (*given, lr))
    return G, carry[0][0], extent


def test_the_generator_makes_what_it_is_asked_for():
    G, theta, extent = trained_generator()
    y = torch.arange(200) % 2
    x = cgan.make(G, theta, normal(torch.tensor(5), (200, 64)), y, extent)
    assert x.shape == (200, 4)
    assert ((x.mean(1) > 0) == (y > 0)).double().mean() > 0.95
    assert (x >= extent[0]).all()
    assert (x <= extent[1]).all()


@pytest.mark.parametrize("shape", [(4,), (1, 4, 4)])
def test_seeds_that_are_images_are_distorted(shape, monkeypatch):
    x, y = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
    G, D = Model(lambda: cgan.generator_network(2, shape)), Model(lambda: cgan.critic_network(2, shape))
    step = lambda: cgan.duel(
        G, D, cgan.start(G, D, 0), Batch(x, y, None, torch.tensor(1)), (x, y, torch.ones(6), torch.tensor(1e-3))
    )
    mine = step()
    monkeypatch.setattr(cgan, "distorted", lambda x, keys: x)
    assert torch.equal(mine[1][0], step()[1][0]) == (len(shape) == 1)


def images(seed=0):
    draw = torch.Generator().manual_seed(seed)

    def split(sizes):
        n = sum(sizes)
        x = torch.randint(0, 256, (n, 1, 2, 3), generator=draw, dtype=torch.uint8)
        return Split(x, (torch.rand(n, generator=draw) > 0.75).long(), sizes)

    return Clients(("a", "b", "c"), split((30, 20, 25)), split((0, 0, 0)), split((4, 4, 4)), 2)


def test_images_are_made_as_images_within_the_extent_of_the_seeds():
    net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    method = FAug(Model(net, dtype=torch.float64), epochs=1, gan_steps=3, few=0.9)
    engine = Sequential(Job(method, images(), 5))
    fed = Federation(engine)
    fed.step()
    fed.step()
    train, known = engine.jobs[0].clients.train, engine.extended[0].known
    low, high = fed.server["extent"].tolist()
    assert 0 <= low < high <= 1
    for i in range(3):
        end = train.start[i] + train.size[i]
        made = train.x[end - known[i].made : end]
        assert made.shape == (known[i].made, 1, 2, 3)
        assert low <= float(made.min()) <= float(made.max()) <= high
        assert train.y[train.start[i] : end].bincount().tolist() == [train.size[i] // 2] * 2
    assert all(each.made for each in known.values())


# ---------------------------------------------------------------------- messages


def test_seeds_go_up_once_and_the_generator_goes_down_once(uneven):
    world = World(norm_net, uneven)
    fed, P = world.federation(FAug, **QUICK), len(flat(world.net()))
    P_gen = sum(p.numel() for p in networks()[0].parameters())
    fed.step()
    assert fed.traffic.down == 0
    assert fed.traffic.up == 5 * (QUICK["k"] * K * (FEATURES * 8 + 1) + 8)  # room for all, and a share of targets
    known, before = set(), fed.traffic.up
    for round, cohort in enumerate(ROUNDS[1:], 1):
        fed.step(cohort)
        known |= {*cohort}
        assert fed.traffic.down == len(known) * ((P_gen + 2) * 8 + K) + round * 3 * P * 8
        assert fed.traffic.up == before + round * 3 * P * 8
    assert len(known) == 5


def test_the_seeds_are_asked_for_again_where_too_few_answered(uneven):
    fed = World(plain_net, uneven).federation(FAug, **QUICK)
    fed.quorum = 2.0  # nobody can reach it
    fed.step()
    assert not fed.server["gathered"]
    fed.quorum = 0.5
    fed.step()
    assert fed.server["gathered"]
    assert fed.server["known"].any()
    assert not fed.engine.extended[0].known
    fed.step()
    assert fed.engine.extended[0].known


def test_a_newcomer_gets_the_generator_and_the_model(uneven, clients):
    fed = World(plain_net, uneven).run(FAug, ROUNDS, **QUICK)
    guest = Federation(Sequential(Job(visited(fed.method, fed.server), clients, ORDER)))
    guest.step()
    found = {}
    guest.evaluate(save=found.__setitem__)
    for models in found.values():
        same(models["personal"], fed.server["w"])
    assert any(each.made for each in guest.engine.extended[0].known.values())  # and the generator, as all others do


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"few": 1.5}, "few must be at least 0 and at most 1|few must be at most 1"),
        ({"k": 0}, "k must be at least 1"),
        ({"r": -1}, "r must be at least 0"),
        ({"ratio": 0.0}, "ratio must be above 0"),
        ({"gan_steps": -1}, "gan_steps must be at least 0"),
        ({"gan_lr": 0.0}, "gan_lr must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words, model):
    with pytest.raises(Problem, match=words):
        FAug(model, **wrong)


def test_other_tasks_are_refused():
    assert task_clients(Binary()).classes == 0
    with pytest.raises(Problem, match="faug generates samples of classes, and this task is binary"):
        FAug(Model(plain_net, dtype=torch.float64, task=Binary()))
