"""The kernels for whole cohorts against PyTorch's own layers in double precision; without a GPU, interpreted."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from perfed.core.data import Plan, order_key, step_key
from perfed.core.random import GOLDEN, derive, mix, shuffle
from perfed.core.random import uniform as reference_uniform
from perfed.core.task import Losses

pytest.importorskip("triton", reason="the kernels are written in Triton, which comes for Linux")
from perfed.accel import autotune, operators
from perfed.accel.kernels import hash, rows
from perfed.accel.kernels.conv import AVG, MAX, Layer
from perfed.accel.kernels.norm import can_normalise
from perfed.engines.blocks import _order, _table, _tickets

pytestmark = pytest.mark.usefixtures("within_arguments")
CLIENTS, SAMPLES = 2, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def far(actual, expected):
    """The relative distance of two tensors of one shape."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def plain(x, w, b, layer):
    y = F.conv2d(x, w, b, layer.stride, layer.padding)
    y = F.relu(y) if layer.relu else y
    return F.max_pool2d(y, 2) if layer.pool == MAX else F.avg_pool2d(y, 2) if layer.pool == AVG else y


LAYERS = {
    "LeNet's: 5x5, ReLU, max-pool": (Layer(5, relu=True, pool=MAX), 3, 6, (7, 8), True),
    "ResNet's: 3x3, padded, no bias": (Layer(3, padding=1), 4, 8, (6, 6), False),
    "3x3, stride 2, padded, ReLU": (Layer(3, stride=2, padding=1, relu=True), 4, 4, (7, 7), True),
    "ReLU and average": (Layer(3, relu=True, pool=AVG), 4, 5, (8, 8), True),
    "average alone, no bias": (Layer(3, padding=1, pool=AVG), 2, 4, (6, 6), False),
    "max-pool alone, no bias": (Layer(3, pool=MAX), 1, 4, (8, 8), False),
    "1x1, stride 2": (Layer(1, stride=2), 4, 8, (8, 8), False),
    "even kernel": (Layer(2, relu=True), 3, 3, (5, 5), True),
    "odd pixels are left out by the pool": (Layer(3, relu=True, pool=MAX), 3, 4, (9, 7), True),
    "padded and pooled, taller than wide": (Layer(3, padding=1, relu=True, pool=MAX), 2, 4, (10, 5), True),
    "wider than tall, strided": (Layer(3, stride=2, padding=1), 5, 7, (6, 11), True),
    "flattened next, max-pool": (Layer(3, relu=True, pool=MAX, flat=True), 3, 6, (9, 7), True),
    "flattened next, average": (Layer(3, relu=True, pool=AVG, flat=True), 4, 5, (8, 8), True),
    "flattened next, ReLU": (Layer(3, padding=1, relu=True, flat=True), 3, 5, (5, 6), True),
    "more channels than a tile": (Layer(1, relu=True), 6, 70, (4, 4), True),
}


# Each of these differs from one above in what the others have, too.
LONG = {"wider than tall, strided", "padded and pooled, taller than wide", "average alone, no bias",
        "max-pool alone, no bias", "3x3, stride 2, padded, ReLU", "flattened next, average",
        "odd pixels are left out by the pool"}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in LAYERS])
def test_convolution_and_its_gradients(case):
    layer, inner, outer, size, bias = LAYERS[case]
    x = normal(CLIENTS, SAMPLES, inner, *size, seed=1)
    w = normal(CLIENTS, outer, inner, layer.kernel, layer.kernel, seed=2)
    b = normal(CLIENTS, outer, seed=3) if bias else None
    tensors = [x, w] if b is None else [x, w, b]
    exact = [t.double().requires_grad_() for t in tensors]
    expected = torch.stack([plain(*row, *([None] if b is None else []), layer) for row in zip(*exact, strict=True)])
    g = normal(*expected.shape, seed=4)
    gradients = torch.autograd.grad((expected * g.double()).sum(), exact)

    def run(x, w, b=None):
        return operators.conv(x, w, b, layer)

    assert far(vmap(run)(*tensors), expected.detach()) < 1e-5
    loss = lambda g, *t: (run(*t) * g).sum()
    actual = vmap(grad(loss, argnums=tuple(range(1, 1 + len(tensors)))))(g, *tensors)
    for name, mine, other in zip(("x", "w", "b"), actual, gradients, strict=False):
        assert far(mine, other) < 1e-5, f"the gradient of {name}"


