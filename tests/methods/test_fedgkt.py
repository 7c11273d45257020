"""FedGKT: extractors and small heads at clients, a large network at the server, and logits both ways."""

import copy
from typing import Any

import pytest
import torch
from reference import (
    NEVER,
    ORDER,
    ROUNDS,
    SEED,
    World,
    close,
    differs,
    flat,
    models,
    norm_net,
    orders,
    plain_net,
    same,
    state_of,
)
from torch import nn

from perfed.contract import toy
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.core.networks import Networks
from perfed.core.random import TRAIN, derive
from perfed.core.task import Regression
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.fedgkt import FedGKT
from perfed.methods.local import Local
from perfed.methods.shared.transfer import batch_of, batches, divergence

CLASSES, WIDTH, LONGEST = 3, 8, 41  # of the tests' networks and clients
GKT: dict[str, Any] = {"server_epochs": 3, "server_batch": 6, "server_lr": 0.01, "server_width": 5, "temperature": 2.0}
GKT |= {"distillation": 0.7}


def new_large():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        first, second, last = nn.Linear(WIDTH, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last).double()


def softened(out, teacher):
    T = GKT["temperature"]
    return T**2 * nn.functional.kl_div(
        nn.functional.log_softmax(out / T, 1), nn.functional.softmax(teacher / T, 1), reduction="batchmean"
    )


def train(world, net, i, round, logits, wrong=""):
    """A client's epochs; `logits` are the server's, a row for each of its samples, or nothing."""
    net, (x, y) = copy.deepcopy(net).train(), world.samples(i)
    optimiser, place = world.sgd(net), 0
    rows = orders(
        derive(ORDER, TRAIN, round, 0, i, 0, 0), len(y), world.settings["epochs"], world.settings["batch_size"]
    )
    for batch in rows:
        optimiser.zero_grad()
        out = net(x[batch])
        loss = nn.functional.cross_entropy(out, y[batch])
        if logits is not None:
            which = torch.arange(place, place + len(batch)) % len(y) if wrong == "by their places" else batch
            loss = loss + GKT["distillation"] * softened(out, logits[which])
            place += len(batch)
        loss.backward()
        optimiser.step()
    return net


def reference(world, rounds=ROUNDS, server_distils=False, as_released=False, wrong=""):
    count = len(world.clients)
    nets, large, logits = [world.net() for _ in range(count)], new_large(), [None] * count
    optimiser = torch.optim.Adam(large.parameters(), GKT["server_lr"], weight_decay=1e-4)
    for round, cohort in enumerate(rounds, 1):
        sent = {}
        for i in cohort:
            nets[i] = net = train(world, nets[i], i, round, logits[i], wrong)
            x, y = world.samples(i)
            z = net.train(wrong == "in train mode")[:-1](x).detach()
            sent[i] = z, net[-1](z).detach(), y
        for _ in range(GKT["server_epochs"]):
            for i, (z, small, y) in sent.items():
                logits[i] = torch.zeros(len(y), CLASSES, dtype=torch.float64)
                for rows in torch.arange(len(y)).split(GKT["server_batch"]):
                    out = large(z[rows])
                    logits[i][rows] = out.detach()
                    loss = nn.functional.cross_entropy(out, y[rows])
                    if server_distils:
                        loss = softened(out, small[rows]) + GKT["distillation"] * loss
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
        if not as_released:
            for i, (z, _, _) in sent.items():
                logits[i] = large(z).detach()
    return nets, large, logits


def check(world, fed, expected):
    nets, large, logits = expected
    close(fed.server["s"][0], flat(large))
    found = models(fed)["small"]
    for i, net in enumerate(nets):
        close(found[i], flat(net))
        table = fed.server["logits"][i]
        if logits[i] is None:
            assert not table.any()
        else:
            same(table[: len(logits[i])], logits[i])


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    world = World(build, clients)
    fed, expected = world.run(FedGKT, **GKT), reference(world)
    check(world, fed, expected)
    x, nets, large = world.samples(2, "test")[0], *expected[:2]
    personal = {}
    fed.evaluate(personal.__setitem__)
    for i, found in personal.items():
        same(fed.method.predict(found["personal"], x), large(nets[i].eval()[:-1](x)).detach())
        same(fed.method.predict(found["small"], x), nets[i].eval()(x).detach())


