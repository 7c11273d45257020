"""FedHealth: a warm-up on public samples, FedAvg, and tuning of linear layers with CORAL."""

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
    models,
    norm_net,
    per_client,
    plain_net,
    same,
)
from torch import nn
from torch.func import grad

from perfed.contract.toy import conv_net
from perfed.core.errors import Problem
from perfed.core.model import Batch, Model
from perfed.core.random import PERSONALISE, derive, shuffle
from perfed.methods.fedavg import FedAvg
from perfed.methods.fedhealth import FedHealth
from perfed.methods.shared.coral import coral, covariance


def entering(net, x):
    """What enters the last layer."""
    return nn.Sequential(*list(net)[:-1])(x).flatten(1)


def distance(C_S, z):
    """CORAL, sum by sum: covariances over n - 1, the squared difference over 4 d^2."""
    C_T = torch.cov(z.T)
    return ((C_S - C_T) ** 2).sum() / (4 * z.shape[1] ** 2)


def tuning_batches(world, i, epochs, size, round, stream=0):
    """The library's batches of client i for an evaluation after a round."""
    x, y = world.samples(i)
    key = derive(ORDER, PERSONALISE, round, i, stream, 0)
    out = []
    for epoch in range(epochs):
        order = shuffle(derive(key, 0, epoch)[None], torch.tensor([len(y)]), len(y))[0]
        out += [(x[rows], y[rows]) for rows in order.split(size)]
    return out


def tuned(world, w, C_S, batches, k):
    """SGD on the linear layers of a copy; all else, statistics too, is as it was."""
    net = copy.deepcopy(w).train()
    frozen = [m for m in net.modules() if not isinstance(m, nn.Linear) and not list(m.children())]
    for module in frozen:
        module.requires_grad_(False)
    kept = [copy.deepcopy(module.state_dict()) for module in frozen]
    names = ("lr", "momentum", "nesterov", "weight_decay")
    free = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(free, **{name: world.settings[name] for name in names})
    for x, y in batches:
        optimiser.zero_grad()
        z = entering(net, x)
        loss = nn.functional.cross_entropy(net[-1](z), y)
        if len(x) > 1:
            loss = loss + k * distance(C_S, z)
        loss.backward()
        optimiser.step()
        for module, state in zip(frozen, kept, strict=True):
            module.load_state_dict(state)
    return net


def reference(world, warmup, k, epochs, size, rounds=ROUNDS):
    x, _ = samples_of(world.clients)
    w = world.train(world.net(), refine_batches(world.clients, ORDER, 0, warmup, world.settings["batch_size"]))
    for round, cohort in enumerate(rounds, 1):
        nets = [world.train(w, world.batches(i, round)) for i in cohort]
        w = average(nets, [world.count(i) for i in cohort])
    C_S = torch.cov(entering(w.eval(), x).detach().T)
    ids = range(len(world.clients.names))
    return w, [tuned(world, w, C_S, tuning_batches(world, i, epochs, size, len(rounds)), k) for i in ids]


def bent_net():
    """Linear layers below and above a normalisation, without dropout."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def image_net():
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(("build", "k", "size"), [(plain_net, 0.5, 5), (bent_net, 5.0, 9), (image_net, 5.0, 5)])
def test_equals_the_reference(build, k, size, clients):
    """Batches of 5 leave one sample of 41 alone, for which PyTorch's BatchNorm1d would be an error."""
    world = World(build, clients, momentum=0.9)
    fed = world.run(FedHealth, warmup=5, k=k, tune_epochs=3, tune_batch=size)
    w, nets = reference(world, 5, k, 3, size)
    close(fed.server["w"], flat(w))
    found = models(fed)
    for i, net in enumerate(nets):
        close(found["global"][i], flat(w))
        close(found["personal"][i], flat(net))
    without = models(world.run(FedHealth, warmup=5, k=0.0, tune_epochs=3, tune_batch=size))
    assert differs(found["personal"], without["personal"])


