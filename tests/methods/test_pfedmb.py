"""pFedMB: a mixture of branches in every layer, in factored form."""

import copy
from dataclasses import dataclass

import pytest
import torch
from reference import (
    NEVER,
    ROUNDS,
    SEED,
    World,
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
from torch.func import functional_call

from perfed.contract.toy import disagreeing_clients
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import FINE_TUNING
from perfed.core.model import Batch, Model
from perfed.core.random import PERSONALISE
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.pfedmb import PFedMB
from perfed.methods.shared.mixture import Mixture, convex, convex_step, project
from perfed.models.lenet import LeNet


def conv_net():
    """A convolution, and two normalisation layers of different kinds."""
    first = (nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 3))


NORMS = (nn.BatchNorm1d, nn.LayerNorm)


class Branched:
    """B explicit copies of every linear layer, as the paper has them: what the factored form must equal."""

    def __init__(self, world, B, simplex, shared=False, weighted=True, scale=1.0, eta=0.3):
        self.world, self.B, self.simplex, self.shared, self.weighted, self.eta = (
            world,
            B,
            simplex,
            shared,
            weighted,
            eta,
        )
        nets = [world.net(SEED * B + b) for b in range(B)]
        self.net = nets[0]  # normalisation and statistics
        owners = {name: name.rpartition(".")[0] for name, _ in self.net.named_parameters()}
        modules = dict(self.net.named_modules())
        self.layer_of = {n: o for n, o in owners.items() if not isinstance(modules[o], NORMS)}
        self.layers = list(dict.fromkeys(self.layer_of.values()))
        self.W = [
            {n: scale * p.detach().clone() for n, p in net.named_parameters() if n in self.layer_of} for net in nets
        ]
        L = 1 if shared else len(self.layers)
        start = torch.full((B, L), 0 if simplex == "softmax" else 1 / B, dtype=torch.float64)
        self.states = [start.clone() for _ in range(len(world.clients))]

    def alpha(self, state):
        return state.softmax(0) if self.simplex == "softmax" else state

    def mixed(self, W, alpha):
        column = lambda n: 0 if self.shared else self.layers.index(self.layer_of[n])
        return {n: sum(alpha[b, column(n)] * W[b][n] for b in range(self.B)) for n in self.layer_of}

    def loss(self, net, W, alpha, x, y):
        """Through autograd; statistics of `net` move."""
        return nn.functional.cross_entropy(functional_call(net, self.mixed(W, alpha), (x,)), y)

    def nearest(self, v):
        """The simplex's nearest point by bisection: the shift at which the clipped entries sum to 1."""
        low, high = v.min(0).values - 1, v.max(0).values
        for _ in range(60):
            mid = (low + high) / 2
            over = (v - mid).clamp_min(0).sum(0) > 1
            low, high = torch.where(over, mid, low), torch.where(over, high, mid)
        return (v - (low + high) / 2).clamp_min(0)

    def client(self, i, round, stream=0, **when):
        world = self.world
        scratch = copy.deepcopy(self.net).train()
        state = self.states[i].clone().requires_grad_()
        for x, y in world.batches(i, round, stream=stream + 1, **when):
            (g,) = torch.autograd.grad(self.loss(scratch, self.W, self.alpha(state), x, y), state)
            moved = (state - self.eta * g).detach()
            state = (self.nearest(moved) if self.simplex == "projection" else moved).requires_grad_()
        state = state.detach()
        net = copy.deepcopy(self.net).train()
        W = [{n: p.clone().requires_grad_() for n, p in branch.items()} for branch in self.W]
        rest = [p for n, p in net.named_parameters() if n not in self.layer_of]
        settings = {k: world.settings[k] for k in ("lr", "momentum", "nesterov", "weight_decay")}
        optimiser = torch.optim.SGD([p for branch in W for p in branch.values()] + rest, **settings)
        for x, y in world.batches(i, round, stream=stream, **when):
            optimiser.zero_grad()
            self.loss(net, W, self.alpha(state), x, y).backward()
            optimiser.step()
        return W, net, self.alpha(state), state

    def tuned(self, i, round, epochs):
        """Another visit to the client, of which nothing is kept but the network."""
        W, net, alpha, _ = self.client(i, round, stream=FINE_TUNING, epochs=epochs, purpose=(PERSONALISE,))
        return self.vector(self.mixed(W, alpha) | {n: t for n, t in net.state_dict().items() if n not in self.layer_of})

    def round(self, cohort, number):
        sent = {i: self.client(i, number) for i in cohort}
        self.states = [sent[i][3] if i in sent else state for i, state in enumerate(self.states)]
        new = copy.deepcopy(self.W)
        for b in range(self.B):
            for n, layer in self.layer_of.items():
                l = 0 if self.shared else self.layers.index(layer)
                share = {i: self.world.count(i) * (float(sent[i][2][b, l]) if self.weighted else 1) for i in cohort}
                total = sum(share.values())
                if total > 1e-12:
                    new[b][n] = sum(share[i] * sent[i][0][b][n].detach() for i in cohort) / total
        self.W, n = new, sum(self.world.count(i) for i in cohort)
        state = self.net.state_dict()
        for name, t in state.items():
            if t.is_floating_point() and name not in self.layer_of:
                state[name] = sum(self.world.count(i) / n * sent[i][1].state_dict()[name] for i in cohort)
        self.net.load_state_dict(state)

    def vector(self, values):
        """A whole network's vector with these values in its branched layers."""
        net = copy.deepcopy(self.net)
        net.load_state_dict(net.state_dict() | values)
        return flat(net)


