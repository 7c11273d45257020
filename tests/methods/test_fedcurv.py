"""FedCurv: held where the others' last models were."""

import copy
from dataclasses import dataclass, replace

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
    slope,
    state_of,
    weights,
)
from torch import nn

from perfed.core.errors import Problem
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedcurv import FedCurv

LAM = 0.4


def fisher(net, samples):
    """The mean of squared gradients of one sample at a time, in eval mode."""
    net, total = copy.deepcopy(net).eval(), 0
    for x, y in zip(*samples, strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(x[None]), y[None]).backward()
        total = total + slope(net) ** 2
    return total / len(samples[1])


def parameters(net):
    return nn.utils.parameters_to_vector(net.parameters())


def reference(world, lam, rounds=ROUNDS, importance=fisher):
    """Everybody's last models by name, so that nothing has to be taken out of a sum; autograd has the penalty."""
    w, last = world.net(), {}
    for round, cohort in enumerate(rounds, 1):
        if not cohort:  # abandoned
            continue
        nets = []
        for i in cohort:
            others = [pair for j, pair in last.items() if j != i]
            penalty = lambda net, o=others: sum((c * (parameters(net) - w_j) ** 2).sum() for w_j, c in o)
            nets.append(world.train(w, world.batches(i, round), lambda net, p=penalty: lam * p(net)))
        w = average(nets, [world.count(i) for i in cohort])
        last = {i: (weights(net), importance(net, world.samples(i))) for i, net in zip(cohort, nets, strict=True)}
    return w, last


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, clients):
    """Client 1 is away for a round, client 0 and 2 too: what they did before is not in the sums, and not taken out."""
    world = World(build, clients, momentum=0.9)
    fed, (w, last) = world.run(FedCurv, lam=LAM), reference(world, LAM)
    close(fed.server["w"], flat(w))
    close(fed.server["U"], sum(I for _, I in last.values()))
    close(fed.server["V"], sum(I * w_j for w_j, I in last.values()))
    for i in ROUNDS[-1]:
        close(state_of(fed, i)["I"], last[i][1])
        close(state_of(fed, i)["Iw"], last[i][1] * last[i][0])
    for theta in personal(fed):
        close(theta, flat(w))
    assert differs(fed.server["w"], world.run(FedAvg).server)


def test_stale_terms_of_ones_own_are_not_taken_out(clients):
    """After a round without client 1 its terms are in no sum: taking them out would push it away from nobody."""
    world = World(plain_net, clients)
    rounds = [(1, 2), (2, 3), (1, 2)]
    fed = world.federation(FedCurv, lam=LAM)
    for cohort in rounds[:2]:
        fed.step(cohort)
    assert float(state_of(fed, 1)["round"]) == 1
    assert float(state_of(fed, 2)["round"]) == float(fed.server["round"]) == 2
    stale = copy.deepcopy(state_of(fed, 1))
    fed.step(rounds[2])
    close(fed.server["w"], flat(reference(world, LAM, rounds)[0]))
    wrong = world.federation(FedCurv, lam=LAM)
    for cohort in rounds[:2]:
        wrong.step(cohort)
    wrong.engine.states[0].update({1: {**stale, "round": wrong.server["round"]}})
    wrong.step(rounds[2])
    assert differs(wrong.server["w"], fed.server["w"])


def test_what_is_left_of_the_sum_is_never_negative(clients):
    fed = World(norm_net, clients).federation(FedCurv)
    for cohort in ROUNDS:
        fed.step(cohort)
        for i in cohort:
            assert (fed.server["U"] - state_of(fed, i)["I"] >= -1e-15).all()
        assert (fed.server["U"] > 0).any()


def test_lam_0_and_the_first_round_are_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    same(world.run(FedCurv, lam=0).server["w"], world.run(FedAvg).server)
    same(world.run(FedCurv, ROUNDS[:1], lam=5.0).server["w"], world.run(FedAvg, ROUNDS[:1]).server)


def test_a_single_client_is_fedavg(clients):
    """Whether it comes every time or leaves a round to another one."""
    world = World(norm_net, clients)
    same(world.run(FedCurv, [(2,)] * 3, lam=5.0).server["w"], world.run(FedAvg, [(2,)] * 3).server)
    rounds = [(2,), (1,), (2,)]
    assert differs(world.run(FedCurv, rounds, lam=LAM).server["w"], world.run(FedAvg, rounds).server)


@dataclass(frozen=True)
class Even(FedCurv):
    def squares(self, batch, w):
        return self.model.weights.only(torch.ones_like(w))