@pytest.mark.parametrize("option", ["server_distils", "as_released"])
def test_equals_the_reference_with_an_option(option, clients):
    world = World(plain_net, clients, momentum=0.9)
    fed = world.run(FedGKT, **GKT, **{option: True})
    check(world, fed, reference(world, **{option: True}))
    assert differs(fed.server["logits"], world.run(FedGKT, **GKT).server["logits"])


def test_logits_are_those_of_the_very_samples_however_they_are_shuffled(clients):
    """The code takes its loader's batches by their places, which is right where nothing is shuffled."""
    world = World(plain_net, clients)
    right, wrong = (flat(reference(world, wrong=how)[0][3]) for how in ("", "by their places"))
    found = models(world.run(FedGKT, **GKT))["small"][3]
    close(found, right)
    assert differs(found[: len(wrong)], wrong)


def test_what_is_sent_is_extracted_in_evaluation_mode(clients):
    world = World(norm_net, clients)
    wrong = flat(reference(world, ROUNDS[:1], wrong="in train mode")[1])
    assert differs(world.run(FedGKT, ROUNDS[:1], **GKT).server["s"][0][: len(wrong)], wrong)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_distillation_clients_are_local(build, clients):
    world = World(build, clients, momentum=0.9)
    alone = models(world.run(Local))["personal"]
    fed = world.run(FedGKT, **GKT | {"distillation": 0.0})
    same(models(fed)["small"], alone)
    assert differs(models(world.run(FedGKT, **GKT))["small"], alone)


def test_the_first_round_of_a_client_is_local(clients):
    world = World(plain_net, clients)
    fed, alone = world.run(FedGKT, ROUNDS[:1], **GKT), world.run(Local, ROUNDS[:1])
    for i in ROUNDS[0]:
        same(state_of(fed, i), state_of(alone, i))
    fed.step(ROUNDS[1])  # client 2 takes part for the first time, 1 and 3 have logits
    alone.step(ROUNDS[1])
    same(state_of(fed, 2), state_of(alone, 2))
    assert all(differs(state_of(fed, i), state_of(alone, i)) for i in (1, 3))


def test_one_client_without_distillation_is_trained_layer_by_layer(clients):
    """First the small network, then a large one on what it has learned to extract."""
    world = World(plain_net, clients)
    fed = world.run(FedGKT, [(2,)], cohort=1, **GKT | {"distillation": 0.0})
    net, (x, y) = world.train(world.net(), world.batches(2, 1)), world.samples(2)
    large, z = new_large(), net[:-1](x).detach()
    optimiser = torch.optim.Adam(large.parameters(), GKT["server_lr"], weight_decay=1e-4)
    for _ in range(GKT["server_epochs"]):
        for rows in torch.arange(len(y)).split(GKT["server_batch"]):
            optimiser.zero_grad()
            nn.functional.cross_entropy(large(z[rows]), y[rows]).backward()
            optimiser.step()
    close(fed.server["s"][0], flat(large))


def test_all_start_from_one_extractor_and_are_never_averaged(clients):
    fed = World(plain_net, clients).run(FedGKT, **GKT)
    start = World(plain_net, clients).net()
    close(state_of(fed, NEVER), flat(start))
    apart = [float((state_of(fed, i) - state_of(fed, j)).abs().max()) for i in range(4) for j in range(i)]
    assert min(apart) > 0.01


def test_who_is_absent_keeps_their_logits(clients):
    world = World(plain_net, clients)
    fed = world.run(FedGKT, ROUNDS[:2], **GKT)
    before = fed.server["logits"].clone()
    fed.step(ROUNDS[2])  # without client 1
    assert torch.equal(fed.server["logits"][1], before[1])
    assert differs(fed.server["logits"][2], before[2])


# ---------------------------------------------------------------------- what is sent


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_logits_go_down_and_representations_logits_and_labels_go_up(build, clients):
    """For each row of the largest client's table: numbers of 8 bytes, a label, and whether it is a sample."""
    fed = World(build, clients).run(FedGKT, **GKT)
    rows = 3 * len(ROUNDS) * LONGEST
    assert fed.traffic.down == rows * CLASSES * 8
    assert fed.traffic.up == fed.traffic.up_own == rows * ((WIDTH + CLASSES) * 8 + 8 + 1)