def check_against(fed, expected):
    for found, W in zip(fed.server, expected.W, strict=True):
        close(found, expected.vector(W))
    method = fed.method
    for i, theta in enumerate(personal(fed)):
        alpha = expected.alpha(expected.states[i])
        same(convex(state_of(fed, i), method.simplex), alpha)
        close(theta, expected.vector(expected.mixed(expected.W, alpha)))


OPTIMISERS = {
    "sgd": {"weight_decay": 0},
    "decay": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
}


def compare(world, method, reference, rounds=ROUNDS):
    fed, expected = world.run(PFedMB, rounds, alpha_lr=0.3, **method), Branched(world, **reference)
    for number, cohort in enumerate(rounds, 1):
        expected.round(cohort, number)
    check_against(fed, expected)
    start = convex(fed.method.init_client(), fed.method.simplex)
    assert differs(convex(state_of(fed, 3), fed.method.simplex), start)
    return fed


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_equals_explicit_branches(optimiser, simplex, clients):
    """Three rounds of torch.optim.SGD on B explicit branches, with BatchNorm, ragged clients, one of them never in."""
    world = World(norm_net, clients, epochs=1, **OPTIMISERS[optimiser])
    compare(world, {"simplex": simplex}, {"B": 3, "simplex": simplex})


@pytest.mark.parametrize("inside_sums", [False, True])
@pytest.mark.parametrize(
    "option",
    [{"shared_alpha": True}, {"weighted": False}, {"init": "mean"}, {"simplex": "none"}, {"branches": 2}],
    ids=lambda o: next(iter(o)),
)
def test_options_equal_explicit_branches(option, inside_sums, clients):
    world = World(conv_net, clients, momentum=0.9, epochs=1)
    names = {"shared_alpha": "shared", "init": "scale", "branches": "B"}
    reference = {"B": 3, "simplex": "softmax"} | {names.get(k, k): v for k, v in option.items()}
    if "init" in option:
        reference["scale"] = 3**0.5
    compare(world, option | {"inside_sums": inside_sums}, reference, ROUNDS[:2])


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("inside_sums", [False, True])
@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_one_branch_is_fedavg(simplex, inside_sums, clients):
    world = World(norm_net, clients, momentum=0.9)
    one = world.run(PFedMB, branches=1, simplex=simplex, inside_sums=inside_sums)
    avg = world.run(FedAvg)
    same(one.server[0], avg.server)
    same(personal(one), personal(avg))
    assert per_client(one)[0] == per_client(avg)[0]
    assert torch.equal(one.method.init_server(5)[0], avg.method.init_server(5))  # the same seed, to the bit