def test_fine_tune_goes_on_in_the_same_way(clients):
    """With other batches, and the covariance that was sent."""
    world = World(plain_net, clients)
    found = models(world.run(FedHealth, k=2.0, warmup=4, tune_epochs=1, tune_batch=8, fine_tune=2))
    w, nets = reference(world, 4, 2.0, 1, 8)
    C_S = torch.cov(entering(w.eval(), samples_of(clients)[0]).detach().T)
    for i, net in enumerate(nets):
        close(found["before"][i], flat(net))
        close(found["personal"][i], flat(tuned(world, net, C_S, tuning_batches(world, i, 2, 8, 3, stream=9), 2.0)))


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_without_warm_up_and_tuning_it_is_fedavg(build, clients):
    world = World(build, clients, momentum=0.9)
    expected = world.run(FedAvg)
    fed = world.run(FedHealth, warmup=0, tune_epochs=0)
    same(fed.server["w"], expected.server)
    same(models(fed)["personal"], models(expected)["personal"])


@dataclass(frozen=True)
class Tuned(FedAvg):
    """FedAvg, of which clients train the linear layers some more."""

    evaluates = "adapted"

    def personalise(self, client, down, data):
        return self.descend(down.shared, data, only="5,7", epochs=2)


def test_without_coral_it_is_fedavg_and_tuning_of_linear_layers(clients):
    """In batches of the method's own size that is the library's `descend` of this part."""
    world = World(image_net, clients)
    fed = world.run(FedHealth, warmup=0, k=0.0, tune_epochs=2, tune_batch=world.settings["batch_size"])
    same(models(fed)["personal"], models(world.run(Tuned))["personal"])


def test_convolutions_and_what_normalises_them_stay_as_they_are(clients):
    world = World(image_net, clients)
    fed = world.run(FedHealth, tune_epochs=3)
    model, found = fed.method.model, models(fed)
    for mine, theirs in zip(found["personal"], found["global"], strict=True):
        tuned, general = model.state_dict(mine), model.state_dict(theirs)
        moved = {name for name in tuned if not torch.equal(tuned[name], general[name])}
        assert moved == {"5.weight", "5.bias", "7.weight", "7.bias"}


@pytest.mark.parametrize(("tunes", "moved"), [("head", {"2.weight", "2.bias"}), ("0", {"0.weight", "0.bias"})])
def test_another_part_may_be_tuned(tunes, moved, clients):
    fed = World(plain_net, clients).run(FedHealth, tunes=tunes, k=1.0)
    found = models(fed)
    tuned, general = (fed.method.model.state_dict(found[name][0]) for name in ("personal", "global"))
    assert {name for name in tuned if not torch.equal(tuned[name], general[name])} == moved


def test_where_only_the_head_is_tuned_coral_has_no_gradient(clients):
    world = World(plain_net, clients)
    same(*(models(world.run(FedHealth, tunes="head", k=k))["personal"] for k in (0.0, 9.0)))


# ---------------------------------------------------------------------- CORAL


def rows(n=40, d=5):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_of_twice_the_rows_it_is_nine_squares_over_4_d_squared():
    """C_T = 4 C_S, so the difference is 3 C_S."""
    X = rows()
    assert float(coral(covariance(X), 2 * X)) == pytest.approx(9 * float((torch.cov(X.T) ** 2).sum()) / (4 * 25))


def test_of_the_same_rows_and_of_shifted_ones_it_is_0():
    X = rows()
    assert float(coral(covariance(X), X)) == 0
    assert float(coral(covariance(X), X + 100)) < 1e-20
    assert float(coral(covariance(X), X.flip(0))) < 1e-20


