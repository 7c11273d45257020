"""A model as a vector: against ordinary modules, with and without vmap."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import norm_net, plain_net
from torch import nn
from torch.func import vmap

from perfed.accel.fast_model import FastModel
from perfed.core.errors import Problem
from perfed.core.model import ALIGN, Batch, Model, average
from perfed.core.random import derive
from perfed.methods.fedavg import FedAvg

D = torch.float64


def batch(n=9, features=6, classes=3, seed=0, weight=None):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=draw, dtype=D)
    return Batch(x, torch.randint(0, classes, (n,), generator=draw), weight, derive(7, seed))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 3)
    )


def test_vector_and_module_are_one():
    model = Model(norm_net, dtype=D)
    theta = model.init(3)
    net = model.module(theta)
    assert isinstance(net, nn.Sequential)
    assert isinstance(net[1], nn.BatchNorm1d)
    assert not net.training
    x = batch().x
    torch.testing.assert_close(model.apply(theta, x)[0], net(x))
    torch.testing.assert_close(model.flat(net.state_dict()), theta)


def test_sizes_and_padding():
    model = Model(norm_net, dtype=D)
    parameters = sum(p.numel() for p in norm_net().parameters())
    assert (parameters, 16) == (model.P, model.Q)
    assert model.width % ALIGN == 0
    assert model.size == parameters + 16 <= model.width
    theta = model.init(0)
    assert theta.shape == (model.width,)
    assert not theta[model.size :].any()
    for part in (model.head, model.body, model.norm, model.weights, model.everything, model.part("!head")):
        assert not part.mask[model.size :].any()
    assert len(model.everything) == model.size
    assert len(model.weights) == model.P


def test_initial_models():
    model = Model(plain_net, dtype=D)
    before = torch.random.get_rng_state()
    assert torch.equal(model.init(1), model.init(1))
    assert not torch.equal(model.init(1), model.init(2))
    assert torch.equal(before, torch.random.get_rng_state())  # the user's generator is left alone
    model.init(1).zero_()
    assert model.init(1).any()  # a caller's change does not reach the next caller


def test_parts():
    model = Model(norm_net, dtype=D)
    assert len(model.head) == 8 * 3 + 3
    assert len(model.body) == model.size - len(model.head)
    assert len(model.norm) == 4 * 8  # scale, shift and both statistics: by type, not by name
    assert torch.equal(model.part("0").mask, model.part("0.*").mask)
    assert len(model.part("*.bias")) == 8 + 8 + 3
    assert torch.equal(model.part("0,4").mask, model.part("0").mask | model.part("4").mask)
    assert torch.equal(model.part("!0, *.bias").mask, model.everything.mask & ~model.part("0,*.bias").mask)
    assert len(model.part("none")) == 0
    assert torch.equal(model.part("!none").mask, model.everything.mask)
    theta = model.init(0)
    assert torch.equal(model.head.put(model.zeros(), model.head.take(theta)), model.head.only(theta))
    with pytest.raises(Problem, match="no parameter matches 'x'"):
        model.part("x")
    with pytest.raises(Problem, match="no module 'top'"):
        Model(norm_net, head="top")
    assert len(Model(norm_net, head="0").head) == 6 * 8 + 8


def test_layer_of_every_entry():
    model = Model(norm_net, dtype=D)
    assert model.layers == ["0", "1", "4"]
    counts = [int((model.layer == place).sum()) for place in range(3)]
    assert counts == [6 * 8 + 8, 16 + 16, 8 * 3 + 3]  # statistics belong to their layer
    assert int((model.layer == -1).sum()) == model.width - model.size


def test_gradient_equals_autograd():
    model, b = Model(plain_net, dtype=D), batch()
    theta = model.init(0)
    net = model.module(theta).train()
    F.cross_entropy(net(b.x), b.y).backward()
    g, _, value = model.grad(theta, b)
    expected = torch.cat([p.grad.flatten() for p in net.parameters()])
    torch.testing.assert_close(g[: model.P], expected)
    torch.testing.assert_close(value, F.cross_entropy(net(b.x), b.y).detach())
    assert not g[model.P :].any()


@pytest.mark.parametrize("build", [plain_net, norm_net])
def test_both_gradient_routes_agree(build):
    model = Model(build, dtype=D)
    thetas = torch.stack([model.init(seed) for seed in range(3)])
    batches = [batch(seed=seed) for seed in range(3)]
    stacked = Batch(*(torch.stack(t) if t[0] is not None else None for t in zip(*batches, strict=True)))
    client = lambda theta, x, y, key: model.grad(theta, Batch(x, y, None, key))
    many = vmap(client)(thetas, stacked.x, stacked.y, stacked.key)
    for row in range(3):
        for actual, expected in zip(many, model.grad(thetas[row], batches[row]), strict=True):
            torch.testing.assert_close(actual[row], expected, rtol=1e-12, atol=1e-14)


def test_statistics_equal_torch():
    build = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, b = Model(build, dtype=D), batch()
    theta = model.init(0)
    net = model.module(theta).train()
    net(b.x)
    fresh = model.state_dict(model.grad(theta, b)[1])
    torch.testing.assert_close(fresh["1.running_mean"], net[1].running_mean)
    torch.testing.assert_close(fresh["1.running_var"], net[1].running_var)
    torch.testing.assert_close(fresh["0.weight"], net[0].weight)  # parameters come back as they were


def test_samples_of_weight_zero_do_not_exist():
    """A partial batch, filled up, gives what the batch alone gives: loss, gradient and statistics."""
    build = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model, small = Model(build, dtype=D), batch(n=4)
    filling = batch(n=3, seed=5)
    weight = torch.tensor([1.0] * 4 + [0.0] * 3, dtype=D)
    filled = Batch(torch.cat([small.x, 100 * filling.x]), torch.cat([small.y, filling.y]), weight, small.key)
    for actual, expected in zip(model.grad(model.init(0), filled), model.grad(model.init(0), small), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_single_sample_with_batch_norm_trains():
    model, b = Model(norm_net, dtype=D), batch(n=1)
    g, theta, value = model.grad(model.init(0), b)
    assert g.isfinite().all()
    assert theta.isfinite().all()
    assert value.isfinite()
    assert g.any()


def test_dropout_follows_the_key():
    model, b = Model(norm_net, dtype=D), batch()
    theta = model.init(0)
    loss = lambda key: model.loss(theta, b._replace(key=key), train=True)[0].item()
    assert loss(derive(1)) == loss(derive(1)) != loss(derive(2))
    assert model.loss(theta, b)[0] == model.loss(theta, b._replace(key=derive(2)))[0]  # eval mode: no dropout
    with pytest.raises(RuntimeError, match=r"key=batch\.key"):
        model.apply(theta, b.x, train=True)


def test_dropout_rate_and_scale():
    model = Model(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25)), dtype=D)
    theta = torch.zeros(model.width, dtype=D)
    theta[16:20] = 1.0  # biases: every unit is 1 before dropout
    out, _ = model.apply(theta, torch.zeros(5000, 4, dtype=D), train=True, key=derive(3))
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float((out == 0).double().mean()) - 0.25) < 0.02


def test_whole_channels_are_dropped():
    model = Model(conv_net, dtype=D)
    hidden = {}
    model._net[3].register_forward_hook(lambda _m, _x, y: hidden.update(out=y))
    model.apply(model.init(0), torch.randn(8, 1, 6, 6, dtype=D), train=True, key=derive(1))
    dropped = hidden["out"].flatten(2)
    zero = (dropped == 0).all(2)
    assert 0 < int(zero.sum()) < zero.numel()


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6, bias=False)
            self.two = nn.Linear(6, 6, bias=False)
            self.two.weight = self.one.weight
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.two(torch.tanh(self.one(x))))

    model, b = Model(Tied, dtype=D), batch()
    assert model.P == 36 + 21
    net = model.module(model.init(0)).train()
    F.cross_entropy(net(b.x), b.y).backward()
    torch.testing.assert_close(model.grad(model.init(0), b)[0][:36], net.one.weight.grad.flatten())


def test_network_is_left_as_it_was():
    model = Model(norm_net, dtype=D)
    before = copy.deepcopy(model._net.state_dict())
    model.grad(model.init(5), batch())
    model.loss(model.init(5), batch())
    model.features(model.init(5), batch(), train=True)
    assert all(torch.equal(t, before[name]) for name, t in model._net.state_dict().items())
    assert all(p.is_leaf for p in model._net.parameters())
    assert not model._net.get_submodule("4")._forward_pre_hooks


@pytest.mark.parametrize("fast", [False, True])
def test_outputs_are_a_function_of_features(fast):
    model = Model(norm_net, dtype=D, head="4")
    model = FastModel(model) if fast else model
    theta, b = model.init(5), batch()
    out, z, _ = model.features(theta, b)
    assert torch.equal(model.classify(theta, z), out)
    assert (model.inputs, model.representation, model.outputs) == ((6,), (8,), 3)
    net = model.module(theta)
    net[4](z).square().sum().backward()
    g, for_z = torch.func.grad(lambda theta, z: model.classify(theta, z).square().sum(), (0, 1))(theta, z)
    torch.testing.assert_close(model.head.take(g), torch.cat([p.grad.flatten() for p in net[4].parameters()]))
    assert not model.body.take(g).any()
    torch.testing.assert_close(for_z, 2 * out @ net[4].weight)
    thetas = torch.stack([theta, model.init(6)])
    many = vmap(model.classify)(thetas, torch.stack([z, 2 * z]))
    torch.testing.assert_close(many[1], model.classify(thetas[1], 2 * z))


@pytest.mark.parametrize("fast", [False, True])
def test_a_network_that_goes_on_after_its_head_has_no_outputs_from_features(fast):
    class Goes(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x) / 2

    twice = nn.Linear(6, 6)
    for build, name in ((Goes, "head"), (lambda: nn.Sequential(twice, nn.ReLU(), twice), "0")):
        model = Model(build, dtype=D)
        model = FastModel(model) if fast else model
        _, z, _ = model.features(model.init(0), batch())
        with pytest.raises(Problem, match=f"the network does not end with its head '{name}'"):
            model.classify(model.init(0), z)


def test_what_is_known_once_samples_are():
    model = Model(norm_net, dtype=D)
    with pytest.raises(Problem, match="from `init_server` on"):
        model.outputs  # noqa: B018
    assert model.taking((6,)).outputs == 3
    assert model.inputs is None


@pytest.mark.parametrize("fast", [False, True])
def test_gradients_of_samples(fast):
    model = Model(norm_net, dtype=D, class_weights=[1.0, 2.0, 3.0])
    model = FastModel(model) if fast else model
    theta, b = model.init(5), batch()
    each = model.grads(theta, b)
    for row, (x, y) in zip(each, zip(b.x, b.y, strict=True), strict=True):
        alone = model.grad(theta, Batch(x[None], y[None], None, b.key), train=False)[0]
        torch.testing.assert_close(row, alone)
    thetas = torch.stack([theta, model.init(6)])
    many = vmap(lambda theta: model.grads(theta, b))(thetas)
    torch.testing.assert_close(many[1], model.grads(thetas[1], b))


def test_averages_of_tensors():
    each, weight = torch.randn(4, 2, 3), torch.tensor([1.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(average(each, None), each.mean(0))
    torch.testing.assert_close(average(each, weight), each[:3].mean(0))


def test_what_cannot_be_a_model():
    with pytest.raises(Problem, match="a function that builds the network"):
        Model(plain_net())
    with pytest.raises(Problem, match="no parameters"):
        Model(nn.Flatten)
    with pytest.raises(Problem, match="AlphaDropout"):
        Model(lambda: nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout()))
    with pytest.raises(Problem, match="momentum"):
        Model(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))
    model = Model(plain_net)
    state = model.state_dict(model.init(0))
    with pytest.raises(Problem, match=r"lacks 0\.bias"):
        model.flat({k: v for k, v in state.items() if k != "0.bias"})
    with pytest.raises(Problem, match=r"other shapes for 0\.bias"):
        model.flat(state | {"0.bias": torch.zeros(1)})
    assert math.isfinite(float(model.init(0).sum()))


def test_a_layer_in_two_places_is_swapped_in_both():
    drop, norm = nn.Dropout(0.5), nn.BatchNorm1d(8)
    build = lambda: nn.Sequential(nn.Linear(6, 8), norm, drop, nn.Linear(8, 8), norm, drop, nn.Linear(8, 3))
    model, b = Model(lambda: copy.deepcopy(build()), dtype=D), batch()
    before = torch.random.get_rng_state()
    first, again = model.grad(model.init(0), b), model.grad(model.init(0), b)
    assert torch.equal(before, torch.random.get_rng_state())  # no draw of torch's own
    assert torch.equal(first[0], again[0])


def test_batch_norm_in_evaluation_is_the_same_by_hand(monkeypatch):
    """As it is while a step is compiled: PyTorch's own has no rule for many clients there."""
    model = Model(norm_net, dtype=D)
    theta, x = model.apply(model.init(0), batch().x, True, key=derive(1))[1], batch(seed=1).x
    expected = model.apply(theta, x)[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(F, "batch_norm", None)
    torch.testing.assert_close(model.apply(theta, x)[0], expected, rtol=1e-12, atol=1e-12)


def test_a_dropout_used_twice_drops_other_units():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(50, 50, bias=False)

        def forward(self, x):
            return torch.stack([self.drop(x), self.drop(x)]) + 0 * self.head(x).sum()

    model = Model(Twice, dtype=D)
    first, second = model.apply(model.init(0), torch.ones(3, 50, dtype=D), train=True, key=derive(1))[0]
    assert not torch.equal(first, second)
    again = model.apply(model.init(0), torch.ones(3, 50, dtype=D), train=True, key=derive(1))[0][0]
    assert torch.equal(first, again)


def test_frozen_parameters_stay():
    def build():
        net = plain_net()
        net[0].requires_grad_(False)
        return net

    model, b = Model(build, dtype=D), batch()
    g, _, _ = model.grad(model.init(0), b)
    frozen = model.part("0").mask
    assert not g[frozen].any()
    assert g[model.weights.mask].any()
    assert not (model.weights.mask & frozen).any()
    method = FedAvg(model, lr=0.1, weight_decay=0.1, momentum=0.9)
    moved, _ = method.update(model.init(0), method.start(g), g)
    assert torch.equal(moved[frozen], model.init(0)[frozen])


def test_a_buffer_that_is_not_saved_is_a_constant():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(6.0), persistent=False)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x + self.table)

    model, b = Model(Positions, dtype=D), batch()
    assert (model.Q, model.P) == (0, 21)
    net = model.module(model.init(0))
    torch.testing.assert_close(net(b.x), model.apply(model.init(0), b.x)[0])


def test_a_network_of_tokens_says_what_it_returns():
    net = lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 5))
    model = Model(net).taking((3,), tokens=True)
    assert (model.outputs, model.representation) == (5, (12,))