def test_one_hot_groups_are_fedavg_in_each_group(clients):
    """Alpha fixed, shared by all layers: clients 0, 3 use branch 0 alone, clients 1, 2 branch 1 alone."""
    world = World(plain_net, clients, momentum=0.9)
    groups = {0: (0, 3), 1: (1, 2)}
    fed = world.federation(PFedMB, branches=2, simplex="projection", alpha_lr=0, shared_alpha=True)
    for b, members in groups.items():
        fed.engine.states[0].update((i, torch.eye(2, dtype=torch.float64)[:, [b]]) for i in members)
    for _ in range(2):
        fed.step((0, 1, 2, 3))
    for b, members in groups.items():
        avg = world.federation(FedAvg)
        avg.server = world.federation(PFedMB, branches=2).server[b]
        for _ in range(2):
            avg.step(members)
        same(fed.server[b], avg.server)
        for i in members:
            same(personal(fed)[i], avg.server)


def test_first_aggregation_from_uniform_alpha_is_the_plain_mean(clients):
    world = World(norm_net, clients)
    weighted, plain = (world.run(PFedMB, ROUNDS[:1], alpha_lr=0, weighted=w).server for w in (True, False))
    same(weighted, plain)
    moving = [world.run(PFedMB, ROUNDS[:1], alpha_lr=3.0, weighted=w).server for w in (True, False)]
    assert differs(*moving)


def test_unused_branch_stays(clients):
    """Its denominator is 0: no division, no move; and a branch with weight moves."""
    fed = World(norm_net, clients).federation(PFedMB, branches=2, simplex="projection", alpha_lr=0)
    L = fed.method.layers.L
    one_hot = torch.tensor([[1.0], [0.0]], dtype=torch.float64).expand(2, L).clone()
    fed.engine.states[0].update((i, one_hot) for i in range(5))
    before = fed.server.clone()
    fed.step((0, 2, 3))
    inside = fed.method.layers.mask
    assert torch.equal(fed.server[1][inside], before[1][inside])
    assert differs(fed.server[0], before[0])
    assert torch.equal(fed.server[0][~inside], fed.server[1][~inside])  # one copy of the rest


# ---------------------------------------------------------------------- alpha


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_alpha_is_on_the_simplex_after_every_step(simplex, clients):
    method = World(plain_net, clients).federation(PFedMB, simplex=simplex, alpha_lr=4.0).method
    a, W = method.init_client(), method.init_server(5)
    x, y = clients.train.x, clients.train.y
    for at in range(0, 60, 6):
        a = method.alpha_step(a, Batch(x[at : at + 6], y[at : at + 6], None, torch.tensor(0)), W)
        alpha = convex(a, simplex)
        assert (alpha >= 0).all()
        same(alpha.sum(0), torch.ones(2, dtype=torch.float64))
    assert differs(alpha, torch.full_like(alpha, 1 / 3))
    assert (alpha == 0).any() == (simplex == "projection")


def test_projection_is_the_nearest_point():
    draw = torch.Generator().manual_seed(0)
    v = 2 * torch.randn(4, 50, generator=draw, dtype=torch.float64)
    found = project(v)
    same(found, Branched.nearest(None, v))
    same(found.sum(0), torch.ones(50, dtype=torch.float64))
    same(project(found), found)


def test_merged_forward_is_the_sum_of_branch_outputs_and_slopes_are_inner_products(clients):
    """One layer, by hand: (sum alpha_b W_b) x = sum alpha_b (W_b x), sum alpha_b <g, W_b> = <g, W>, softmax's slope."""
    model = Model(lambda: nn.Linear(6, 3), dtype=torch.float64)
    mix = Mixture(model, model.weights.mask)
    W = torch.stack([model.init(b) for b in range(3)])
    a = torch.randn(3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha = a.softmax(0)
    theta = mix.blend(alpha, W)
    batch = Batch(clients.train.x[:9], clients.train.y[:9], None, torch.tensor(0))
    outputs = sum(alpha[b] * model.apply(W[b], batch.x)[0] for b in range(3))
    same(model.apply(theta, batch.x)[0], outputs)
    g, _, _ = model.grad(theta, batch)
    slope = mix.slopes(W, g)
    same((alpha * slope).sum(), g @ theta)
    leaf = a.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model.loss(mix.blend(leaf.softmax(0), W), batch)[0], leaf)
    same(a - convex_step(a, slope, 1.0, "softmax"), expected)
    same(expected, alpha * (slope - g @ theta))