FEW = [("odd pixels are left out by the pool", "FUSED"), ("ReLU and average", "FUSED"), ("even kernel", "FUSED"),
       ("flattened next, max-pool", "FUSED"), ("even kernel", "TURNED")]  # fmt: skip
MORE = [(case, way) for case in LAYERS for way in ("FUSED", "TURNED") if (case, way) not in FEW]


@pytest.mark.parametrize(("case", "way"), [*FEW, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)])
def test_other_ways_to_the_gradient_of_the_weights(case, way, monkeypatch):
    """From the gradient as it comes, where nobody asks for the input's, or turned."""
    monkeypatch.setitem(autotune.CANDIDATES, "weights", [autotune.CANDIDATES["weights"][0] | {way: 1}])
    layer, inner, outer, size, _ = LAYERS[case]
    x, w = normal(CLIENTS, SAMPLES, inner, *size, seed=1), normal(CLIENTS, outer, inner, *[layer.kernel] * 2, seed=2)
    b = normal(CLIENTS, outer, seed=3)
    actual = vmap(grad(lambda w, b, x: operators.conv(x, w, b, layer).square().sum(), argnums=(0, 1)))(w, b, x)
    for c in range(CLIENTS):
        exact = [t[c].double().requires_grad_() for t in (w, b)]
        expected = torch.autograd.grad(plain(x[c].double(), *exact, layer).square().sum(), exact)
        assert all(far(mine[c], other) < 1e-5 for mine, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("layer", [Layer(3), Layer(3, relu=True), Layer(3, pool=MAX), Layer(3, relu=True, pool=MAX),
                                   Layer(3, relu=True, pool=AVG)], ids=str)  # fmt: skip
def test_what_is_not_a_number_stays_so(layer):
    """A run that diverges must be noticed."""
    x, w = normal(CLIENTS, SAMPLES, 4, 8, 8), normal(CLIENTS, 4, 4, 3, 3, seed=1)
    x[0, 1, 2, 3, 3] = torch.nan
    actual = vmap(lambda x, w: operators.conv(x, w, None, layer))(x, w)
    expected = torch.stack([plain(x[c], w[c], None, layer) for c in range(CLIENTS)])
    assert expected.isnan().any()
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("pool", [MAX, pytest.param(AVG, marks=pytest.mark.slow)])
def test_what_is_not_a_number_has_a_gradient(pool):
    """As PyTorch's: ReLU stops what is at most 0, and this is not."""
    layer = Layer(3, relu=True, pool=pool)
    x, w = normal(CLIENTS, SAMPLES, 4, 8, 8), normal(CLIENTS, 4, 4, 3, 3, seed=1)
    x[0, 1, 2, 3, 3] = torch.nan
    actual = vmap(grad(lambda x, w: operators.conv(x, w, None, layer).sum()))(x, w)
    for c in range(CLIENTS):
        mine = x[c].clone().requires_grad_()
        (expected,) = torch.autograd.grad(plain(mine, w[c], None, layer).sum(), mine)
        known = expected.isfinite()
        assert torch.allclose(actual[c][known], expected[known], atol=1e-4)


@pytest.mark.parametrize("shared", ["images", "weights"])
def test_what_all_clients_share_is_not_batched(shared):
    layer = Layer(3, relu=True, pool=MAX)
    x, w = normal(CLIENTS, SAMPLES, 3, 8, 8), normal(CLIENTS, 4, 3, 3, 3, seed=1)
    dims = (None, 0) if shared == "images" else (0, None)
    x, w = (t[0] if d is None else t for t, d in zip((x, w), dims, strict=True))
    each = [[t.double().requires_grad_() if d is None else t[c].double().requires_grad_() for t, d in
             zip((x, w), dims, strict=True)] for c in range(CLIENTS)]  # fmt: skip
    outputs = [plain(*row, None, layer) for row in each]
    assert far(vmap(lambda x, w: operators.conv(x, w, None, layer), dims)(x, w), torch.stack(outputs).detach()) < 1e-5
    expected = [torch.autograd.grad(y.square().sum(), row) for y, row in zip(outputs, each, strict=True)]
    loss = lambda x, w: operators.conv(x, w, None, layer).square().sum()
    actual = vmap(grad(loss, argnums=(0, 1)), dims)(x, w)
    for place in (0, 1):
        assert far(actual[place], torch.stack([e[place] for e in expected])) < 1e-5


def test_clients_mapped_over_another_axis():
    layer = Layer(3, padding=1)
    x, w = normal(SAMPLES, CLIENTS, 3, 5, 5), normal(CLIENTS, 4, 3, 3, 3, seed=1)
    actual = vmap(lambda x, w: operators.conv(x, w, None, layer), in_dims=(1, 0))(x, w)
    expected = torch.stack([plain(x[:, c].double(), w[c].double(), None, layer) for c in range(CLIENTS)])
    assert far(actual, expected) < 1e-5


@pytest.mark.parametrize("several", ["weights", "images"])
def test_several_rows_of_each_client(several, capfd):
    """A client's own vmap, over models or images: no loop over clients, of which PyTorch would say that it is slow."""
    layer, count = Layer(3, relu=True, pool=MAX), 3
    w, x = normal(CLIENTS, count, 4, 3, 3, 3, seed=1), normal(CLIENTS, count, SAMPLES, 3, 8, 8)
    w, x, dims = (w, x[:, 0], (0, None)) if several == "weights" else (w[:, 0], x, (None, 0))
    y = torch.arange(SAMPLES, device=DEVICE).expand(CLIENTS, -1).contiguous()

    def losses(w, x, y, conv, loss):
        return vmap(lambda w, x: loss(conv(x, w, None, layer).mean((2, 3)), y), dims)(w, x)

    actual = vmap(lambda *args: losses(*args, operators.conv, operators.cross_entropy))(w, x, y)
    entropy = lambda z, y: F.cross_entropy(z, y, reduction="none")
    expected = [losses(w[c].double(), x[c].double(), y[c], plain, entropy) for c in range(CLIENTS)]
    assert far(actual, torch.stack(expected)) < 1e-5
    assert "performance drop" not in capfd.readouterr().err


def test_layers_after_each_other():
    """A layer's output, padded inside to four channels, is the next one's input, and so are the gradients."""
    inner, outer = Layer(3, relu=True, pool=MAX), Layer(3, padding=1, relu=True)
    x, w, v = normal(CLIENTS, SAMPLES, 3, 10, 10), normal(CLIENTS, 5, 3, 3, 3, seed=1), normal(CLIENTS, 6, 5, 3, 3)

    def loss(w, v, x, conv):
        return conv(conv(x, w, None, inner), v, None, outer).square().mean()

    actual = vmap(grad(lambda w, v, x: loss(w, v, x, operators.conv), argnums=(0, 1)))(w, v, x)
    exact = grad(lambda w, v, x: loss(w, v, x, plain), argnums=(0, 1))
    each = [exact(w[c].double(), v[c].double(), x[c].double()) for c in range(CLIENTS)]
    for place in (0, 1):
        assert far(actual[place], torch.stack([e[place] for e in each])) < 1e-5


@pytest.mark.parametrize(("groups", "channels", "size"), [(2, 8, (3, 5)), (4, 4, (4, 4)), (1, 16, (1, 1))])
def test_group_norm(groups, channels, size):
    x, g = normal(CLIENTS, SAMPLES, channels, *size), normal(CLIENTS, SAMPLES, channels, *size, seed=1)
    w, b = normal(CLIENTS, channels, seed=2), normal(CLIENTS, channels, seed=3)
    assert can_normalise(groups, channels, *size)

    def loss(x, w, b, g, norm):
        y = norm(x, w, b)
        return (y * g).sum(), y

    ours = lambda x, w, b: operators.group_norm(x, w, b, groups, 1e-5)
    theirs = lambda x, w, b: F.group_norm(x, groups, w, b, 1e-5)
    actual = vmap(grad(lambda *t: loss(*t, ours), argnums=(0, 1, 2), has_aux=True))(x, w, b, g)
    exact = grad(lambda *t: loss(*t, theirs), argnums=(0, 1, 2), has_aux=True)
    each = [exact(*(t[c].double() for t in (x, w, b, g))) for c in range(CLIENTS)]
    assert far(actual[1], torch.stack([e[1] for e in each])) < 1e-5
    for place in range(3):
        assert far(actual[0][place], torch.stack([e[0][place] for e in each])) < 1e-5


@pytest.mark.parametrize(("groups", "channels", "size"), [(3, 6, (2, 2)), (2, 2, (2, 2)), (2, 64, (32, 32))])
def test_group_norm_that_the_kernel_leaves_to_pytorch(groups, channels, size):
    assert not can_normalise(groups, channels, *size)


@pytest.mark.parametrize("classes", [2, 10])
def test_cross_entropy(classes):
    logits = 20 * normal(CLIENTS, 5, classes)  # exponentials that would overflow, were the largest not taken off
    y = torch.arange(5, device=DEVICE).remainder(classes).expand(CLIENTS, -1).contiguous()
    weight = normal(CLIENTS, 5, seed=1)
    each = vmap(operators.cross_entropy)(logits, y)
    exact = torch.stack([F.cross_entropy(logits[c].double(), y[c], reduction="none") for c in range(CLIENTS)])
    assert far(each, exact) < 1e-5
    actual = vmap(grad(lambda z, y, w: (operators.cross_entropy(z, y) * w).sum()))(logits, y, weight)
    theirs = grad(lambda z, y, w: (F.cross_entropy(z, y, reduction="none") * w).sum())
    expected = [theirs(logits[c].double(), y[c], weight[c].double()) for c in range(CLIENTS)]
    assert far(actual, torch.stack(expected)) < 1e-5


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "squared_error"])
def test_losses_that_are_means_over_outputs(loss, outputs):
    operator, exact = getattr(operators, loss), getattr(Losses, loss)
    z = (20 * normal(CLIENTS, 5, outputs)).index_fill(1, torch.tensor([0], device=DEVICE), 0.0)
    y = (normal(CLIENTS, 5, outputs, seed=2) > 0).float()
    weight = normal(CLIENTS, 5, seed=1)
    assert far(vmap(operator)(z, y), vmap(exact)(z.double(), y.double())) < 1e-6
    gradient = lambda loss: vmap(grad(lambda z, y, w: (loss(z, y) * w).sum()))
    expected = gradient(exact)(z.double(), y.double(), weight.double())
    assert far(gradient(operator)(z, y, weight), expected) < 1e-6
    broken = vmap(operator)(z.index_fill(0, torch.tensor([1], device=DEVICE), torch.nan), y)
    assert broken.isnan().all(1).tolist() == [client == 1 for client in range(CLIENTS)]


