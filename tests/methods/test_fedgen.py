"""FedGen: a generator of representations at the server, and two terms of a client's loss that use it."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import (
    ORDER,
    ROUNDS,
    SEED,
    World,
    average,
    close,
    differs,
    flat,
    norm_net,
    personal,
    plain_net,
    same,
    step_keys,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.messages import Cohort
from perfed.core.model import Model
from perfed.core.random import REFINE, TRAIN, derive, pick, uniform
from perfed.core.task import Regression
from perfed.engines.local import ClientData
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedgen import FedGen
from perfed.methods.shared.generator import likeness

CLASSES, NOISE, HIDDEN, WIDTH = 3, 32, 256, 8  # of the tests' networks and of the generator
FAST: dict[str, Any] = {"generated": 6, "generator_steps": 5, "generator_lr": 0.01, "eta": 0.5}
STRONG: dict[str, Any] = FAST | {"generative_alpha": 2.0, "generative_beta": 3.0}


def new_generator():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        net = nn.Sequential(
            nn.Linear(NOISE + CLASSES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        )
        return net.double()


def draw(net, y, key):
    """Noise and representations of labels, with the network as it is, in train or in eval mode."""
    eps = uniform(key, (len(y), NOISE), torch.float64)
    return eps, net(torch.cat([eps, nn.functional.one_hot(y, CLASSES).double()], 1))


def client(world, net, G, labels, i, round, strength, wrong):
    """A client's training, and how often it met each label."""
    net, G = copy.deepcopy(net).train(), copy.deepcopy(G).train("in train mode" in wrong)
    optimiser, counts = world.sgd(net), torch.full((CLASSES,), float("from 0" not in wrong), dtype=torch.float64)
    alpha, beta = (each * 0.98 ** (round - 1) for each in strength) if round > 1 else (0, 0)
    batches = world.batches(i, round)
    size, generated = world.settings["batch_size"], STRONG["generated"]
    for (x, y), key in zip(batches, step_keys(derive(ORDER, TRAIN, round, 0, i), len(batches)), strict=True):
        optimiser.zero_grad()
        out = net(x)
        loss = nn.functional.cross_entropy(out, y)
        if labels.any():
            with torch.no_grad():
                like, other = pick(derive(key, 2), generated, labels), draw(G, y, derive(key, 3))[1]
                z = draw(G, like, derive(key, 4))[1]
            target = net[-1](other).log_softmax(1)
            target = target if "through the target" in wrong else target.detach()
            pair = (target, out.log_softmax(1)) if "other way" in wrong else (out.log_softmax(1), target)
            loss = loss + beta * nn.functional.kl_div(*pair, reduction="batchmean", log_target=True)
            loss = loss + generated / size * alpha * nn.functional.cross_entropy(net[-1](z), like)
        loss.backward()
        optimiser.step()
        counts += y.bincount(minlength=CLASSES)
    return net, counts


def server(world, G, optimiser, nets, counts, round, wrong):
    """The generator's steps in a round."""
    weight, eta = torch.stack(counts) / torch.stack(counts).sum(0), STRONG["eta"]
    G.train()
    for key in step_keys(derive(ORDER, REFINE, round, 0), STRONG["generator_steps"]):
        y = pick(derive(key, 2), STRONG["generated"], (torch.stack(counts) > 1).any(0))
        eps, z = draw(G, y, derive(key, 3))
        loss = 0.0
        for k, net in enumerate(nets):
            teacher = nets[0] if "one teacher" in wrong else net
            loss = loss + (weight[k, y] * nn.functional.cross_entropy(teacher[-1](z), y, reduction="none")).mean()
        pairs = [
            (eps[i] - eps[j]).square().mean() * (z[i] - z[j]).abs().mean() for i in range(len(y)) for j in range(len(y))
        ]
        optimiser.zero_grad()
        (loss + eta * torch.exp(-torch.stack(pairs).mean())).backward()
        optimiser.step()


def reference(world, rounds=ROUNDS, wrong=()):
    w, G, labels = world.net(), new_generator(), torch.zeros(CLASSES, dtype=torch.bool)
    strength = STRONG["generative_alpha"], STRONG["generative_beta"]
    optimiser = torch.optim.Adam(G.parameters(), STRONG["generator_lr"], weight_decay=0.01)
    fade = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.98)
    for round, cohort in enumerate(rounds, 1):
        nets, counts = zip(*(client(world, w, G, labels, i, round, strength, wrong) for i in cohort), strict=True)
        server(world, G, optimiser, nets, counts, round, wrong)
        fade.step()
        w = average(nets, [world.count(i) for i in cohort])
        labels = labels | (torch.stack(counts) > 1).any(0)
    return w, G


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedGen, **STRONG)
    w, G = reference(world)
    close(fed.server["w"], flat(w))
    close(fed.server["G"][0], flat(G))
    for theta in personal(fed):
        close(theta, flat(w))