def test_softmax_step_is_B_squared_times_smaller_at_the_start():
    slope = torch.tensor([[1.0], [-2.0], [0.5], [3.0]], dtype=torch.float64)
    a = torch.full((4, 1), 0.25, dtype=torch.float64)
    free = convex_step(a, slope, 1e-6, "projection") - 0.25
    soft = convex(convex_step(a, slope, 1e-6, "softmax"), "softmax") - 0.25
    torch.testing.assert_close(16 * soft, free, rtol=1e-4, atol=0)


def test_alpha_phase_has_its_own_batches_and_moves_no_statistics(clients):
    world = World(norm_net, clients, lr=1e-300, weight_decay=0)  # W stays: only statistics and alpha move
    fed, avg = world.run(PFedMB, [(2,)], branches=1), world.run(FedAvg, [(2,)])
    same(fed.server[0], avg.server)
    seen = []

    @dataclass(frozen=True)
    class Spy(PFedMB):
        def gradient(self, theta, batch, given=()):
            seen.append(batch.y.tolist())
            return PFedMB.gradient(self, theta, batch, given)

    world.federation(Spy).step((2,))
    half = len(world.batches(2, 1))
    del seen[2 * half :]  # those of a specimen, by which the form of uploads is known
    assert seen[:half] == [y.tolist() for _, y in world.batches(2, 1, stream=1)]
    assert seen[half:] == [y.tolist() for _, y in world.batches(2, 1)]
    assert seen[:half] != seen[half:]


# ---------------------------------------------------------------------- branches


