"""FD: tables of mean outputs of each label, and what the others' say."""

import copy
from dataclasses import replace

import pytest
import torch
from reference import ROUNDS, World, close, flat, norm_net, personal, plain_net, same
from torch import nn

from perfed.contract.toy import conv_net, task_clients
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.networks import Networks
from perfed.core.task import Binary
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.faug import FAug
from perfed.methods.fd import FD
from perfed.methods.local import Local
from perfed.training.newcomers import visited

K, NEVER = 3, 4


@pytest.fixture
def uneven(clients):
    """The toy's clients, of whom one has a label alone that no other has, and one has a single label."""
    y, start = clients.train.y.clone(), clients.train.start
    y[y == 2] = 1
    y[start[2] : start[2] + 10] = 2
    y[start[1] : start[1] + 7] = 0
    return replace(clients, train=replace(clients.train, y=y))


def train(world, net, batches, others, g):
    """A copy of the network after training, and the means of its logits by label, as it went."""
    net = copy.deepcopy(net).train()
    optimiser, seen = world.sgd(net), {}
    for x, y in batches:
        optimiser.zero_grad()
        out = net(x)
        loss = 0
        for row, label in zip(out, y.tolist(), strict=True):
            seen.setdefault(label, []).append(row.detach().clone())
            loss = loss + nn.functional.cross_entropy(row[None], torch.tensor([label]))
            if label in others:
                target = others[label].exp() / others[label].exp().sum()
                loss = loss - g * (target * nn.functional.log_softmax(row, 0)).sum()
        (loss / len(y)).backward()
        optimiser.step()
    return net, {label: torch.stack(rows).mean(0) for label, rows in seen.items()}


def told(tables, i):
    """What the clients but one say, in the mean over those that have a label."""
    found = {}
    for label in range(K):
        rows = [table[label] for j, table in tables.items() if j != i and label in table]
        if rows:
            found[label] = torch.stack(rows).mean(0)
    return found


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, uneven):
    world, g = World(build, uneven, momentum=0.9), 0.7
    nets, tables, alone = {i: world.net() for i in range(5)}, {}, set()
    for round, cohort in enumerate(ROUNDS, 1):
        new = {}
        for i in cohort:
            others = told(tables, i)
            alone |= {(i, label) for label in tables.get(i, {}) if label not in others}
            nets[i], new[i] = train(world, nets[i], world.batches(i, round), others, g)
        tables |= new
    fed = world.run(FD, g=g)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
    for i in range(5):
        for label in range(K):
            assert bool(fed.server["held"][i, label]) == (label in tables.get(i, {}))
            same(fed.server["F"][i, label], tables.get(i, {}).get(label, torch.zeros(K, dtype=torch.float64)))
    assert (2, 2) in alone  # somebody has a label that nobody else has
    assert NEVER not in tables


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_g_0_is_local(build, uneven):
    world = World(build, uneven, momentum=0.9)
    same(personal(world.run(FD, g=0)), personal(world.run(Local)))
    assert (personal(world.run(FD, g=1)) - personal(world.run(Local))).abs().max() > 1e-3


def test_in_the_first_round_nobody_has_said_anything(uneven):
    world = World(plain_net, uneven)
    same(personal(world.run(FD, ROUNDS[:1], g=5)), personal(world.run(Local, ROUNDS[:1])))


# ---------------------------------------------------------------------- tables


def method():
    return FD(Model(plain_net, dtype=torch.float64))


def test_of_two_clients_each_is_told_the_others_table():
    """In public code the own table is in the mean."""
    F = torch.randn(2, K, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    server = {"F": F, "held": torch.ones(2, K, dtype=torch.bool)}
    found = method().broadcast(server, torch.tensor([0, 1])).own
    same(found["F"], F.flip(0))
    assert found["held"].all()


def test_a_label_that_nobody_else_has_gets_no_term():
    F = torch.ones(3, K, K, dtype=torch.float64) * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)[:, None, None]
    held = torch.tensor([[True, True, False], [True, False, False], [True, False, False]])
    F[~held] = 0
    found = method().broadcast({"F": F, "held": held}, torch.tensor([0, 2])).own
    assert found["held"].tolist() == [[True, False, False], [True, True, False]]
    assert found["F"][0, 0].tolist() == [3, 3, 3]
    assert found["F"][1, 0].tolist() == [1.5, 1.5, 1.5]
    assert found["F"][1, 1].tolist() == [1, 1, 1]
    assert found["F"].isfinite().all()