CLIENTS, SERVER = ["in train mode", "through the target", "other way"], ["from 0", "one teacher"]


@pytest.mark.parametrize("wrong", CLIENTS + SERVER)
def test_a_reference_with_a_mistake_differs(wrong, clients):
    """Each is made in public code or in a description: the test against the reference would notice it."""
    world = World(norm_net, clients)
    expected = flat(reference(world, ROUNDS[:2], wrong=[wrong])[0 if wrong in CLIENTS else 1])
    server = world.run(FedGen, ROUNDS[:2], **STRONG).server
    found = server["w"] if wrong in CLIENTS else server["G"][0]
    assert float((found[: len(expected)] - expected).abs().max()) > 1e-4


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_both_terms_it_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedGen, generative_alpha=0.0, generative_beta=0.0, **FAST)
    same(fed.server["w"], world.run(FedAvg).server)
    assert differs(fed.server["G"][0], new_generator_theta(fed))  # and yet there is a generator


def new_generator_theta(fed):
    return fed.method.generator.init(SEED)


def test_the_first_round_is_fedavg_and_later_ones_are_not(clients):
    world = World(plain_net, clients)
    first, both = (world.run(FedGen, ROUNDS[:rounds], **STRONG) for rounds in (1, 2))
    same(first.server["w"], world.run(FedAvg, ROUNDS[:1]).server)
    assert differs(both.server["w"], world.run(FedAvg, ROUNDS[:2]).server)


@pytest.mark.parametrize("term", ["generative_alpha", "generative_beta"])
def test_each_term_alone_makes_a_difference(term, clients):
    world = World(plain_net, clients)
    alone = world.run(FedGen, **FAST | {"generative_alpha": 0.0, "generative_beta": 0.0, term: 1.0})
    assert differs(alone.server["w"], world.run(FedAvg).server)


def test_the_terms_fade_from_round_to_round(clients):
    """In round 36 they have half of their strength: 0.98 to the power of 35."""
    world = World(plain_net, clients)
    fed = world.run(FedGen, ROUNDS[:1], **FAST)
    change = lambda round, strength: step_from(world, fed, round, strength)
    plain = change(36, 0.0)
    twice = (change(36, 2.0) - plain) / 2
    same(twice, (change(36, 1.0) - plain))  # one step of SGD is linear in the strength
    assert float((change(36, 1.0) - plain).norm()) > 1e-4
    same(change(36, 1.0), change(2, 0.98**34))
    same(change(1, 1.0), change(1, 0.0))


def step_from(world, fed, round, strength):
    """What one step of client 0 changes, with the batch of round 2 whatever the round."""
    method = fed.method.at(round=round)
    method = replace(method, generative_alpha=strength, generative_beta=strength, weight_decay=0.0).at(round=round)
    down = fed.method.broadcast(fed.server, torch.tensor([0]))
    data = ClientData(world.clients, 0, torch.tensor(3), method, usual=1)
    return method.local((), down, data)[1].mean


# ---------------------------------------------------------------------- what the server does


def test_the_term_that_keeps_apart_is_1_where_all_are_alike():
    eps = torch.rand(6, 4, dtype=torch.float64)
    assert likeness(eps, torch.ones(6, 5)) == 1
    assert likeness(torch.zeros(6, 4), torch.rand(6, 5)) == 1
    values = [float(likeness(eps, scale * torch.eye(6, dtype=torch.float64))) for scale in (1, 3, 100)]
    assert 1 > values[0] > values[1] > values[2] > 0


def test_distances_are_means_over_coordinates():
    """Squares of 1 and 3 have the mean 5, sizes of 2, 4 and 0 the mean 2; half of the pairs are of one with itself."""
    eps, z = torch.tensor([[0.0, 0.0], [1.0, 3.0]]), torch.tensor([[0.0, 0.0, 1.0], [2.0, 4.0, 1.0]])
    assert float(likeness(eps, z)) == pytest.approx(float(torch.tensor(-5.0 * 2.0 / 2).exp()))


def test_counts_start_at_1_and_count_each_visit(clients):
    world = World(plain_net, clients)
    fed = world.federation(FedGen)
    fed.begin(ROUNDS[0])
    (request,) = fed.requests()
    (reply,) = fed.engine.exchange([request])
    for i, counts in zip(ROUNDS[0], reply.uploads.own["counts"], strict=True):
        same(counts, 1 + world.settings["epochs"] * world.samples(i)[1].bincount(minlength=CLASSES).double())
    share = reply.uploads.own["counts"] / reply.uploads.own["counts"].sum(0)
    same(share.sum(0), torch.ones(CLASSES, dtype=torch.float64))  # a_k(y) over the participants, for every label


