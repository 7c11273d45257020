"""FedFomo: others' models, weighted by what they are worth on validation data."""

from dataclasses import replace
from functools import partial

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
    weights,
)

from perfed.contract import checks
from perfed.contract.toy import disagreeing_clients
from perfed.core.clients import Split
from perfed.core.errors import Problem
from perfed.core.messages import Down
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.methods import fedfomo
from perfed.methods.fedavg import FedAvg
from perfed.methods.local import Local

FedFomo = partial(fedfomo.FedFomo, warmup=0)  # most tests are about the rounds after it
N = 5
LONG = (*ROUNDS, (0, 1, 3), (1, 2, 4))


def blend(world, base, nets, shares):
    """base + sum of shares (net - base), with statistics."""
    out, b, states = world.net(), base.state_dict(), [net.state_dict() for net in nets]
    at = lambda k: b[k] + sum(s * (state[k] - b[k]) for s, state in zip(shares, states, strict=True))
    out.load_state_dict({k: at(k) if v.is_floating_point() else v for k, v in b.items()})
    return out


def reference(world, chosen, base="trained", rounds=LONG, split="val", warmup=0):
    """Who is downloaded is given: round -> client -> list."""
    nets, bases, shared = [world.net() for _ in range(N)], [world.net() for _ in range(N)], world.net()
    P = torch.zeros(N, N, dtype=torch.float64)
    for round, cohort in enumerate(rounds, 1):
        new = {}
        for i in cohort:
            if round <= warmup:
                new[i] = (world.train(shared, world.batches(i, round)), shared)
                continue
            ids = [i, *chosen[round][i]]
            worth = []
            for j in ids:
                gain = float((world.risk(bases[i], i, split) - world.risk(nets[j], i, split)).detach())
                apart = float((weights(nets[j]) - weights(bases[i])).norm())
                worth.append(gain / apart if apart else 0.0)
            total = sum(max(x, 0.0) for x in worth)
            shares = [max(x, 0.0) / total if total else 0.0 for x in worth]
            start = blend(world, bases[i], [nets[j] for j in ids], shares)
            new[i] = (world.train(start, world.batches(i, round)), start)
            for j, x in zip(ids[1:], worth[1:], strict=True):
                P[i, j] += x / (sum(map(abs, worth)) or 1.0)
        for i, (net, start) in new.items():
            bases[i] = nets[i] if base == "trained" else start
            nets[i] = net
        if round <= warmup:
            shared = average([nets[i] for i in cohort], [world.count(i) for i in cohort])
    return nets, bases, P


def weights_of(theta, model):
    return theta[: model.P]


def play(fed, rounds=LONG):
    """Run, and note who downloads whom."""
    chosen = {}
    for round, cohort in enumerate(rounds, 1):
        ids = torch.tensor(cohort)
        chosen[round] = dict(zip(cohort, fed.method.choose(fed.server, ids).tolist(), strict=True))
        fed.step(cohort)
    return chosen


@pytest.mark.parametrize("base", ["trained", "begun"])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_equals_the_reference(build, base, clients):
    world = World(build, clients, momentum=0.9)
    fed = world.federation(FedFomo, base=base, downloads=2)
    nets, bases, P = reference(world, play(fed), base)
    same(fed.server["preference"], P)
    assert P.count_nonzero() > 8
    for i, theta in enumerate(personal(fed)):
        close(theta, flat(nets[i]))
        close(state_of(fed, i)["base"], flat(bases[i]))
        close(fed.server["models"][i], flat(nets[i]))
    assert differs(personal(fed), personal(world.run(Local, LONG)))


@pytest.mark.parametrize("base", ["trained", "begun"])
@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_after_a_warmup_equals_the_reference(build, base, clients):
    world = World(build, clients)
    fed = world.federation(FedFomo, base=base, downloads=2, warmup=1)
    nets, bases, P = reference(world, play(fed), base, warmup=1)
    same(fed.server["preference"], P)
    assert P.count_nonzero() > 4
    for i in range(N):
        close(state_of(fed, i)["w"], flat(nets[i]))
        close(state_of(fed, i)["base"], flat(bases[i]))