def test_the_target_is_a_distribution(uneven):
    """In public code it is the raw logits: then the term has no end, and pulls also where both say the same."""
    fd = FD(Model(plain_net, dtype=torch.float64), g=1e6, lr=1.0)
    theta, (x, y) = fd.model.init(0), World(plain_net, uneven).samples(0)
    one = x[:1], y[:1]
    out = fd.model.apply(theta, one[0])[0]
    others = {"F": out.expand(K, K) + 3.0, "held": torch.ones(K, dtype=torch.bool)}  # alike but for a constant
    batch = Batch(*one, None, torch.tensor(1))
    carry = theta, fd.start(theta), theta.new_zeros(K, K), theta.new_zeros(K)
    after = fd.learn(carry, batch, others)[0]
    plain = theta - fd.model.grad(theta, batch)[0]
    torch.testing.assert_close(after, plain, rtol=0, atol=1e-6)  # in spite of g
    others["F"] = others["F"] * 1.01
    assert (fd.learn(carry, batch, others)[0] - plain).abs().max() > 1


def test_a_table_has_the_labels_of_its_client_alone(uneven):
    fed = World(plain_net, uneven).run(FD, ROUNDS)
    assert fed.server["held"].tolist() == [
        [True, True, False], [True, False, False], [True, True, True], [True, True, False], [False] * 3
    ]  # fmt: skip
    assert not fed.server["F"][~fed.server["held"]].any()
    assert fed.server["F"][fed.server["held"]].any(1).all()


# ---------------------------------------------------------------------- messages


def test_only_tables_travel(uneven):
    for build in (plain_net, norm_net):
        fed = World(build, uneven).run(FD)
        assert (fed.traffic.down, fed.traffic.up) == (9 * (K * K * 8 + K),) * 2  # and which labels there are
        assert (fed.traffic.down_shared, fed.traffic.up_mean) == (0, 0)


def test_a_newcomer_is_told_what_all_say(uneven, clients):
    fed = World(plain_net, uneven).run(FD)
    own = fed.method.newcomer(fed.server).own
    same(own["F"][2], fed.server["F"][2, 2])
    same(own["F"][0], fed.server["F"][:4, 0].mean(0))
    guest = Federation(Sequential(Job(visited(fed.method, fed.server), clients, 5)))
    guest.step()
    assert all(theta.isfinite().all() for theta in personal(guest))


def test_there_is_no_model_for_everybody(uneven):
    fed = World(plain_net, uneven).run(FD)
    with pytest.raises(Problem, match="does not say which model its server has for everybody"):
        fed.method.global_model(fed.server)


def test_clients_with_networks_that_differ_learn_of_each_other(uneven):
    builds = {"plain": plain_net, "conv": conv_net}
    several = Networks.of_one_width(builds, [0, 1, 0, 1, 0], dtype=torch.float64)
    models = []
    for g in (0.0, 1.0):
        fd = FD(several.models[0], lr=0.05, epochs=1, batch_size=7, g=g).at(networks=several)
        fed = Federation(Sequential(Job(fd, uneven, 5)))
        for cohort in ((1,), (0, 2)):
            fed.step(cohort)
        models.append(personal(fed))
    same(models[0][1], models[1][1])
    assert (models[0][0] - models[1][0]).abs().max() > 1e-4  # it was told by a client with another network


def test_with_few_above_0_clients_fill_up_their_classes_as_faugs_do(uneven):
    world, quick = World(plain_net, uneven), {"few": 0.9, "k": 3, "gan_steps": 2}
    rounds = (range(5), *ROUNDS)
    fd, faug = world.run(FD, rounds, **quick), world.run(FAug, rounds, **quick)
    mine, theirs = (fed.engine.jobs[0].clients.train for fed in (fd, faug))
    assert mine.size == theirs.size != uneven.train.size
    same(mine.x, theirs.x)
    same(fd.server["G"], faug.server["G"])
    assert not World(plain_net, uneven).run(FD).engine.extended[0].known  # by default they do not


def test_what_is_refused(model):
    with pytest.raises(Problem, match="g must be at least 0"):
        FD(model, g=-1.0)
    assert task_clients(Binary()).classes == 0
    with pytest.raises(Problem, match="fd exchanges outputs of classes, and this task is binary"):
        FD(Model(plain_net, dtype=torch.float64, task=Binary()))
