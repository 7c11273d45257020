"""FedEM: a few models, of which every client mixes what they predict."""

import copy
from dataclasses import replace

import pytest
import torch
from reference import (
    NEVER,
    SEED,
    World,
    average,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    per_client,
    plain_net,
    same,
    state_of,
    weights,
)
from torch import nn

from perfed.core.clients import Split
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.task import Binary, Classification, NextToken, Regression
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedem import FedEM
from perfed.methods.shared.blend import blend

ROUNDS = ((0, 1, 3), (1, 2, 3), (0, 2, 3), (0, 1, 2))


def responsible(nets, pi, x, y):
    """q of every sample, [samples, M], with the networks in eval mode."""
    with torch.no_grad():
        losses = torch.stack([nn.functional.cross_entropy(net.eval()(x), y, reduction="none") for net in nets], 1)
    return torch.softmax(torch.log(pi) - losses, 1)


def reference(world, M, rounds=ROUNDS):
    """The models and everybody's weights: each model has an SGD of its own on losses times q."""
    nets, pis = [world.net(SEED * M + m) for m in range(M)], [torch.full((M,), 1 / M, dtype=torch.float64)] * 5
    for round, cohort in enumerate(rounds, 1):
        trained = []
        for i in cohort:
            mine = [copy.deepcopy(net) for net in nets]
            steps = [world.sgd(net) for net in mine]
            for x, y in world.batches(i, round):
                q = responsible(nets, pis[i], x, y)  # of the received models and the old weights, in every epoch
                for m, (net, step) in enumerate(zip(mine, steps, strict=True)):
                    step.zero_grad()
                    each = nn.functional.cross_entropy(net.train()(x), y, reduction="none")
                    ((q[:, m] * each).sum() / len(y)).backward()
                    step.step()
            pis[i] = responsible(nets, pis[i], *world.samples(i)).mean(0)
            trained.append(mine)
        shares = [world.count(i) for i in cohort]
        nets = [average([mine[m] for mine in trained], shares) for m in range(M)]
    return nets, pis


@pytest.mark.parametrize("M", [2, 3])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, M, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedEM, ROUNDS, components=M)
    nets, pis = reference(world, M)
    for theta, net in zip(fed.server, nets, strict=True):
        close(theta, flat(net))
    for i in range(5):
        same(state_of(fed, i), pis[i])
        same(models_of(fed)["pi"][i], responsible(nets, pis[i], *world.samples(i)).mean(0))  # renewed to be evaluated
    assert max(float((pi - 1 / M).abs().max()) for pi in pis) > 0.02


def models_of(fed):
    found = {}
    fed.evaluate(save=found.__setitem__)
    return {name: torch.stack([found[i]["personal"][name] for i in range(5)]) for name in found[0]["personal"]}


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_one_model_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    one, avg = world.run(FedEM, components=1), world.run(FedAvg)
    same(one.server[0], avg.server)
    assert per_client(one) == per_client(avg)
    mine, theirs = (fed.evaluate()["personal"]["test"] for fed in (one, avg))
    for score in ("loss", "accuracy"):
        same(mine[score], theirs[score])


