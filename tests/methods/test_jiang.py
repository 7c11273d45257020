"""Jiang: FedAvg with momentum at the server, then Reptile with Adam there."""

from dataclasses import replace

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    equal_clients,
    flat,
    models,
    norm_net,
    per_client,
    plain_net,
    push,
    same,
    state_of,
    weights,
)

from perfed.core.errors import Problem
from perfed.core.random import PERSONALISE
from perfed.methods.fedavg import FedAvg
from perfed.methods.jiang import Jiang
from perfed.methods.reptile import Reptile

LONG = (*ROUNDS, (1, 2, 3))
ADAM = {"share": 0.5, "beta": 0.6, "steps": 3, "meta_lr": 0.02, "adapt_steps": 4}


def moved(w, mean, optimiser):
    """`w` after a step of a PyTorch optimiser along the mean change, with the mean's statistics."""
    for p in w.parameters():
        p.grad = torch.zeros_like(p)
    push(w, weights(w) - weights(mean))
    optimiser.step()
    for mine, theirs in zip(w.buffers(), mean.buffers(), strict=True):
        mine.copy_(theirs)


def reference(world, first, beta, steps, meta_lr, kind=torch.optim.Adam):
    """PyTorch's own optimisers step at the server: a client's change with the sign turned is their gradient."""
    w = world.net()
    momentum, meta = torch.optim.SGD(w.parameters(), 1.0, momentum=beta), kind(w.parameters(), meta_lr)
    for round, cohort in enumerate(LONG, 1):
        if round <= first:
            nets = [world.train(w, world.batches(i, round)) for i in cohort]
            moved(w, average(nets, [world.count(i) for i in cohort]), momentum)
        else:
            nets = [world.train(w, world.batches(i, round, steps)[:steps]) for i in cohort]
            moved(w, average(nets, [1] * len(nets)), meta)
    return w


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """Two rounds of each kind: momentum has a second step, and so have Adam's moments."""
    world = World(build, clients, momentum=0.9)
    found = models(world.run(Jiang, LONG, **ADAM))
    w = reference(world, 2, beta=0.6, steps=3, meta_lr=0.02)
    for i in range(len(clients)):
        close(found["global"][i], flat(w))
        batches = world.batches(i, len(LONG), 4, purpose=(PERSONALISE,))[:4]
        close(found["personal"][i], flat(world.train(w, batches)))
    assert differs(found["personal"][NEVER], found["global"][NEVER])


def test_plain_steps_in_the_second_phase_equal_the_reference(clients):
    world = World(norm_net, clients)
    fed = world.run(Jiang, LONG, **ADAM, meta_optimizer="sgd")
    close(fed.server["w"], flat(reference(world, 2, beta=0.6, steps=3, meta_lr=0.02, kind=torch.optim.SGD)))


@pytest.mark.parametrize(("share", "reptile"), [(0, 0), (0.3, 1), (0.4, 2), (0.5, 2), (1, 4)])
def test_the_last_rounds_are_reptiles(share, reptile, clients):
    """As many as the share of the run's rounds comes to, rounded."""
    fed = World(plain_net, clients).federation(Jiang, length=4, share=share, steps=7)
    kinds = [fed.method.at(round=round).phase(fed.server) for round in (1, 2, 3, 4)]
    assert [(kind.name, kind.steps) for kind in kinds] == [("", None)] * (4 - reptile) + [("reptile", 7)] * reptile


def test_without_reptile_and_momentum_it_is_fedavg_with_tuning(clients):
    world = World(norm_net, clients, momentum=0.9)
    fed = world.run(Jiang, share=0, beta=0, adapt_steps=0)
    same(fed.server["w"], world.run(FedAvg).server)
    same(models(fed)["personal"], models(fed)["global"])
    assert differs(world.run(Jiang, share=0, beta=0.5).server["w"], fed.server["w"])


def test_reptile_alone_with_whole_plain_steps_is_fedavg_of_k_steps(clients):
    """Where clients have as many samples; else it is Reptile, whose mean is uniform."""
    alone = {"share": 1, "meta_optimizer": "sgd", "meta_lr": 1.0}
    world = World(norm_net, equal_clients(clients), epochs=1)  # two batches each
    same(world.run(Jiang, steps=2, **alone).server["w"], world.run(FedAvg).server)
    ragged = World(norm_net, clients)
    same(ragged.run(Jiang, steps=3, **alone).server["w"], ragged.run(Reptile, steps=3, decay=False).server)
    assert differs(ragged.run(Jiang, steps=4, **alone).server["w"], ragged.run(Reptile, steps=3, decay=False).server)


def test_adams_first_step_has_the_size_of_its_rate(clients):
    """Its bias is corrected: each weight moves by the rate, towards the mean, however small the mean change is."""
    world = World(norm_net, clients, lr=1e-3)
    fed = world.run(Jiang, [(0, 2)], share=1, meta_lr=0.01)
    P, start = fed.method.model.P, world.federation(Jiang).server["w"]
    step = (fed.server["w"] - start)[:P]
    size = float(step.abs().median())
    assert size == pytest.approx(0.01, rel=1e-2)


def test_statistics_are_plain_means_in_both_phases(clients):
    """Momentum and Adam would overshoot: a falling running variance of small inputs would turn negative."""
    small = replace(clients, train=replace(clients.train, x=0.01 * clients.train.x))
    fed = World(norm_net, small).run(Jiang, [(2,)] * 6, share=0.5, beta=0.9)
    P, size = fed.method.model.P, fed.method.model.size
    assert 0 < fed.server["w"][size - 8 : size].min() < 0.5
    for moment in (fed.server["m"], *fed.server["adam"][:2]):
        assert not moment[P:].any()
        assert moment[:P].any()


def test_adaptation_leaves_no_trace_and_never_sees_test_samples(clients):
    world = World(norm_net, clients)
    quiet, watched = world.run(Jiang), world.federation(Jiang, length=3)
    for cohort in ROUNDS:
        watched.step(cohort)
        watched.evaluate()
    assert torch.equal(quiet.server["w"], watched.server["w"])
    assert state_of(watched, 0) == ()
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    assert torch.equal(models(quiet)["personal"], models(world.run(Jiang, clients=spoiled))["personal"])


def test_a_newcomer_gets_the_shared_model(clients):
    fed = World(plain_net, clients).run(Jiang)
    assert torch.equal(fed.method.newcomer(fed.server).shared, fed.server["w"])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"share": 1.5}, "share must be at most 1"),
        ({"beta": 1.0}, "beta must be below 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"meta_optimizer": "yogi"}, "one of adam, sgd"),
    ],
)
def test_refusals(wrong, match, clients):
    with pytest.raises(Problem, match=match):
        World(plain_net, clients).federation(Jiang, **wrong)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(Jiang))


def test_one_model_each_way_in_both_phases(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    for share in (0, 0.5, 1):
        fed = world.run(Jiang, share=share)
        assert per_client(fed) == (size, size)
        assert fed.traffic.up_own == 0
