"""PGFedMo: PGFed with a smoothed gradient of the others' risks."""

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
    push,
    same,
    slope,
    state_of,
    weights,
)
from torch import nn

from perfed.methods.fedavg import FedAvg
from perfed.methods.pgfed import PGFed
from perfed.methods.pgfedmo import PGFedMo
from perfed.training.catalog import find

M, N = 3, 5
STRONG = {"mu": 0.6, "alpha_lr": 0.02}
LONG = (*ROUNDS, (0, 1, 3))  # client 3 receives three times, client 0 twice


def reference(world, mu, alpha_lr, beta, rounds=LONG):
    """Algorithm 1 with momentum, eq. 15, in Python loops; `None` until the first reception."""
    w, A, last = world.net(), [[1 / M] * N for _ in range(N)], {}
    nets, stored = {i: world.net() for i in range(N)}, dict.fromkeys(range(N))
    for round, cohort in enumerate(rounds, 1):
        zero = torch.zeros_like(weights(w))
        gbar, sent = mu / M * sum((g for g, _ in last.values()), zero), {}
        for i in cohort:
            net = nets[i].train()
            net.load_state_dict(w.state_dict())
            if last:
                received = mu * sum(A[i][j] * g for j, (g, _) in last.items())
                stored[i] = received if stored[i] is None else (1 - beta) * received + beta * stored[i]
            optimiser = world.sgd(net)
            for x, y in world.batches(i, round):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                push(net, zero if stored[i] is None else stored[i])
                optimiser.step()
                s = float(gbar @ weights(net))
                for j, (_, c) in last.items():
                    A[i][j] = max(A[i][j] - alpha_lr * (c + s), 0.0)
            net.zero_grad()
            risk = world.risk(net, i)
            risk.backward()
            sent[i] = (slope(net).clone(), mu * float(risk.detach() - slope(net) @ weights(net)))
        w = average([nets[i] for i in cohort], [world.count(i) for i in cohort])
        last = sent
    return w, torch.tensor(A, dtype=torch.float64), nets, stored


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, momentum, clients):
    world = World(build, clients, momentum=momentum)
    fed = world.run(PGFedMo, LONG, beta=0.7, **STRONG)
    w, A, nets, stored = reference(world, beta=0.7, **STRONG)
    close(fed.server["w"], flat(w))
    same(fed.server["alpha"], A)
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i)["gtilde"], torch.zeros_like(weights(w)) if stored[i] is None else stored[i])


def test_beta_0_is_pgfed_to_the_bit(clients):
    world = World(norm_net, clients, momentum=0.9)
    plain, none, some = (
        world.run(kind, LONG, **STRONG, **more) for kind, more in ((PGFed, {}), (PGFedMo, {"beta": 0}), (PGFedMo, {}))
    )
    torch.testing.assert_close(none.server, plain.server, rtol=0, atol=0)
    assert torch.equal(personal(none), personal(plain))
    assert differs(some.server["w"], plain.server["w"])


def test_reachable_under_its_own_name_with_a_beta():
    """In the authors' code the name is refused and beta never read."""
    entry = find("pgfedmo")
    assert entry.load() is PGFedMo
    assert entry.fields["beta"].default == 0.5
    assert "beta" not in find("pgfed").fields


def test_first_reception_is_unscaled(clients):
    """Not (1 - beta) of it; a client whose round 1 brought nothing has received nothing."""
    fed = World(plain_net, clients).federation(PGFedMo, beta=0.8, **STRONG)
    fed.step(ROUNDS[0])
    assert not any(state_of(fed, i)["gtilde"].any() for i in range(N))
    down = fed.method.broadcast(fed.server, torch.arange(N))
    fed.step(ROUNDS[1])
    for i in ROUNDS[1]:
        same(state_of(fed, i)["gtilde"], down.own["mixed"][i])
    kept = state_of(fed, 3)["gtilde"]
    down = fed.method.broadcast(fed.server, torch.arange(N))
    fed.step(ROUNDS[2])
    same(state_of(fed, 3)["gtilde"], 0.2 * down.own["mixed"][3] + 0.8 * kept)  # its second
    same(state_of(fed, 0)["gtilde"], down.own["mixed"][0])  # its first
    assert differs(down.own["mixed"][3], kept)


def test_two_rounds_equal_pgfed(clients):
    """Nobody has anything to smooth before a second reception."""
    world = World(plain_net, clients)
    two = [world.run(kind, LONG[:2], **STRONG) for kind in (PGFed, PGFedMo)]
    torch.testing.assert_close(two[1].server, two[0].server, rtol=0, atol=0)


def test_mu_0_is_fedavg_training(clients):
    world = World(norm_net, clients)
    same(world.run(PGFedMo, LONG, mu=0).server["w"], world.run(FedAvg, LONG).server)


@pytest.mark.parametrize("keep_momentum", [False, True])
def test_non_participants_keep_their_state(keep_momentum, clients):
    fed = World(plain_net, clients, momentum=0.9).run(PGFedMo, keep_momentum=keep_momentum, **STRONG)
    before = {i: {name: t.clone() for name, t in state_of(fed, i).items()} for i in range(N)}
    assert len(before[3]) == 2 + keep_momentum
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert before[3]["gtilde"].any()
    assert differs(state_of(fed, 0)["theta"], before[0]["theta"])
    check_no_alias(fed)


def test_sends_what_pgfed_sends(clients):
    """The smoothed gradient stays at the client."""
    world = World(norm_net, clients)
    assert per_client(world.run(PGFedMo)) == per_client(world.run(PGFed))
    size = len(flat(world.net()))
    down, up = per_client(world.run(PGFedMo))
    assert 3 * size <= down <= 3 * size + 2 * M
    assert 2 * size <= up <= 2 * size + M + 1