def test_binary_cross_entropy_of_a_sure_prediction_is_not_rounded_to_zero():
    z, y = torch.full((1, 1, 1), -40.0, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE)
    assert vmap(operators.binary_cross_entropy)(z, y).item() == pytest.approx(math.exp(-40), rel=1e-5)


@pytest.mark.parametrize("count", [1, 1500])
def test_uniform_draws_the_same_bits(count):
    key = derive(7, torch.arange(3)).to(DEVICE)
    actual = vmap(lambda k: operators.uniform(k, 5, 2, count))(key)
    expected = torch.stack([reference_uniform(derive(k, 5, 2), (count,)) for k in key])
    assert torch.equal(actual, expected)
    assert count == 1 or 0.45 < actual.mean() < 0.55


@pytest.mark.parametrize("shape", [(), (3,), (40, 60)])
def test_the_hash_is_that_of_the_plain_path(shape):
    z = torch.arange(math.prod(shape)).reshape(shape) * GOLDEN
    assert torch.equal(hash.mix(z.to(DEVICE)).cpu(), mix(z))


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1100,), (0,)])
def test_one_row_for_all(shape):
    row, place = normal(*shape), torch.zeros(3, *shape, device=DEVICE)
    rows.fill(place, row.expand(3, *shape))
    assert torch.equal(place, row.expand(3, *shape))
    rows._repeat[(2, 3)](row, place.zero_(), row.numel(), 1024)
    assert torch.equal(place, row.expand(3, *shape))


