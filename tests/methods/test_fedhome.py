"""FedHome: an auto-encoder beside the classifier, and heads that are tuned on classes evened out."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from parts import part_of
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    SEED,
    World,
    average,
    close,
    differs,
    flat,
    models,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    step_keys,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.random import PERSONALISE, derive, pick, uniform
from perfed.core.task import Regression
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedhome import FedHome

HOME: dict[str, Any] = {"decoding": 0.7, "decoder_width": 5, "near": 2, "adapt_epochs": 3, "adapt_lr": 0.02}


def new_decoder():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return nn.Sequential(
            nn.Linear(8, HOME["decoder_width"]), nn.ReLU(), nn.Linear(HOME["decoder_width"], 6)
        ).double()


def train(world, net, decoder, batches):
    """One loss and one optimiser for all three."""
    net, decoder = copy.deepcopy(net).train(), copy.deepcopy(decoder)
    optimiser = world.sgd(nn.ModuleList([net, decoder]))
    for x, y in batches:
        optimiser.zero_grad()
        z = net[:-1](x)
        loss = nn.functional.cross_entropy(net[-1](z), y) + HOME["decoding"] * nn.functional.mse_loss(decoder(z), x)
        loss.backward()
        optimiser.step()
    return net, decoder


def codes_drawn(z, y, key, count):
    """Samples of the set that SMOTE has evened out, one by one."""
    size = y.bincount()
    own = pick(derive(key, 1), count, 1 / size[y].double())
    made = []
    for i, (real, which, along) in zip(own.tolist(), uniform(derive(key, 2), (count, 3), torch.float64), strict=True):
        others = [j for j in range(len(y)) if y[j] == y[i] and j != i]
        others = sorted(others, key=lambda j: float((z[i] - z[j]).norm()))[: HOME["near"]]
        if real < size[y[i]] / size.max() or not others:
            made.append(z[i])
        else:
            made.append(z[i] + along * (z[others[int(which * len(others))]] - z[i]))
    return torch.stack(made), y[own]


def tune(world, net, i, round):
    """The head alone, on codes that the encoder makes in eval mode."""
    net, (x, y) = copy.deepcopy(net).eval(), world.samples(i)
    z, size, epochs = net[:-1](x).detach(), world.settings["batch_size"], HOME["adapt_epochs"]
    optimiser = world.sgd(net[-1])
    optimiser.param_groups[0]["lr"] = HOME["adapt_lr"]
    for key in step_keys(derive(ORDER, PERSONALISE, round, i), epochs * -(-len(y) // size)):
        codes, labels = codes_drawn(z, y, key, size)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net[-1](codes), labels).backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(FedHome, **HOME)
    w, d = world.net(), new_decoder()
    for round, cohort in enumerate(ROUNDS, 1):
        nets, decoders = zip(*(train(world, w, d, world.batches(i, round)) for i in cohort), strict=True)
        shares = [world.count(i) for i in cohort]
        w, d = average(nets, shares), average(decoders, shares)
    close(fed.server["w"], flat(w))
    close(fed.server["d"], flat(d))
    found = models(fed)
    for i in range(len(clients)):
        close(found["global"][i], flat(w))
        close(found["personal"][i], flat(tune(world, w, i, len(ROUNDS))))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_tuning_it_is_fedavg_and_without_the_decoders_error_bit_for_bit(build, clients):
    world, off = World(build, clients, momentum=0.9), {"adapt_epochs": 0}
    found = models(world.run(FedHome, **off))
    assert torch.equal(found["personal"], found["global"])
    avg = world.run(FedAvg).server
    assert torch.equal(world.run(FedHome, decoding=0.0, **off).server["w"], avg)
    assert differs(world.run(FedHome, **off).server["w"], avg)


def test_the_decoder_reaches_the_body_alone(clients):
    """In one step the head's gradient is that of the cross-entropy: what is decoded does not depend on it."""
    world = World(plain_net, clients, epochs=1, batch_size=41, momentum=0.0)
    change = world.run(FedHome, ROUNDS[:1], decoding=3.0).server["w"] - world.run(FedAvg, ROUNDS[:1]).server
    model = Model(plain_net)
    assert change[model.body.mask].abs().max() > 1e-3
    assert change[model.head.mask].abs().max() < 1e-12


