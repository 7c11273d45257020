"""MOON: contrast with the global and the previous model."""

import copy

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
from torch import nn

from perfed.core.errors import Problem
from perfed.core.model import Batch
from perfed.methods.fedavg import FedAvg
from perfed.methods.moon import MOON

STRONG = {"mu": 3.0, "temperature": 0.3}


def deep_net():
    """With a projection below the head."""
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def contrast(z, w, previous, x, mu, T):
    """The paper's formula, exponentials and all; the fixed models in eval mode."""
    with torch.no_grad():
        z_glob, z_prev = (copy.deepcopy(n).eval()[:-1](x) for n in (w, previous))
    near, far = ((nn.functional.cosine_similarity(z, other, dim=1) / T).exp() for other in (z_glob, z_prev))
    return mu * -(near / (near + far)).log().mean()


def reference(world, mu, temperature, rounds=ROUNDS, pool=None):
    """`pool`: models that clients have from before; the authors' code may start with the initial network."""
    w, previous = world.net(), dict(pool or {})
    for round, cohort in enumerate(rounds, 1):
        nets = []
        for i in cohort:
            net = copy.deepcopy(w).train()
            optimiser = world.sgd(net)
            for x, y in world.batches(i, round):
                optimiser.zero_grad()
                z = net[:-1](x)
                loss = nn.functional.cross_entropy(net[-1](z), y)
                if i in previous:
                    loss = loss + contrast(z, w, previous[i], x, mu, temperature)
                loss.backward()
                optimiser.step()
            nets.append(net)
        previous |= zip(cohort, nets, strict=True)
        w = average(nets, [world.count(i) for i in cohort])
    return w, previous


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net, deep_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(MOON, **STRONG)
    w, previous = reference(world, **STRONG)
    close(fed.server, flat(w))
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(w))
        assert state_of(fed, i)["seen"] == (i != NEVER)
        close(state_of(fed, i)["previous"], flat(previous.get(i, world.net())))
    assert differs(fed.server, world.run(FedAvg).server)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_mu_0_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    same(world.run(MOON, mu=0).server, world.run(FedAvg).server)


def test_no_contrast_before_a_client_has_a_model(clients):
    """Not in round 1, and not in a later round that is a client's first, as it is for client 2 here."""
    world = World(plain_net, clients)
    fed, avg = world.run(MOON, ROUNDS[:1], **STRONG), world.run(FedAvg, ROUNDS[:1])
    same(fed.server, avg.server)
    net = world.net()
    nn.utils.vector_to_parameters(fed.server[: fed.method.model.P].clone(), net.parameters())
    fed.step(ROUNDS[1])
    close(state_of(fed, 2)["previous"], flat(world.train(net, world.batches(2, 2))))
    late = reference(world, **STRONG, rounds=ROUNDS[:2], pool={2: world.net()})[1]
    assert differs(state_of(fed, 2)["previous"][: fed.method.model.P], flat(late[2]))
    assert differs(state_of(fed, 1)["previous"][: fed.method.model.P], flat(world.train(net, world.batches(1, 2))))


def test_pushes_away_from_the_previous_and_towards_the_global_model(clients):
    """Along the gradient of the contrastive term alone the cosines move as the idea says."""
    world = World(deep_net, clients, lr=0.01, weight_decay=0)
    on, off = (world.federation(MOON, mu=mu).method for mu in (1.0, 0.0))
    w, w_glob, w_prev = (on.model.init(seed) for seed in (1, 2, 3))
    batch = Batch(*world.samples(0), None, torch.tensor(0))
    given = {"global": w_glob, "previous": w_prev, "seen": torch.ones((), dtype=torch.float64)}
    g = on.contrast(w, batch, given)[0] - off.contrast(w, batch, given)[0]
    assert g.norm() > 1e-3
    assert not on.model.head.only(g).any()  # a term of the representation: the head has no part in it

    def cosine(theta, other):
        z, fixed = (on.model.features(t, batch)[1] for t in (theta, other))
        return nn.functional.cosine_similarity(z, fixed).mean()

    moved = w - 0.01 * g
    assert cosine(moved, w_glob) - cosine(moved, w_prev) > cosine(w, w_glob) - cosine(w, w_prev)
    same(on.contrast(w, batch, {**given, "seen": torch.zeros(())})[0], off.contrast(w, batch, given)[0])


def test_fixed_models_are_in_eval_mode(clients):
    """With statistics of the batch in place of the running ones the gradient would be another."""
    world = World(norm_net, clients)
    method = world.federation(MOON, **STRONG).method
    w, w_glob, w_prev = (method.model.init(seed) for seed in (1, 2, 3))
    x, y = world.samples(0)
    given = {"global": w_glob, "previous": w_prev, "seen": torch.ones((), dtype=torch.float64)}
    found = method.contrast(w, Batch(x, y, None, torch.tensor(0)), given)[0]
    for training, agrees in ((False, True), (True, False)):
        net, glob, prev = (world.net(seed) for seed in (1, 2, 3))
        z, near, far = (n[:-1](x) for n in (net, glob.train(training), prev.train(training)))
        cosine = lambda a, b: nn.functional.cosine_similarity(a, b.detach())
        term = nn.functional.softplus((cosine(z, far) - cosine(z, near)) / 0.3).mean()
        (nn.functional.cross_entropy(net[-1](z), y) + 3 * term).backward()
        expected = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        assert torch.allclose(found[: len(expected)], expected, rtol=1e-9, atol=1e-11) == agrees


def test_dead_representation_has_finite_gradients(clients):
    """All units off: the cosine of a zero vector must not give NaN."""
    world = World(plain_net, clients)
    method = world.federation(MOON, **STRONG).method
    w = method.model.init(1)
    dead = method.model.part("0.bias").put(w, torch.full((8,), -1e3, dtype=torch.float64))
    given = {"global": w, "previous": dead, "seen": torch.ones((), dtype=torch.float64)}
    for theta in (w, dead):
        g, _ = method.contrast(theta, Batch(*world.samples(0), None, torch.tensor(0)), given)
        assert g.isfinite().all()


def test_refusals(clients):
    world = World(plain_net, clients)
    with pytest.raises(Problem, match="temperature must be above 0"):
        world.federation(MOON, temperature=0)
    with pytest.raises(Problem, match="nothing below its head"):
        World(lambda: nn.Linear(6, 3), clients).federation(MOON)


def test_non_participants_keep_the_previous_model(clients):
    fed = World(plain_net, clients).run(MOON)
    before = copy.deepcopy({i: state_of(fed, i) for i in range(5)})
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0)["previous"], before[0]["previous"])
    check_no_alias(fed)


def test_one_model_each_way(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(MOON)
    assert per_client(fed) == (size, size)
    assert fed.traffic.up_own == 0