def test_step_keys_are_those_of_the_plain_loop():
    key = derive(-3, torch.arange(5)).to(DEVICE)
    for step in (0, 1, 70_000):
        assert torch.equal(hash.step_keys(key, torch.tensor([step], device=DEVICE)), step_key(key, step))


@pytest.mark.parametrize(
    ("size", "totals", "batch"),
    [
        ([50, 50, 50], [5, 5, 5], 10),
        ([23, 9, 4, 1], [6, 2, 2, 1], 10),  # the last batches are partial
        ([9, 23, 4], [7, 7, 0], 10),  # by steps, not by epochs; one does nothing
        ([3, 0], [3, 0], 8),
        ([1100], [23], 100),
        ([500, 7, 30], [12, 12, 12], 10),  # who comes to a second epoch has few
        ([500, 7, 30], [90, 12, 12], 10),
        ([500, 400], [12, 12], 10),  # nobody comes to the end of the first
    ],
)
def test_samples_of_every_step_are_those_of_the_plain_path(size, totals, batch):
    key, sizes, plan = derive(3, torch.arange(len(size))), torch.tensor(size), Plan(batch, 2, None)
    expected, order = _table(key, size, sizes, totals, plan), _order(key, size, sizes, totals, plan)
    assert (expected >= 0).any()
    for row, n in enumerate(size):  # a plain loop over epochs
        orders = [shuffle(order_key(key[row], e)[None], sizes[row : row + 1], n)[0] for e in range(len(order))]
        mine = [part for samples in orders for part in samples.split(batch)][: totals[row]]
        for step, part in enumerate(mine):
            assert expected[row, step].tolist() == part.tolist() + [-1] * (expected.shape[2] - len(part))
        assert (expected[row, totals[row] :] == -1).all()
    order, counts, total = (t.to(DEVICE) for t in (order, sizes, torch.tensor(totals)))
    assert torch.equal(rows.batches(order, counts, total, batch, *expected.shape[1:]).cpu(), expected)


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (1, 4)])
def test_tickets_are_those_of_the_plain_path(begin, end):
    key, sizes = derive(3, torch.arange(3)).to(DEVICE), torch.tensor([40, 0, 1100], device=DEVICE)
    assert torch.equal(
        hash.tickets(key, sizes, begin, end, 1100).cpu(), _tickets(key.cpu(), sizes.cpu(), begin, end, 1100)
    )


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 3), (4, 1100), (3, 0), (3,)])
def test_weighted_sum(shape):
    stacked, share = normal(*shape), normal(shape[0], 2, seed=1).abs()
    actual = rows.weighted_sum(share, stacked)
    assert actual.dtype == torch.float64
    assert actual.shape == (2, *shape[1:])
    assert torch.allclose(actual, torch.tensordot(share.double().T, stacked.double(), 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 10, 7), (1, 1, 1), (2, 70, 33), (4, 64, 10)])