def test_equal_models_stay_equal_and_their_weights_even(clients):
    fed = World(norm_net, clients).federation(FedEM, components=3)
    fed.server = fed.server[:1].expand(3, -1).clone()
    for cohort in ROUNDS:
        fed.step(cohort)
    same(fed.server, fed.server[:1].expand(3, -1))
    for i in range(5):
        same(state_of(fed, i), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_weights_are_on_the_simplex(clients):
    fed = World(plain_net, clients).run(FedEM, ROUNDS)
    for i in range(5):
        assert float(state_of(fed, i).sum()) == pytest.approx(1)
        assert float(state_of(fed, i).min()) > 0
    same(state_of(fed, NEVER), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_weights_of_one_model_each_are_fedavg_within_its_clients(clients, monkeypatch):
    """Clients 0 and 1 have the first model, 2 and 3 the second; a weight that has gone to 1e-8 moves nothing."""
    world = World(plain_net, clients, weight_decay=0.0)
    for pair, pi in (((0, 1), (1.0, 0.0)), ((2, 3), (0.0, 1.0))):
        monkeypatch.setattr(FedEM, "init_client", lambda self, pi=pi: torch.tensor(pi, dtype=torch.float64))
        fed = world.run(FedEM, (pair,), components=2)
        own = pi.index(1.0)
        start = world.net(SEED * 2 + own)
        net = average([world.train(start, world.batches(i, 1)) for i in pair], [world.count(i) for i in pair])
        torch.testing.assert_close(fed.server[own][: len(flat(net))], flat(net), rtol=1e-6, atol=1e-6)
        assert not differs(fed.server[1 - own], fed.method.model.init(SEED * 2 + 1 - own))


def test_a_loss_is_divided_by_the_samples_of_a_batch_not_by_the_weights_in_it(clients):
    """A model with a weight of a half takes half a step of SGD, from where all samples are as likely under both."""
    world = World(plain_net, clients, weight_decay=0.0, epochs=1, batch_size=1000)
    fed = world.federation(FedEM, components=2)
    fed.server = fed.server[:1].expand(2, -1).clone()
    start = fed.server.clone()
    fed.step((2,))
    whole = world.run(FedAvg, ((2,),)).server - world.federation(FedAvg).server
    net = world.net(SEED * 2)
    x, y = world.samples(2)
    slope = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    half = -0.5 * world.settings["lr"] * torch.cat([g.reshape(-1) for g in slope])
    same((fed.server - start)[0][: len(half)], half)
    assert differs(whole[: len(half)], half)


def test_the_server_averages_over_those_that_took_part(clients):
    """In the authors' code the others count, too, each with the model that it was sent."""
    world = World(plain_net, clients)
    fed = world.run(FedEM, ((0, 2),), components=2)
    nets, _ = reference(world, 2, ((0, 2),))
    close(fed.server[0], flat(nets[0]))
    total, here = sum(map(world.count, range(5))), world.count(0) + world.count(2)
    diluted = weights(world.net(SEED * 2)) * (1 - here / total) + weights(nets[0]) * here / total
    assert differs(fed.server[0][: len(diluted)], diluted)


def test_probabilities_are_mixed_not_logits(clients):
    world = World(norm_net, clients)
    fed = world.run(FedEM, ROUNDS)
    x, _ = world.samples(0, "test")
    nets, pis = reference(world, 3)
    outputs = torch.stack([net.eval()(x) for net in nets]).detach()
    pi = responsible(nets, pis[0], *world.samples(0)).mean(0)
    found = fed.method.predict({"models": fed.server, "pi": pi}, x)
    same(found.exp(), torch.tensordot(pi, outputs.softmax(-1), 1))
    assert differs(found.softmax(-1), torch.tensordot(pi, outputs, 1).softmax(-1))


def test_what_models_predict_together_fits_every_task():
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 7, 4, generator=draw, dtype=torch.float64)
    pi = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    mean = lambda probabilities: (probabilities[0] + probabilities[2]) / 2
    same(blend(Classification(4), outputs, pi).exp(), mean(outputs.softmax(-1)))
    same(blend(NextToken(4), outputs.reshape(3, 7, 1, 4), pi).exp(), mean(outputs.reshape(3, 7, 1, 4).softmax(-1)))
    same(blend(Binary(), outputs[..., :1], pi).sigmoid(), mean(outputs[..., :1].sigmoid()))
    same(blend(Regression(4), outputs, pi), mean(outputs))
    huge = blend(Binary(), 1000 * outputs[..., :1], pi)
    assert huge.isfinite().all()


def test_no_look_at_test_or_validation_samples(clients):
    world = World(plain_net, clients)
    poisoned = {}
    for name in ("val", "test"):
        table = clients.split(name)
        poisoned[name] = Split(table.x, (table.y + 1) % 3, table.size)
    honest, spoiled = world.run(FedEM, ROUNDS), world.run(FedEM, ROUNDS, clients=replace(clients, **poisoned))
    assert torch.equal(honest.server, spoiled.server)
    assert torch.equal(models_of(honest)["pi"], models_of(spoiled)["pi"])


def test_who_does_not_take_part_keeps_its_weights(clients):
    fed = World(plain_net, clients).run(FedEM, ROUNDS)
    before = {i: state_of(fed, i).clone() for i in range(5)}
    fed.step((0, 1))
    check_kept(fed, before, (2, 3, 4))
    assert differs(state_of(fed, 0), before[0])


def test_all_models_go_each_way_and_weights_stay_at_home(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(FedEM, components=4)) == (4 * size, 4 * size)


def test_a_newcomer_finds_its_weights_and_trains_no_model(clients):
    fed = World(plain_net, clients).run(FedEM, ROUNDS)
    assert torch.equal(fed.method.newcomer(fed.server).shared, fed.server)
    nets, _ = reference(World(plain_net, clients), 3)
    even = torch.full((3,), 1 / 3, dtype=torch.float64)
    expected = responsible(nets, even, *World(plain_net, clients).samples(NEVER)).mean(0)
    same(models_of(fed)["pi"][NEVER], expected)


def test_a_client_without_training_samples_has_even_weights(clients):
    train = clients.train
    x, y = (torch.cat(train_part.split(list(train.size))[1:]) for train_part in (train.x, train.y))
    empty = replace(clients, train=Split(x, y, (0, *train.size[1:])))
    fed = World(plain_net, empty).run(FedEM, ((1, 2, 3),))
    same(models_of(fed)["pi"][0], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_fine_tuning_trains_all_models_by_their_weights(clients):
    world = World(plain_net, clients)
    found = {}
    world.run(FedEM, ROUNDS, fine_tune=2).evaluate(save=found.__setitem__)
    before, after = found[0]["before"], found[0]["personal"]
    assert torch.equal(before["pi"], after["pi"])
    assert differs(before["models"], after["models"])


def test_bad_settings_are_refused():
    with pytest.raises(Problem, match=r"fedem\.components must be at least 1"):
        FedEM(Model(plain_net), components=0)


def test_personal_models_are_copies(clients):
    check_no_alias(World(plain_net, clients).run(FedEM))