def test_filling_does_not_count():
    X = rows(8)
    weight = torch.tensor([1.0] * 5 + [0.0] * 3, dtype=torch.float64)
    same(covariance(X, weight), torch.cov(X[:5].T))
    same(coral(torch.eye(5, dtype=torch.float64), X, weight), distance(torch.eye(5), X[:5]))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)])
def test_a_single_row_has_no_covariance_and_no_coral(weight):
    X, C = rows(1 if weight is None else 3), torch.eye(5, dtype=torch.float64)
    assert float(coral(C, X, weight)) == 0
    slope = grad(lambda X: coral(C, X, weight))(X)
    assert not slope.any()
    assert slope.isfinite().all()


def test_its_gradient_goes_through_the_client_s_side_alone(clients):
    """C_S is a number: the gradient is that of the term with the public covariance held fixed."""
    world = World(plain_net, clients)
    method = world.federation(FedHealth, k=1.0).method
    w, (x, y), C_S = method.model.init(3), world.samples(2), 3 * torch.eye(8, dtype=torch.float64)
    batch = Batch(x, y, None, torch.tensor(0))
    found = method.model.grad(w, batch, lambda *about: method.transfer(C_S, *about))[0] - method.model.grad(w, batch)[0]
    net = method.model.module(w)
    distance(C_S, entering(net, x)).backward()
    expected = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in net.parameters()])
    close(found, expected)


def test_it_brings_covariances_together(clients):
    world = World(plain_net, clients, lr=0.02, weight_decay=0.0)
    x = samples_of(clients)[0]
    apart = []
    for k in (0.0, 300.0):
        fed = world.run(FedHealth, k=k, tune_epochs=20)
        net = fed.method.model.module(models(fed)["personal"][2]).requires_grad_(False)
        apart.append(float(distance(fed.server["C_S"], entering(net, world.samples(2)[0]))))
    assert apart[1] < 0.5 * apart[0]
    net = fed.method.model.module(fed.server["w"]).requires_grad_(False)
    same(fed.server["C_S"], torch.cov(entering(net, x).T))


# ---------------------------------------------------------------------- around it


def test_a_model_each_way_and_the_covariance_in_evaluations_alone(clients):
    world = World(image_net, clients)
    size = len(flat(world.net()))
    fed = world.run(FedHealth)
    assert per_client(fed) == (size, size)
    assert fed.traffic.extra == {}  # public samples stay with the server
    assert set(fed.method.broadcast(fed.server, torch.arange(3)).shared) == {"w"}
    assert fed.method.show(fed.server, torch.arange(3)).shared["C_S"].shape == (5, 5)
    check_no_alias(fed)


def test_newcomers_tune_the_model_too(clients):
    fed = World(plain_net, clients).run(FedHealth)
    down = fed.method.newcomer(fed.server)
    same(down.shared["w"], fed.server["w"])
    same(down.shared["C_S"], fed.server["C_S"])
    same(fed.method.global_model(fed.server), fed.server["w"])


def test_what_is_tuned_follows_from_the_network():
    part = lambda build, **more: FedHealth(Model(build), **more).tuned_part
    assert part(plain_net) == "0,2"
    assert part(conv_net) == "5"
    assert part(lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 3, 1), nn.Flatten())) == "head"
    assert part(plain_net, tunes="head") == "head"


def test_what_is_refused(clients):
    world = World(plain_net, clients)
    for settings, words in (
        ({"k": -1.0}, "k must be at least 0"),
        ({"tune_batch": 0}, "tune_batch must be at least 1"),
        ({"tunes": "conv"}, "no parameter matches 'conv'; the model has: 0.weight"),
        ({"tunes": "2,conv"}, "no parameter matches 'conv'"),
    ):
        with pytest.raises(Problem, match=words):
            world.federation(FedHealth, **settings)
    unlabelled = replace(clients, public=replace(clients.public, labelled=False))
    with pytest.raises(Problem, match="FedHealth needs labelled public samples"):
        world.federation(FedHealth, clients=unlabelled)