def test_a_newcomer_is_refused_because_the_server_has_no_logits_for_it(clients):
    fed = World(plain_net, clients).run(FedGKT, ROUNDS[:1], **GKT)
    with pytest.raises(Problem, match="FedGKT keeps something for each client it knows"):
        fed.method.newcomer(fed.server)


# ---------------------------------------------------------------------- the server's batches and the divergence


def test_batches_are_of_one_client_each_and_in_the_order_of_its_samples():
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    table, order = batches({"real": real, "z": torch.arange(30.0).view(3, 5, 2), "y": torch.arange(15).view(3, 5)}, 2)
    assert order.tolist() == [[0, 1], [2, -1], [5, 6], [7, 8], [9, -1], [10, -1]]
    batch, rows = batch_of(table, order, torch.tensor(7), torch.tensor(0))  # it begins again after 6
    assert rows.tolist() == [2, 2]
    assert batch.weight is not None
    assert batch.weight.tolist() == [1, 0]
    assert batch.y.tolist() == [2, 2]
    assert batch.x.tolist() == [[4, 5], [4, 5]]


def test_the_divergence_is_0_at_the_teacher_and_of_its_own_scale_at_every_temperature():
    out, teacher = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    same(divergence(teacher, teacher, 3.0), torch.zeros(4, dtype=torch.float64))
    p, q = teacher.softmax(1), out.softmax(1)
    same(divergence(out, teacher, 1.0), (p * (p / q).log()).sum(1))
    far = (teacher - teacher.mean(1, keepdim=True) - out + out.mean(1, keepdim=True)).square().sum(1) / (2 * 3)
    torch.testing.assert_close(divergence(out, teacher, 1e4), far, rtol=1e-3, atol=0)  # T^2 keeps it from vanishing


# ---------------------------------------------------------------------- networks that differ


def wide_net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def other_net():
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, CLASSES))


def of_two_networks(second, clients, engine=Sequential):
    several = Networks.of_one_width({"plain": plain_net, "wide": second}, [0, 1, 0, 1, 0], dtype=torch.float64)
    method = FedGKT(several.models[0], epochs=2, batch_size=7, lr=0.05, **GKT).at(networks=several)
    return Federation(engine(Job(method, clients, ORDER, 3)))


def test_one_server_teaches_extractors_of_two_kinds(clients):
    fed, batched = of_two_networks(wide_net, clients), of_two_networks(wide_net, clients, Vectorised)
    for cohort in ROUNDS:
        fed.step(cohort)
        batched.step(cohort)
    same(batched.server["s"][0], fed.server["s"][0])
    worlds = [World(build, clients, weight_decay=0.0) for build in (plain_net, wide_net)]
    nets = [worlds[i % 2].net() for i in range(5)]  # the first round: each trains its own
    first = of_two_networks(wide_net, clients)
    first.step(ROUNDS[0])
    for i in ROUNDS[0]:
        close(state_of(first, i), flat(train(worlds[i % 2], nets[i], i, 1, None)))


def test_extractors_of_other_widths_are_refused(clients):
    with pytest.raises(Problem, match="extract 8 or 9 numbers of a sample: choose ones whose heads take equally many"):
        of_two_networks(other_net, clients)


# ---------------------------------------------------------------------- what is refused


def test_refuses_what_has_no_classes():
    with pytest.raises(Problem, match="fedgkt compares what networks say of classes, and this task is regression"):
        FedGKT(Model(plain_net, task=Regression(3, (0.0,) * 3, (1.0,) * 3)))


def test_refuses_a_network_without_an_extractor():
    with pytest.raises(Problem, match="this model learns nothing below its head"):
        FedGKT(Model(lambda: nn.Linear(6, 3)))


def test_fine_tuning_is_refused_for_a_model_of_two_parts(clients):
    fed = World(plain_net, clients).run(FedGKT, ROUNDS[:1], fine_tune=1, **GKT)
    with pytest.raises(Problem, match="fine_tune trains a theta, and a model of FedGKT is more than that"):
        fed.evaluate()


def test_it_knows_how_many_samples_the_largest_client_has():
    assert max(toy.SIZES) == LONGEST