def test_column_sum(shape):
    x = normal(*shape)
    assert torch.allclose(rows.column_sum(x).double(), x.double().sum(1), rtol=1e-5, atol=1e-6)
    assert torch.equal(rows.column_sum(x, keep=True), rows.column_sum(x)[:, None])
    double = normal(*shape).double()
    assert torch.allclose(rows.column_sum(double), double.sum(1), rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize(
    ("clients", "batch", "inputs", "outputs", "apart"),
    [(2, 10, 1100, 70, 0), (3, 1, 1024, 5, 8), (1, 32, 2050, 64, 3), (2, 17, 4096, 3, 0)],
)
def test_few_samples_and_wide_weights(clients, batch, inputs, outputs, apart):
    x, theta = normal(clients, batch, inputs), normal(clients, inputs * outputs + apart, seed=1)
    w = theta[:, : inputs * outputs].unflatten(1, (outputs, inputs)).mT
    actual = rows.thin_product(x, w)
    assert far(actual, torch.bmm(x.double(), w.double())) < 1e-6
    assert actual.stride() == torch.bmm(x, w).stride()


def test_weighted_sum_does_not_look_at_a_row_of_weight_zero():
    stacked, share = normal(3, 5), normal(3, 2, seed=1).abs()
    stacked[1], share[1] = torch.nan, 0.0
    actual, expected = rows.weighted_sum(share, stacked), rows.weighted_sum(share[[0, 2]], stacked[[0, 2]])
    assert torch.equal(actual, expected)


def test_weighted_sum_keeps_what_float32_would_lose():
    stacked = torch.tensor([[1e8], [1.0], [-1e8]], device=DEVICE)
    assert rows.weighted_sum(torch.ones(3, 1, device=DEVICE), stacked).item() == 1.0


def squared(conv):
    """The norm of a gradient: its own gradient needs second derivatives."""
    return lambda x, w: grad(lambda w: conv(x, w).square().sum())(w).square().sum()


@pytest.mark.parametrize("kind", ["convolution", "group norm", "cross-entropy"])
def test_second_derivatives_are_refused(kind):
    x, w, y = normal(CLIENTS, SAMPLES, 4, 4, 4), normal(CLIENTS, 4, 4, 1, 1), torch.zeros(SAMPLES, dtype=torch.int64)
    b = torch.zeros(4, device=DEVICE)
    layer = {
        "convolution": lambda x, w: operators.conv(x, w, None, Layer(1)),
        "group norm": lambda x, w: operators.group_norm(x, w[:, 0, 0, 0], b, 2, 1e-5),
        "cross-entropy": lambda x, w: operators.cross_entropy(x[:, :, 0, 0] * w[:, 0, 0, 0], y.to(DEVICE)),
    }[kind]
    with pytest.raises(RuntimeError, match="second derivatives need PyTorch's own layers"):
        vmap(grad(squared(layer), argnums=1))(x, w)


def test_a_single_client_is_refused():
    with pytest.raises(RuntimeError, match="for a single client"):
        operators.conv(normal(SAMPLES, 4, 4, 4), normal(4, 4, 1, 1), None, Layer(1))


def test_the_first_candidate_where_nothing_can_be_timed():
    shape, cpu = (2, 2, 8, 8, 4, 4), torch.device("cpu")
    assert not autotune.undecided("forward", shape, cpu)
    assert autotune.choice("forward", shape, cpu) == autotune.CANDIDATES["forward"][0]


@pytest.mark.skipif(DEVICE == "cuda", reason="interpreted kernels are checked, compiled ones are not")
def test_a_kernel_that_looks_outside_its_arguments_is_noticed():
    with pytest.raises(Exception, match="outside its arguments"):  # Triton wraps it in an error of its own
        rows._repeat[(1, 1)](normal(5), torch.zeros(1, 5), 6, 8)