def test_where_everything_matters_alike_it_pulls_to_the_mean_of_the_others(clients):
    """As FedProx does towards the received model, with mu = 2 lam (m - 1)."""
    world, rounds = World(norm_net, clients), [(0, 2, 3), (0, 2, 3)]
    lam = 0.1
    fed = world.run(Even, rounds, lam=lam)
    nets = {i: world.train(world.net(), world.batches(i, 1)) for i in rounds[0]}
    w, new = average(list(nets.values()), [world.count(i) for i in nets]), []
    for i in nets:
        centre = sum(weights(net) for j, net in nets.items() if j != i) / 2
        pull = lambda net, c=centre: 2 * lam * 2 / 2 * ((parameters(net) - c) ** 2).sum()
        new.append(world.train(w, world.batches(i, 2), pull))
    close(fed.server["w"], flat(average(new, [world.count(i) for i in nets])))


def test_penalty_by_hand_and_statistics_untouched(clients):
    """One full-batch step apart from FedAvg: 2 lam (U' w - V') of the others, at parameters alone."""
    world = World(norm_net, clients, epochs=1, batch_size=50, lr=0.1, weight_decay=0)
    held, free = (world.federation(FedCurv, lam=lam) for lam in (LAM, 0))
    for fed in (held, free):
        fed.step((0, 2))
    before, mine = held.server, state_of(held, 2)
    for fed in (held, free):
        fed.step((2,))
    step = 2 * LAM * ((before["U"] - mine["I"]) * before["w"] - (before["V"] - mine["Iw"]))
    same(held.server["w"], free.server["w"] - 0.1 * step)
    P, size = held.method.model.P, held.method.model.size
    assert step[:P].any()
    assert not step[P:].any()
    assert differs(held.server["w"][P:size], before["w"][P:size])  # a pull on the statistics would have been seen


def test_clients_stay_nearer_to_where_the_others_were(clients):
    world, far = World(plain_net, clients), []
    for lam in (0.0, 0.5, 2.0):
        fed = world.run(FedCurv, [(0, 2, 3)], lam=lam)
        U, V = fed.server["U"], fed.server["V"]
        fed.step((1,))
        far.append(float((U * fed.server["w"] ** 2 - 2 * V * fed.server["w"]).sum()))  # less what does not depend on w
    assert far[0] > far[1] > far[2]


def test_a_client_of_a_single_class_soon_holds_nobody(clients):
    """It is certain of its class, so that its gradients are nearly 0: this is why FedCurv is FedAvg there."""
    one_class = replace(clients, train=replace(clients.train, y=torch.zeros_like(clients.train.y)))
    sums = []
    for samples in (clients, one_class):
        fed = World(plain_net, samples, lr=0.5, weight_decay=0).run(FedCurv, lam=0)
        sums.append(float(fed.server["U"].sum()))
    assert sums[1] < 1e-2 * sums[0]


def test_a_round_that_is_abandoned_leaves_the_sums_and_who_is_in_them(clients):
    """Client 2 is still in the sums two rounds later, and takes its own terms out of them."""
    broken = clients.train.x.clone()
    broken[clients.train.size[0] :][: clients.train.size[1]] = torch.nan
    world = World(plain_net, replace(clients, train=replace(clients.train, x=broken)))
    fed = world.federation(FedCurv, lam=LAM)
    fed.step((0, 2))
    before = copy.deepcopy(fed.server)
    fed.step((1,))
    same(fed.server, before)
    fed.step((2, 3))
    close(fed.server["w"], flat(reference(world, LAM, [(0, 2), (), (2, 3)])[0]))


def test_non_participants_keep_their_terms(clients):
    fed = World(plain_net, clients).run(FedCurv)
    before = {i: copy.deepcopy(state_of(fed, i)) for i in range(len(clients))}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert before[3]["I"].any()
    assert not before[NEVER]["I"].any()


def test_a_newcomer_gets_the_model_and_both_sums(clients):
    fed = World(plain_net, clients).run(FedCurv)
    torch.testing.assert_close(fed.method.newcomer(fed.server).shared, fed.server)


def test_refuses_a_negative_penalty(clients):
    with pytest.raises(Problem, match="lam must be at least 0"):
        World(plain_net, clients).federation(FedCurv, lam=-1)


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(FedCurv))


def test_three_models_each_way_and_the_number_of_a_round(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedCurv)
    assert per_client(fed) == (3 * size + 1, 3 * size)
    assert fed.traffic.up_own == 0  # sums, which can be secure ones
