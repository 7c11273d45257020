"""FedCL: a pull on each parameter that is as strong as the parameter matters to the server's samples."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from public_samples import refine_batches, samples_of
from reference import (
    ORDER,
    ROUNDS,
    World,
    average,
    check_no_alias,
    close,
    differs,
    flat,
    norm_net,
    per_client,
    personal,
    plain_net,
    same,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Batch
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedcl import FedCL
from perfed.methods.fedprox import FedProx


def squares(net, x, y):
    """The square of each parameter's gradient of the mean loss of some samples, by tensor; the network in eval mode."""
    net = copy.deepcopy(net).eval()
    nn.functional.cross_entropy(net(x), y).backward()
    return [p.grad**2 for p in net.parameters()]


def by_parameter(world, net, round):
    """The mean square of single samples' gradients, for each parameter."""
    x, y = samples_of(world.clients)
    each = [squares(net, x[k : k + 1], y[k : k + 1]) for k in range(len(y))]
    return [sum(parts) / len(y) for parts in zip(*each, strict=True)]


def by_tensor(world, net, round):
    """The authors' code: all squares of a tensor's gradients, summed over batches, divided by the samples."""
    size, batch_size = len(samples_of(world.clients)[1]), world.settings["batch_size"]
    steps = -(-size // batch_size)
    each = [squares(net, *batch) for batch in refine_batches(world.clients, ORDER, round, steps, batch_size)]
    return [
        torch.full_like(parts[0], float(sum(part.sum() for part in parts) / size)) for parts in zip(*each, strict=True)
    ]


def importance(world, net, round, kind, raw, limit):
    omega = kind(world, net, round)
    if not raw:
        omega = omega if kind is by_parameter else [part / part.numel() for part in omega]
        mean = sum(float(part.sum()) for part in omega) / sum(part.numel() for part in omega)
        omega = [part / mean for part in omega]
    return [part.clamp(max=limit) for part in omega]


def reference(world, lam, kind=by_parameter, raw=False, limit=100.0, rounds=ROUNDS):
    """The penalty is in the loss, so that its gradient is autograd's."""
    w = world.net()
    for round, cohort in enumerate(rounds, 1):
        omega, centre = importance(world, w, round - 1, kind, raw, limit), [p.detach().clone() for p in w.parameters()]
        penalty = lambda net, omega=omega, centre=centre: (
            lam * sum((o * (p - c) ** 2).sum() for o, p, c in zip(omega, net.parameters(), centre, strict=True))
        )
        nets = [world.train(w, world.batches(i, round), penalty) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
    return w


@pytest.mark.parametrize("build", [plain_net, norm_net])
@pytest.mark.parametrize(
    ("granularity", "kind", "raw", "lam", "limit"),
    [
        ("parameter", by_parameter, False, 0.3, 100.0),
        ("parameter", by_parameter, False, 2.0, 1.5),
        ("parameter", by_parameter, True, 3.0, 100.0),
        ("tensor", by_tensor, True, 0.5, 100.0),  # as the code has it
        ("tensor", by_tensor, False, 0.3, 1.1),
    ],
)
def test_equals_the_reference(build, granularity, kind, raw, lam, limit, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedCL, lam=lam, granularity=granularity, raw=raw, limit=limit)
    w = reference(world, lam, kind, raw, limit)
    close(fed.server["w"], flat(w))
    for theta in personal(fed):
        close(theta, flat(w))
    assert differs(fed.server["w"], world.run(FedAvg).server)


def test_importance_is_that_of_the_model_that_is_sent(clients):
    """The server has measured the model of the round to come: before the first one, and after each."""
    world = World(norm_net, clients)
    fed = world.federation(FedCL)
    fed.begin((0, 1))
    for round in range(3):
        net = world.net()
        net.load_state_dict(fed.method.model.state_dict(fed.server["w"]), strict=False)
        expected = importance(world, net, round, by_parameter, False, 100.0)
        close(fed.server["omega"], torch.cat([*(part.flatten() for part in expected), torch.zeros(16)]))
        fed.step((0, 1))


def test_lam_0_is_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    same(world.run(FedCL, lam=0.0).server["w"], world.run(FedAvg).server)


@dataclass(frozen=True)
class Even(FedCL):
    """Every parameter matters alike."""

    def refine(self, server, cohort, public):
        return {**server, "omega": torch.ones_like(server["omega"])}


@pytest.mark.parametrize("granularity", ["parameter", "tensor"])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_where_all_matter_alike_it_is_fedprox_with_twice_lam(build, granularity, clients):
    world = World(build, clients, momentum=0.9)
    found = world.run(Even, lam=0.35, granularity=granularity).server["w"]
    same(found, world.run(FedProx, mu=0.7).server)
    assert differs(found, world.run(FedProx, mu=0.35).server)  # the penalty has no 1/2


def test_with_a_single_tensor_it_is_fedprox_with_a_scalar(clients):
    world = World(lambda: nn.Linear(6, 3, bias=False), clients)
    same(world.run(FedCL, lam=0.2, granularity="tensor").server["w"], world.run(FedProx, mu=0.4).server)
    raw = world.run(FedCL, ROUNDS[:1], lam=5.0, granularity="tensor", raw=True)
    w = world.net()
    mu = 10 * float(by_tensor(world, w, 0)[0][0, 0])
    same(raw.server["w"], world.run(FedProx, ROUNDS[:1], mu=mu).server)


def test_a_mean_of_1_whatever_the_level_of_the_loss(clients):
    """Raw importance falls as the model fits; what is scaled keeps the weight of the penalty."""
    for granularity in ("parameter", "tensor"):
        world = World(plain_net, clients, lr=0.2, epochs=20)
        fed = world.run(FedCL, lam=0.0, granularity=granularity, limit=1e9)
        method = fed.method
        entries = method.of_entries(fed.server["omega"])
        assert float(method.model.weights.take(entries).mean()) == pytest.approx(1.0)


def test_statistics_and_padding_feel_no_pull(clients):
    world = World(norm_net, clients)
    for granularity in ("parameter", "tensor"):
        method = world.federation(FedCL, granularity=granularity, lam=3.0).method
        free = replace(method, lam=0.0)
        w, centre = method.model.init(1), method.model.init(2) + 1
        omega = method.of_entries(torch.ones_like(method.init_server(5)["omega"]))
        batch = Batch(*world.samples(0), None, torch.tensor(0))
        given = {"w": centre, "omega": omega}
        pulls = [method.anchored(w, batch, given)[0] - free.anchored(w, batch, given)[0], 6.0 * (w - centre)]
        P = method.model.P
        same(pulls[0][:P], pulls[1][:P])
        assert not pulls[0][P:].any()


def test_too_strong_a_penalty_diverges_unless_importance_is_limited(clients):
    """lr 2 lam max Omega above 2 blows up: here max Omega is some 20 times the mean."""
    world = World(plain_net, clients, lr=0.05, epochs=20, weight_decay=0.0)
    loose = world.federation(FedCL)
    loose.begin((0, 1, 2))
    most = float(loose.server["omega"].max())
    assert most > 4
    lam = 1.5 / 0.05 / most  # 2 lr lam most = 3
    size = lambda limit: float(world.run(FedCL, ROUNDS[:1], lam=lam, limit=limit).server["w"].abs().max())
    assert not size(1e9) < 1e6
    assert size(0.3 * most) < 10


@pytest.mark.parametrize(("granularity", "more"), [("parameter", None), ("tensor", 6)])
def test_what_travels(granularity, more, clients):
    """A model each way, and down as many numbers of importance: one for each parameter, or for each tensor."""
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedCL, granularity=granularity)
    assert per_client(fed) == (size + (more or size), size)
    assert fed.traffic.extra == {}  # the public samples stay with the server
    check_no_alias(fed)


def test_newcomers_get_the_model(clients):
    fed = World(plain_net, clients).run(FedCL)
    down = fed.method.newcomer(fed.server)
    same(fed.method.personalise((), down, None), fed.server["w"])
    same(fed.method.global_model(fed.server), fed.server["w"])


def test_what_is_refused(clients):
    world = World(plain_net, clients)
    for settings, words in (
        ({"lam": -0.1}, "lam must be at least 0"),
        ({"limit": 0.0}, "limit must be above 0"),
        ({"granularity": "layer"}, "parameter, tensor"),
    ):
        with pytest.raises(Problem, match=words):
            world.federation(FedCL, **settings)
    unlabelled = replace(clients, public=replace(clients.public, labelled=False))
    with pytest.raises(Problem, match="FedCL needs labelled public samples"):
        world.federation(FedCL, clients=unlabelled)
