"""Ditto: a global model, and personal ones pulled towards it."""

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    World,
    average,
    check_kept,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
    state_of,
)

from perfed.core.model import Batch
from perfed.methods.ditto import Ditto
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local


def reference(world, lam, centre="received"):
    w, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        for i, net in zip(cohort, nets, strict=True):
            fixed = [p.detach().clone() for p in (w if centre == "received" else net).parameters()]
            penalty = lambda v, f=fixed: (
                lam / 2 * sum(((p - q) ** 2).sum() for p, q in zip(v.parameters(), f, strict=True))
            )
            own[i] = world.train(own[i], world.batches(i, round), penalty)
        w = average(nets, [world.count(i) for i in cohort])
    return w, own


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """The reference takes the penalty's gradient from autograd, so a penalty without a gradient would show."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(Ditto, lam=0.8)
    w, own = reference(world, 0.8)
    close(fed.server, flat(w))
    for i, theta in enumerate(personal(fed)):
        close(state_of(fed, i), flat(own[i]))
        close(theta, flat(own[i]))


def test_centre_is_the_received_model(clients):
    """Not the locally trained one, which would give clearly other models."""
    world = World(plain_net, clients, momentum=0.9)
    found = personal(world.run(Ditto, lam=0.8))
    for i in range(4):
        wrong = flat(reference(world, 0.8, centre="trained")[1][i])
        assert differs(found[i][: len(wrong)], wrong)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_lam_0_is_local_and_the_global_model_is_always_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    free, pulled, average_model = world.run(Ditto, lam=0), world.run(Ditto, lam=2), world.run(FedAvg).server
    same(personal(free), personal(world.run(Local)))
    same(free.server, average_model)
    same(pulled.server, average_model)
    assert differs(personal(pulled), personal(free))


def test_pull_has_a_gradient_and_spares_statistics(clients):
    """One step from v towards w, by hand: the parameters differ by lr lam (v - w), the statistics not at all."""
    world = World(norm_net, clients, lr=0.1, weight_decay=0)
    free, pulled = (world.federation(Ditto, lam=lam).method for lam in (0.0, 3.0))
    v, w = (free.model.init(seed) for seed in (1, 2))
    w[free.model.P : free.model.size] += 1  # other statistics too
    batch = Batch(*world.samples(0), None, torch.tensor(0))
    steps = []
    for method in (free, pulled):
        g, fresh = method.pulled(v, batch, w)
        steps.append(method.update(fresh, method.start(v), g)[0])
    expected = torch.zeros_like(v)
    expected[: free.model.P] = -0.1 * 3.0 * (v - w)[: free.model.P]
    same(steps[1] - steps[0], expected)
    assert differs(steps[0][free.model.P :], v[free.model.P :])  # statistics of the batch did arrive


def test_stronger_pull_is_closer_to_the_centre(clients):
    world = World(plain_net, clients)
    start = world.federation(Ditto).server
    far = [float((state_of(world.run(Ditto, ROUNDS[:1], lam=lam), 0) - start).norm()) for lam in (0, 1, 10)]
    assert far[0] > far[1] > far[2] > 0


def test_non_participants_keep_their_model(clients):
    fed = World(plain_net, clients).run(Ditto)
    before = {i: state_of(fed, i).clone() for i in range(len(clients))}
    server = fed.server.clone()
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    same(personal(fed)[3], before[3])  # evaluated as it is, though the global model moved on
    assert differs(fed.server, server)
    assert differs(state_of(fed, 0), before[0])


def test_personal_and_global_are_different_memory(clients):
    fed = World(plain_net, clients).run(Ditto, ROUNDS[:1], lam=0.5)
    assert differs(state_of(fed, 0), fed.server)
    check_no_alias(fed)


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(Ditto)) == (size, size)
