"""FedProx: the pull towards the received model."""

import pytest
from reference import ROUNDS, World, average, close, differs, flat, norm_net, per_client, personal, plain_net, same

from perfed.methods.fedavg import FedAvg
from perfed.methods.fedprox import FedProx


def reference(world, mu):
    w = world.net()
    for round, cohort in enumerate(ROUNDS, 1):
        centre = [p.detach().clone() for p in w.parameters()]
        squared = lambda net, c=centre: sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), c, strict=True))
        nets = [world.train(w, world.batches(i, round), lambda net, d=squared: mu / 2 * d(net)) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
    return w


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """The reference takes the penalty's gradient from autograd, so a penalty without a gradient would show."""
    world = World(build, clients, momentum=0.9)
    fed, w = world.run(FedProx, mu=0.7), reference(world, 0.7)
    close(fed.server, flat(w))
    for theta in personal(fed):
        close(theta, flat(w))


def test_mu_0_is_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    same(world.run(FedProx, mu=0).server, world.run(FedAvg).server)
    assert differs(world.run(FedProx, mu=1).server, world.run(FedAvg).server)


def test_second_step_by_hand_and_statistics_untouched(clients):
    """Two full-batch steps: the first feels no pull, the second feels mu (w1 - w0), and buffers feel none."""
    world = World(norm_net, clients, batch_size=50, lr=0.1, weight_decay=0)
    one, two = (world.run(FedAvg, [(2,)], epochs=e).server for e in (1, 2))
    start = world.federation(FedAvg).server
    P = sum(p.numel() for p in world.net().parameters())
    expected = two.clone()
    expected[:P] -= 0.1 * 2.0 * (one - start)[:P]
    found = world.run(FedProx, [(2,)], epochs=2, mu=2.0).server
    same(found, expected)
    assert differs(found[:P], two[:P])
    assert differs(one[P:], start[P:])  # a pull on the buffers would have been seen


def test_larger_mu_stays_closer(clients):
    world = World(plain_net, clients)
    start = world.federation(FedProx).server
    moved = [float((world.run(FedProx, ROUNDS[:1], mu=mu).server - start).norm()) for mu in (0, 1, 10)]
    assert moved[0] > moved[1] > moved[2] > 0


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    assert per_client(world.run(FedProx)) == (size, size)