def test_branches_start_apart_and_equal_ones_never_separate(clients):
    world = World(plain_net, clients)
    W = world.federation(PFedMB).server
    for a in range(3):
        for b in range(a):
            assert (W[a] - W[b]).abs().max() > 0.1
    fed = world.federation(PFedMB, alpha_lr=2.0)
    fed.server = fed.server[:1].repeat(3, 1)
    for cohort in ROUNDS:
        fed.step(cohort)
    same(fed.server[1], fed.server[0])
    same(convex(state_of(fed, 3), "softmax"), torch.full((3, 2), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("B", [1, 2, 3])
def test_larger_start_follows_the_branches_and_spares_normalisation(B, clients):
    world = World(conv_net, clients)
    plain, scaled = (world.federation(PFedMB, branches=B, init=init) for init in ("branch", "mean"))
    inside = plain.method.layers.mask
    same(scaled.server[:, inside], B**0.5 * plain.server[:, inside])
    assert torch.equal(scaled.server[:, ~inside], plain.server[:, ~inside])
    assert int(inside.sum()) == sum(
        p.numel() for m in world.net().modules() if isinstance(m, nn.Linear | nn.Conv1d) for p in m.parameters()
    )  # biases too
    assert plain.method.layers.L == 3


def test_effective_step_is_s_times_the_rate(clients):
    """One full-batch step from the uniform mixture moves the merged weights by lr / B times the gradient."""
    world = World(plain_net, clients, epochs=1, batch_size=50, weight_decay=0)
    fed = world.federation(PFedMB, branches=4, alpha_lr=0)
    before = personal(fed)[0]
    net = world.net()
    net.load_state_dict(fed.method.model.state_dict(before))
    world.risk(net, 0).backward()
    g = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    fed.step((0,))
    close(personal(fed)[0], before[: len(g)] - 0.05 / 4 * g)


def test_refuses_adam(clients):
    with pytest.raises(Problem, match="scale with alpha"):
        World(plain_net, clients).federation(PFedMB, optimizer="adam")


def test_refuses_a_model_of_normalisation_alone(clients):
    with pytest.raises(Problem, match="no layer"):
        World(lambda: nn.Sequential(nn.BatchNorm1d(6)), clients).federation(PFedMB)


@pytest.mark.parametrize("simplex", ["softmax", "projection"])
def test_fine_tuning_is_one_more_visit(simplex, clients):
    """Explicit branches again, alpha, then W; a client that never took part, too. Nothing of it stays."""
    world = World(norm_net, clients, momentum=0.9, epochs=1)
    settings = {"simplex": simplex, "alpha_lr": 0.3}
    fed, expected = world.run(PFedMB, fine_tune=2, **settings), Branched(world, 3, simplex)
    for number, cohort in enumerate(ROUNDS, 1):
        expected.round(cohort, number)
    plain, found = personal(world.run(PFedMB, **settings)), {}
    for _ in range(2):
        fed.evaluate(save=found.__setitem__)
        for i in (0, 3, NEVER):
            same(found[i]["before"], plain[i])
            close(found[i]["personal"], expected.tuned(i, len(ROUNDS), 2))


def test_one_branch_is_fine_tuned_like_fedavg(clients):
    world = World(norm_net, clients, momentum=0.9)
    ours, fedavg = (world.run(kind, fine_tune=2, **more) for kind, more in ((PFedMB, {"branches": 1}), (FedAvg, {})))
    for one, other in zip(personal(ours), personal(fedavg), strict=True):
        close(one, other)


def test_clients_that_sit_out_keep_alpha_and_get_the_latest_branches(clients):
    fed = World(plain_net, clients).run(PFedMB)
    before, models = {i: state_of(fed, i).clone() for i in range(5)}, personal(fed)
    fed.step((0, 1, 2))
    check_kept(fed, before, (3, NEVER))
    assert differs(personal(fed)[3], models[3])  # assembled, not own


def test_personal_models_are_copies(clients):
    check_no_alias(World(norm_net, clients).run(PFedMB))


def test_separates_clients_that_disagree():
    """Groups of clients whose labels contradict each other end with alike mixtures inside a group, unlike across."""
    clients = disagreeing_clients()
    model = Model(plain_net, dtype=torch.float64)
    fed = Federation(Sequential(Job(PFedMB(model, lr=0.1, epochs=3, branches=2, shared_alpha=True), clients)))
    for _ in range(5):
        fed.step()
    alpha = [convex(state_of(fed, i), "softmax")[0, 0] for i in range(6)]
    ours, theirs = torch.stack(alpha[0::2]), torch.stack(alpha[1::2])
    assert (ours.mean() - theirs.mean()).abs() > 0.5
    assert ours.std() < 0.1
    assert theirs.std() < 0.1


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("B", [2, 5])
def test_B_models_down_one_up(B, clients):
    world = World(norm_net, clients)
    size, L = len(flat(world.net())), 2
    one, sums = world.run(PFedMB, branches=B), world.run(PFedMB, branches=B, inside_sums=True)
    assert per_client(one) == (B * size, size + L * B + 2)  # alpha, c, and the number of samples
    assert per_client(sums) == (B * size, B * size + 2 * L * B)
    assert one.traffic.up_mean == 0
    assert sums.traffic.up_own == 0
    same(sums.server, one.server)
    same(personal(sums), personal(one))


def test_upload_of_a_realistic_network_is_one_model():
    """LeNet on 32x32 images, five branches: at most 1.01 P up for each client, 5 P down."""
    draw = torch.Generator().manual_seed(0)
    split = Split(torch.rand(4, 3, 32, 32, generator=draw), torch.randint(0, 10, (4,), generator=draw), (2, 2))
    model = Model(lambda: LeNet(3, 32, 32, 10))
    method = PFedMB(model, branches=5, epochs=1, lr=0.01)
    fed = Federation(Sequential(Job(method, Clients(("a", "b"), split, split, split, 10))))
    fed.step()
    assert model.P > 60_000
    assert fed.traffic.up / (2 * 4 * model.P) <= 1.01
    assert fed.traffic.down == 5 * 2 * 4 * model.P