def test_the_first_rounds_are_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    fed, avg = world.run(FedFomo, warmup=3), world.run(FedAvg)
    same(fed.server["w"], avg.server)
    assert not fed.server["preference"].any()
    last = fed.server["w"].clone()
    size = len(flat(world.net()))
    assert per_client(fed) == (size, size + 1)  # a model each way, and the number of samples
    fed.step((0, 1, 2))
    assert torch.equal(fed.server["w"], last)
    assert differs(state_of(fed, 0)["w"], avg.server)


def test_epsilon_decays_from_the_end_of_the_warmup(clients):
    world = World(plain_net, clients)
    server = world.federation(FedFomo).server
    liked = torch.rand(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    server = server | {"seen": torch.ones(N, dtype=torch.bool), "preference": liked}
    late = world.federation(FedFomo, warmup=5, downloads=2, epsilon=1, decay=0.125).method
    found = []
    for round in range(5, 13):
        now = server | {"round": torch.tensor(round)}
        for epsilon in (1 - 0.125 * (round - 5), max(1 - 0.125 * round, 0)):
            fixed = world.federation(FedFomo, downloads=2, epsilon=epsilon, decay=0).method
            found.append(torch.equal(late.choose(now, torch.arange(N)), fixed.choose(now, torch.arange(N))))
    assert all(found[::2])
    assert not all(found[1::2])  # with its own clock it would explore less


def test_a_client_that_comes_later_is_refused_at_any_time(clients):
    fed = World(plain_net, clients).federation(FedFomo, warmup=2)
    for cohort in ROUNDS:
        with pytest.raises(Problem, match="nothing to send to a new one"):
            fed.method.newcomer(fed.server)
        fed.step(cohort)


def test_without_any_validation_samples_training_data_decide(clients):
    world = World(plain_net, replace(clients, val=Split(clients.val.x[:0], clients.val.y[:0], (0,) * N)))
    fed = world.federation(FedFomo, downloads=2)
    nets = reference(world, play(fed), split="train")[0]
    for i in range(N):
        close(state_of(fed, i)["w"], flat(nets[i]))


@pytest.mark.parametrize("i", [0, 4])
def test_a_client_without_validation_samples_uses_its_training_data(i, clients):
    """The others still use theirs. The last client's rows would lie behind the end of the table."""
    sizes = [0 if j == i else n for j, n in enumerate(clients.val.size)]
    rows = torch.cat([torch.full((n,), j != i) for j, n in enumerate(clients.val.size)])
    some = replace(clients, val=Split(clients.val.x[rows], clients.val.y[rows], tuple(sizes)))
    world = World(plain_net, clients)
    base = world.run(FedFomo, LONG, downloads=4)
    found = []
    for data in (some, replace(clients, val=clients.train), clients):
        fed = world.federation(FedFomo, clients=data, downloads=4)
        fed.server, fed.round = base.server, len(LONG)
        fed.engine.states[0].update(base.engine.states[0])
        fed.step((i, 2) if i > 2 else (i, 3))
        found.append(fed.server["preference"])
    same(found[0][i], found[1][i])
    assert differs(found[0][i], found[2][i])
    same(found[0][3 if i < 3 else 2], found[2][3 if i < 3 else 2])


def test_own_trained_model_is_a_candidate_that_costs_nothing():
    """With nothing useful from others a client keeps its progress: it is Local, one download or none."""
    clients = disagreeing_clients(groups=1, each=3)
    world = World(plain_net, clients)
    fed, alone = world.federation(FedFomo, downloads=1), world.federation(Local)
    useless = 20 * fed.method.model.init(7)
    for _ in range(4):
        fed.server = fed.server | {"models": useless.repeat(3, 1)}
        fed.step(range(3))
        alone.step(range(3))
    same(personal(fed), personal(alone))
    assert differs(personal(fed), fed.method.model.init(5))


def test_nothing_better_means_back_to_the_base(clients):
    fed = World(plain_net, clients, lr=1e-12, weight_decay=0).run(FedFomo, ROUNDS)
    good, bad = fed.method.model.init(5), 20 * fed.method.model.init(7)
    fed.engine.states[0][0] = {"base": good, "w": bad}
    fed.server = fed.server | {"models": bad.repeat(N, 1)}
    fed.step((0,))
    torch.testing.assert_close(state_of(fed, 0)["w"], good, rtol=0, atol=1e-9)


def test_weights_are_clipped_and_sum_to_1(clients):
    """A model with a worse loss has no part in the mixture, however far it is."""
    clients = replace(clients, val=clients.train)
    fed = World(plain_net, clients, lr=1e-12, weight_decay=0).run(FedFomo, ROUNDS, downloads=4)
    trained = state_of(World(plain_net, clients, lr=0.2).run(Local, [(0,)] * 20), 0)
    start = fed.method.model.init(5)
    models = 20 * fed.method.model.init(7).repeat(N, 1)
    models[2] = trained
    fed.engine.states[0][0] = {"base": start, "w": start.clone()}
    fed.server = fed.server | {"models": models}
    before = fed.server["preference"][0].clone()
    fed.step((0,))
    # All weight is on client 2: nothing is left of the base.
    torch.testing.assert_close(state_of(fed, 0)["w"], trained, rtol=0, atol=1e-9)
    change = fed.server["preference"][0] - before
    assert change[2] > 0
    assert (change[[1, 3, 4]] < 0).all()  # preferences are signed
    same(float(change.abs().sum()), 1.0)


def test_distances_are_of_parameters_only(clients):
    """Statistics that differ do not change a weight: one model twice, once with a base of other statistics."""
    world = World(norm_net, clients, lr=1e-12, weight_decay=0)
    fed = world.run(FedFomo, [(0, 1, 2)], downloads=1, epsilon=0)
    model, method = fed.method.model, fed.method
    base, w, other = (model.init(seed) for seed in (1, 2, 3))
    losses = torch.tensor([2.0, 1.0, 1.5], dtype=torch.float64)

    class Fixed:
        def mean(self, fn, models, split="train"):
            return losses

        def count(self, split):
            return torch.tensor(1)

        def fold(self, step, carry, given, **how):
            return carry

    for shift in (0.0, 7.0):
        moved = base.clone()
        moved[model.P : model.size] += shift
        up = method.local({"base": moved, "w": w}, Down(own=other[None]), Fixed())[1]
        own, others = 1 / weights_of(w - base, model).norm(), 0.5 / weights_of(other - base, model).norm()
        same(float(up.own[1]), float(others / (own + others)))


def test_choice_is_never_oneself_never_twice_and_repeatable(clients):
    fed = World(plain_net, clients).run(FedFomo, downloads=3)
    ids = torch.arange(N)
    chosen = fed.method.choose(fed.server, ids)
    for i, row in enumerate(chosen.tolist()):
        assert i not in row
        assert len(set(row)) == 3
    assert torch.equal(fed.method.choose(fed.server, ids[2:4]), chosen[2:4])  # whoever else asks


def test_greedy_takes_the_preferred_and_epsilon_1_ignores_them(clients):
    world = World(plain_net, clients)
    liked = torch.tensor([[0, 4, 3, 2, 1.0]] * N, dtype=torch.float64)
    greedy, random = (world.federation(FedFomo, downloads=2, epsilon=e, decay=0).method for e in (0, 1))
    server = greedy.init_server(N) | {"preference": liked, "seen": torch.ones(N, dtype=torch.bool)}
    assert [set(row) for row in greedy.choose(server, torch.arange(N)).tolist()] == [
        {1, 2}, {2, 3}, {1, 3}, {1, 2}, {1, 2}
    ]  # fmt: skip
    counts = torch.zeros(N)
    for round in range(400):
        counts[random.choose(server | {"round": torch.tensor(round)}, torch.tensor([0]))[0]] += 1
    assert counts[0] == 0
    assert (counts[1:] - 200).abs().max() < 50


def test_epsilon_is_a_share_of_the_downloads_and_decays(clients):
    method = World(plain_net, clients).federation(FedFomo, downloads=1, epsilon=0.5, decay=0.25).method
    liked = torch.zeros(N, N, dtype=torch.float64)
    liked[0, 3] = 1
    server = method.init_server(N) | {"preference": liked, "seen": torch.ones(N, dtype=torch.bool)}
    others = lambda round, seeds: sum(
        int(method.at(seed=s).choose(server | {"round": torch.tensor(round)}, torch.tensor([0]))[0, 0] != 3)
        for s in range(seeds)
    )
    assert 0.25 < others(0, 400) / 400 < 0.5  # 0.5 random, a quarter of which hits the favourite
    assert 0.1 < others(1, 400) / 400 < 0.27
    assert others(2, 100) == 0


def test_ties_are_broken_at_random_and_differently_for_each_client(clients):
    method = World(plain_net, clients).federation(FedFomo, downloads=1, epsilon=0).method
    server = method.init_server(N) | {"seen": torch.ones(N, dtype=torch.bool)}
    rows = [
        tuple(method.choose(server | {"round": torch.tensor(r)}, torch.arange(N)).flatten().tolist()) for r in range(20)
    ]
    assert len(set(rows)) > 15
    assert {row[0] for row in rows} == {1, 2, 3, 4}


def test_models_that_were_never_uploaded_come_last(clients):
    fed = World(plain_net, clients).run(FedFomo, [(0, 1, 3)], downloads=2, epsilon=1)
    for round in range(30):
        chosen = fed.method.choose(fed.server | {"round": torch.tensor(round)}, torch.arange(N))
        assert all(set(row) <= {0, 1, 3} for row in chosen.tolist())


def test_more_downloads_than_others_are_capped(clients):
    world = World(norm_net, clients)
    many, all_others = world.run(FedFomo, downloads=40), world.run(FedFomo, downloads=4)
    assert per_client(many) == per_client(all_others)
    same(personal(many), personal(all_others))
    with pytest.raises(Problem, match="at least 1"):
        world.federation(FedFomo, downloads=0)


def test_no_look_at_test_data(clients):
    world = World(plain_net, clients)
    spoiled = replace(clients, test=replace(clients.test, x=-3 * clients.test.x, y=(clients.test.y + 1) % 3))
    honest, other = (world.run(FedFomo, LONG, clients=c) for c in (clients, spoiled))
    assert torch.equal(personal(other), personal(honest))
    blind = replace(clients, val=replace(clients.val, y=(clients.val.y + 1) % 3))
    assert differs(personal(world.run(FedFomo, LONG, clients=blind)), personal(honest))


def test_non_participants_keep_their_state(clients):
    fed = World(plain_net, clients).run(FedFomo)
    before = {i: {name: t.clone() for name, t in state_of(fed, i).items()} for i in range(N)}
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(state_of(fed, 0)["w"], before[0]["w"])
    check_no_alias(fed)


def test_M_models_down_one_up(clients):
    world = World(norm_net, clients)
    size = len(flat(world.net()))
    for M in (1, 3):
        fed = world.run(FedFomo, downloads=M)
        assert per_client(fed) == (M * size, size + M)
        assert fed.traffic.up_mean == fed.traffic.down_shared == 0


@pytest.mark.parametrize("sizes", [(0,) * N, (0, 1, 2, 0, 0)])
def test_engines_agree_without_validation_samples(sizes, clients):
    """In blocks of two a whole block may have none, at the end of the table."""
    val = Split(clients.val.x[: sum(sizes)], clients.val.y[: sum(sizes)], sizes)
    few = replace(clients, val=val)
    method = World(plain_net, few).federation(FedFomo).method
    one = checks.play(Sequential(Job(method, few, seed=5)))
    for block in (0, 2):
        other = checks.play(Vectorised(Job(method, few, seed=5), block=block))
        same(other.server, one.server)
        same(other.states, one.states)