def two_classes(clients):
    """The same clients without the last class."""
    return replace(clients, train=replace(clients.train, y=clients.train.y % 2))


def test_labels_that_nobody_has_trained_on_are_not_drawn(clients):
    fed = World(plain_net, two_classes(clients)).run(FedGen, **FAST)
    assert fed.server["labels"].tolist() == [True, True, False]
    assert fed.server["w"].isfinite().all()
    now, start = (
        fed.method.generator.state_dict(fed.server["G"][0])["0.weight"],
        next(new_generator().parameters()).detach(),
    )
    towards_0 = ((start - now) * start.sign() > 0)[:, NOISE:][start[:, NOISE:].abs().min(1).values > 0.03]
    assert towards_0[:, 2].all()  # of the weights that label 2 would reach: nothing moves them but their decay
    assert not towards_0[:, :2].all(0).any()


def test_every_teacher_is_its_own_client(clients):
    """In FL-bench all teachers are the global classifier: here the heads, exchanged, make another generator."""
    fed = World(plain_net, clients).run(FedGen, ROUNDS[:1], **FAST)
    heads = torch.randn(3, len(fed.method.model.head), dtype=torch.float64)
    counts, samples = torch.tensor([[9.0, 1, 1], [1, 9, 1], [1, 1, 9]]).double(), torch.tensor([5, 5, 5])
    ids, change = torch.tensor([0, 1, 2]), torch.zeros(len(fed.method.model.body), dtype=torch.float64)
    refined = []
    for own in (heads, heads.roll(1, 0), heads.mean(0).repeat(3, 1)):
        cohort = Cohort(ids, change, {"head": own, "counts": counts, "samples": samples}, torch.tensor(15.0), 3)
        server = fed.method.aggregate(fed.server, cohort)
        refined.append(fed.engine.refine(0, fed.method.at(round=1).context, server, cohort)["G"][0])
    assert differs(refined[0], refined[1])
    assert differs(refined[0], refined[2])


def test_the_generator_learns_what_the_heads_know(clients):
    """After some rounds its representations are of their labels, for the averaged head, too."""
    world = World(plain_net, clients, lr=0.1)
    fed = world.run(FedGen, [(0, 1, 2, 3, 4)] * 6, cohort=5, generator_steps=30, generator_lr=5e-3)
    y = torch.arange(300) % CLASSES
    for theta, least, most in ((fed.server["G"][0], 0.9, 1), (new_generator_theta(fed), 0, 0.7)):
        G = new_generator()
        G.load_state_dict(G.state_dict() | fed.method.generator.state_dict(theta))
        z = draw(G.eval(), y, torch.tensor(1))[1].detach()
        right = (fed.method.model.classify(fed.server["w"], z).argmax(1) == y).double().mean()
        assert least <= right <= most


# ---------------------------------------------------------------------- what is sent, and to whom


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_a_model_a_generator_and_labels_go_down_and_a_model_and_counts_go_up(build, clients):
    world = World(build, clients)
    fed, size = world.run(FedGen, **FAST), len(flat(world.net()))
    head, messages = sum(p.numel() for p in world.net()[-1].parameters()), 3 * len(ROUNDS)
    assert fed.traffic.down == messages * (8 * (size + len(flat(new_generator()))) + CLASSES)
    assert fed.traffic.up == messages * 8 * (size + CLASSES + 1)
    assert fed.traffic.up_own == messages * 8 * (head + CLASSES + 1)  # the body is seen as a mean alone


def test_a_newcomer_gets_what_everybody_gets(clients):
    fed = World(plain_net, clients).run(FedGen, **FAST)
    down = fed.method.newcomer(fed.server)
    assert torch.equal(down.shared["w"], fed.server["w"])
    assert torch.equal(fed.method.global_model(fed.server), fed.server["w"])


def test_refuses_what_has_no_classes():
    with pytest.raises(Problem, match="fedgen generates representations of classes, and this task is regression"):
        FedGen(Model(plain_net, task=Regression(3, (0.0,) * 3, (1.0,) * 3)))


def test_refuses_a_network_that_goes_on_after_its_head(clients):
    net = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())
    with pytest.raises(Problem, match="does not end with its head '2'"):
        World(net, clients).run(FedGen, **FAST)


def test_refuses_less_than_two_representations_for_its_batchnorm():
    with pytest.raises(Problem, match="generated must be at least 2"):
        FedGen(Model(plain_net), generated=1)
