"""Reptile: a part of the way to the clients' mean."""

import copy
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
    same,
)

import perfed
from perfed.core.errors import Problem
from perfed.core.random import PERSONALISE
from perfed.federation.optimizers import ServerOptimizer
from perfed.methods.fedavg import FedAvg
from perfed.methods.reptile import Reptile


def towards(old, new, eps):
    """`new`, but for its parameters, which are a part `eps` of the way from those of `old`."""
    out = copy.deepcopy(new)
    with torch.no_grad():
        for p, q in zip(out.parameters(), old.parameters(), strict=True):
            p.copy_(q + eps * (p - q))
    return out


def reference(world, steps, falling):
    w = world.net()
    for round, (cohort, eps) in enumerate(zip(ROUNDS, falling, strict=True), 1):
        batches = lambda i, r=round: world.batches(i, r, steps)[:steps] if steps else world.batches(i, r)
        nets = [world.train(w, batches(i)) for i in cohort]
        w = towards(w, average(nets, [1] * len(nets)), eps)
    return w


@pytest.mark.parametrize(
    ("build", "steps", "settings", "falling"),
    [
        (plain_net, 0, {"eps": 1.0}, (1, 2 / 3, 1 / 3)),
        (norm_net, 9, {"eps": 0.6}, (0.6, 0.4, 0.2)),
        (norm_net, 3, {"eps": 0.6, "decay": False}, (0.6, 0.6, 0.6)),
        (plain_net, 3, {"eps": 1.5, "decay": False}, (1.5, 1.5, 1.5)),
    ],
)
def test_equals_the_reference(build, steps, settings, falling, clients):
    """Three rounds, so that eps falls by thirds; the smallest client goes through its data again and again."""
    world = World(build, clients, momentum=0.9)
    found = models(world.run(Reptile, steps=steps, adapt_epochs=2, **settings))
    w = reference(world, steps, falling)
    for i in range(len(clients)):
        close(found["global"][i], flat(w))
        close(found["personal"][i], flat(world.train(w, world.batches(i, len(ROUNDS), 2, purpose=(PERSONALISE,)))))
    assert differs(found["personal"][NEVER], found["global"][NEVER])


def test_eps_1_without_decay_is_fedavg_where_clients_have_as_many_samples(clients):
    world = World(norm_net, equal_clients(clients), momentum=0.9)
    found = world.run(Reptile, eps=1, decay=False)
    same(found.server, world.run(FedAvg).server)
    same(models(world.run(Reptile, eps=1, decay=False, adapt_epochs=0))["personal"], models(found)["global"])
    ragged = World(norm_net, clients)
    assert differs(ragged.run(Reptile, decay=False).server, ragged.run(FedAvg).server)  # uniform, not by samples


@pytest.mark.parametrize("eps", [0.3, 1.6])
def test_fedavg_with_a_rate_of_the_server_is_the_same_where_clients_have_as_many_samples(eps, clients):
    world = World(norm_net, equal_clients(clients))
    fed = world.federation(FedAvg)
    fed.optimizer = ServerOptimizer("momentum", rate=eps, momentum=0.0)
    for cohort in ROUNDS:
        fed.step(cohort)
    same(world.run(Reptile, eps=eps, decay=False).server, fed.server)


def test_statistics_are_the_plain_mean(clients):
    """Stretched by an eps above 1, the falling running variance of small inputs would turn negative."""
    small = replace(clients, train=replace(clients.train, x=0.01 * clients.train.x))
    fed = World(norm_net, small).run(Reptile, [(2,)], eps=2.0)
    variance = fed.server[fed.method.model.size - 8 : fed.method.model.size]
    assert 0 < variance.min() < 0.5


@pytest.mark.parametrize(("decay", "sizes"), [(True, [0.8, 0.6, 0.4, 0.2]), (False, [0.8] * 4)])
def test_eps_falls_over_the_rounds_that_the_run_has(decay, sizes, tmp_path):
    settings = dict(data="digits", clients=4, engine="sequential", epochs=1, batch_size=50, baseline=False)
    run = perfed.run("reptile", rounds=4, eps=0.8, decay=decay, out=tmp_path / "run", **settings)
    lines = run.folder.method("reptile").rounds()
    assert [line["eps"] for line in lines if line["round"]] == pytest.approx(sizes)


def test_adaptation_leaves_no_trace_and_never_sees_test_samples(clients):
    world = World(norm_net, clients)
    quiet, watched = world.run(Reptile), world.federation(Reptile, length=3)
    for cohort in ROUNDS:
        watched.step(cohort)
        watched.evaluate()
    assert torch.equal(quiet.server, watched.server)
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    assert torch.equal(models(quiet)["personal"], models(world.run(Reptile, clients=spoiled))["personal"])


def test_a_newcomer_gets_the_shared_model(clients):
    fed = World(plain_net, clients).run(Reptile)
    assert torch.equal(fed.method.newcomer(fed.server).shared, fed.server)


def test_refuses_no_step_and_less_than_nothing(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="eps must be above 0"):
        world.federation(Reptile, eps=0)
    with pytest.raises(Problem, match="steps must be at least 0"):
        world.federation(Reptile, steps=-1)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(Reptile))


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(Reptile)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