def test_only_the_head_is_tuned(clients):
    world = World(norm_net, clients)
    found = models(world.run(FedHome, **HOME))
    head = len(flat(world.net(), part_of("3.")))
    for i in range(len(clients)):
        assert (found["personal"][i] != found["global"][i]).sum() == head == 27


def uneven(clients, counts):
    """The clients with classes of these sizes, in turn over all classes: client 0 has 23 samples."""
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    labels = clients.train.y.clone()
    labels[: clients.train.size[0]] = y
    return replace(clients, train=replace(clients.train, y=labels))


def first_model(world, clients, **settings):
    fed = world.federation(FedHome, clients=clients, **settings)
    return personal(fed)[0]


def test_even_classes_are_plain_tuning_of_the_head(clients):
    """SMOTE adds nothing where all classes have a size. With 23 samples they have not: it then makes a difference."""
    world, sizes = World(plain_net, clients), (24, *clients.train.size[1:])
    x, y = clients.train.x, torch.arange(3).repeat_interleave(8)
    even = replace(clients.train, x=torch.cat([x[:1], x]), y=torch.cat([y, clients.train.y[23:]]), size=sizes)
    pair = [first_model(world, replace(clients, train=even), even=each) for each in (True, False)]
    same(*pair)
    pair = [first_model(world, uneven(clients, (20, 2, 1)), even=each) for each in (True, False)]
    assert differs(*pair)


def test_rare_classes_are_predicted_more_often_after_tuning_on_even_classes(clients):
    """Of 23 samples 21 are of one class: what is tuned on them as they are predicts it nearly always."""
    skewed = uneven(clients, (21, 1, 1))
    world = World(plain_net, skewed)
    recall = []
    for even in (True, False):
        theta = first_model(world, skewed, even=even, adapt_epochs=60, adapt_lr=0.1)
        x, y = skewed.train.x[:23], skewed.train.y[:23]
        right = (Model(plain_net, dtype=torch.float64).apply(theta, x)[0].argmax(1) == y).double()
        recall.append([float(right[y == k].mean()) for k in range(3)])
    assert sum(recall[0]) / 3 > sum(recall[1]) / 3 + 0.2  # balanced accuracy
    assert recall[0][0] <= recall[1][0]  # what it costs: the accuracy of the large class


def test_what_is_tuned_is_not_kept(clients):
    fed = World(plain_net, clients).run(FedHome, **HOME)
    before = copy.deepcopy(fed.server)
    first = personal(fed)
    same(personal(fed), first)
    torch.testing.assert_close(fed.server, before, rtol=0, atol=0)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_the_model_and_the_decoder_travel_both_ways(build, clients):
    world = World(build, clients)
    size = len(flat(world.net())) + len(flat(new_decoder()))
    fed = world.run(FedHome, **HOME)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0


def test_a_newcomer_tunes_as_everybody_does(clients):
    fed = World(plain_net, clients).run(FedHome, **HOME)
    down = fed.method.newcomer(fed.server)
    assert torch.equal(down.shared["w"], fed.server["w"])
    assert torch.equal(fed.method.global_model(fed.server), fed.server["w"])
    assert differs(personal(fed)[NEVER], fed.server["w"])


def test_refuses_what_has_no_classes():
    with pytest.raises(Problem, match="fedhome evens classes out, and this task is regression"):
        FedHome(Model(plain_net, task=Regression(3, (0.0,) * 3, (1.0,) * 3)))


def test_refuses_a_network_without_an_encoder():
    with pytest.raises(Problem, match="this model learns nothing below its head"):
        FedHome(Model(lambda: nn.Linear(6, 3)))
