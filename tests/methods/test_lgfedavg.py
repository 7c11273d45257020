"""LG-FedAvg: private lower layers, a shared head."""

from dataclasses import replace

import pytest
import torch
from parts import assemble, part_of, rest_of
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

from perfed.methods.fedavg import FedAvg
from perfed.methods.fedper import FedPer
from perfed.methods.lgfedavg import LGFedAvg

# network, what stays at the client, and the names that this means
CASES = [(plain_net, "body", ("0.",)), (norm_net, "body", ("0.", "1.")), (norm_net, "0", ("0.",))]


def reference(world, names, warmup=0):
    """Everything is trained at once; `warmup` rounds of FedAvg, a start from its model, then only heads averaged."""
    shared, own = world.net(), [world.net() for _ in range(len(world.clients))]
    for round, cohort in enumerate(ROUNDS, 1):
        warm = warmup > 0 and round <= warmup + 1
        start = [shared if warm else assemble(shared, own[i], part_of(*names)) for i in cohort]
        nets = [world.train(net, world.batches(i, round)) for i, net in zip(cohort, start, strict=True)]
        shared = average(nets, [world.count(i) for i in cohort])
        for i, net in zip(cohort, nets, strict=True):
            own[i] = net
    return shared, own


@pytest.mark.parametrize("warmup", [0, 1, 2])  # 2: the last round is the start
@pytest.mark.parametrize(("build", "part", "names"), CASES)
def test_equals_the_reference(build, part, names, warmup, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.run(LGFedAvg, personal=part, warmup=warmup)
    shared, own = reference(world, names, warmup)
    same(fed.server["w"][fed.method.model.part("!" + part).mask], flat(shared, rest_of(*names)))
    for i, theta in enumerate(personal(fed)):
        same(state_of(fed, i), flat(own[i], part_of(*names)))
        close(theta, flat(assemble(shared, own[i], part_of(*names))))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_only_the_head_travels(build, clients):
    """Eight features to three classes, with biases, whatever is below; the whole model in the first rounds."""
    world = World(build, clients)
    size, head = len(flat(world.net())), 8 * 3 + 3
    assert per_client(world.run(LGFedAvg, warmup=0)) == (head, head)
    fed = world.run(LGFedAvg, warmup=1)
    assert fed.traffic.down == 3 * 8 * (2 * size + head)  # FedAvg's round and the start from its model
    assert fed.traffic.up == 3 * 8 * (size + 2 * head)


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_first_rounds_are_fedavg(build, clients):
    """Also for clients that have lower layers of their own by then, and in evaluations."""
    world = World(build, clients, momentum=0.9)
    fed, avg = world.federation(LGFedAvg, warmup=2), world.federation(FedAvg)
    for cohort in ROUNDS[:2]:
        fed.step(cohort)
        avg.step(cohort)
        same(fed.server["w"], avg.server)
        same(personal(fed), personal(avg))
    fed.step(ROUNDS[2])
    avg.step(ROUNDS[2])
    assert differs(personal(fed), personal(avg))  # everybody has its own from here on
    head = fed.method.model.head.mask
    same(fed.server["w"][head], avg.server[head])  # the round that starts from FedAvg's model


def test_lower_layers_at_the_server_stay_when_the_first_rounds_are_over(clients):
    fed = World(plain_net, clients).run(LGFedAvg, ROUNDS[:1], warmup=1)
    before = fed.server["w"].clone()
    fed.step(ROUNDS[1])
    changed = fed.server["w"] != before
    assert torch.equal(changed, fed.method.model.head.mask)


def test_is_fedper_the_other_way_round(clients):
    world = World(norm_net, clients)
    lg = personal(world.run(LGFedAvg, warmup=0))
    same(lg, personal(world.run(FedPer, personal="body")))
    assert differs(lg, personal(world.run(FedPer)))
    assert differs(lg, personal(world.run(LGFedAvg, warmup=1)))


@pytest.mark.parametrize("warmup", [0, 1])
def test_nothing_personal_is_fedavg(warmup, clients):
    world = World(norm_net, clients, momentum=0.9)
    same(personal(world.run(LGFedAvg, personal="none", warmup=warmup)), personal(world.run(FedAvg)))


def test_no_look_at_test_data(clients):
    """Nobody keeps the layers that were best on the test samples: other test samples change nothing."""
    world = World(plain_net, clients)
    test = replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3)
    honest, other = (world.federation(LGFedAvg, clients=c, warmup=1) for c in (clients, replace(clients, test=test)))
    for cohort in ROUNDS:
        for fed in (honest, other):
            fed.step(cohort)
            fed.evaluate()
    assert torch.equal(honest.server["w"], other.server["w"])
    assert torch.equal(personal(honest), personal(other))


def test_non_participants_keep_their_layers_and_get_the_new_head(clients):
    fed = World(plain_net, clients).run(LGFedAvg, warmup=1)
    before, body = {i: state_of(fed, i).clone() for i in range(len(clients))}, 6 * 8 + 8
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    found = personal(fed)
    for i in (3, NEVER):
        same(found[i][:body], before[i])
        same(found[i][body:], fed.server["w"][body:])
    same(before[NEVER], fed.method.init_client())
    assert differs(state_of(fed, 0), before[0])


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(LGFedAvg, warmup=1))
