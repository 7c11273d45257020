"""A traced step with its arithmetic joined into kernels computes what the step computes."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

pytest.importorskip("triton", reason="the kernels are written in Triton, which comes for Linux")
from perfed.accel import schedule
from perfed.accel.codegen import WORDS, Cluster
from perfed.accel.kernels.rows import column_sum, thin_product
from perfed.accel.schedule import Program
from perfed.accel.trace import Kind, Rows, record

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)

pytestmark = pytest.mark.usefixtures("within_arguments")


def normal(*shape, seed=0, kind=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, kind)


def clusters(program):
    return [item for item in program.items if isinstance(item, Cluster)]


def same(actual, expected):
    """Equal in kind and shape, and in numbers up to rounding."""
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        if mine.is_floating_point():
            close = TOLERANCE[mine.dtype]
            assert torch.allclose(mine, other, rtol=close, atol=close, equal_nan=True)
        else:
            assert torch.equal(mine, other)


def check(function, *args):
    """Trace, run and compare; arguments stay as they were. Returns the program."""
    program, before = Program(record(function, *args)), [a.clone() for a in args]
    actual = program(*args)
    assert all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(args, before, strict=True))
    same(actual, function(*args))
    return program


def check_into(function, *args):
    """The same with the first results written over the arguments."""
    program, expected = Program(record(function, *args)), [t.clone() for t in function(*args)]
    place = [a.clone() for a in args]
    actual = program(*place, into=place[: len(expected)])
    assert all(f is p for f, p in zip(actual, place, strict=False))
    same(actual, expected)
    return program


# ---------------------------------------------------------------------------------------------------- arithmetic


@each_kind
def test_a_proximal_step_is_one_kernel(kind):
    theta, g, w = (normal(3, 40, seed=s, kind=kind) for s in range(3))
    program = check(lambda theta, g, w: (theta - 0.1 * (g + 0.5 * (theta - w)),), theta, g, w)
    assert len(program.items) == len(clusters(program)) == 1


def arguments(operation, kind):
    """Some arguments for an operation, read off its declaration."""
    values = []
    for place, argument in enumerate(a for a in operation._schema.arguments if not a.kwarg_only):
        if str(argument.type) != "Tensor":
            if argument.default_value is None and not argument.has_default_value():
                values.append(0.3)
        elif argument.name == "condition":
            values.append(normal(2, 9, seed=place) > 0)
        else:
            values.append(normal(2, 9, seed=place, kind=kind))
            # What is not a plain number must stay visible.
            values[-1][0, place : place + 5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 0.3])
    return values


@each_kind
@pytest.mark.parametrize("operation", list(WORDS), ids=str)
def test_every_operation(operation, kind):
    given = arguments(operation, kind)
    tensors = [a for a in given if isinstance(a, torch.Tensor)]

    def function(*tensors):
        left = iter(tensors)
        return (operation(*(next(left) if isinstance(a, torch.Tensor) else a for a in given)),)

    program = check(function, *tensors)
    if any(node.target is operation for node in record(function, *tensors).nodes):  # else recorded as another one
        assert clusters(program), "not a kernel"
    if "alpha" in {a.name for a in operation._schema.arguments if a.kwarg_only}:
        check(lambda a, b: (operation(a, b, alpha=-1.7),), *tensors)


@each_kind
def test_constants_inside(kind):
    """Filled tensors and tensors of one number are numbers in a kernel."""
    half = torch.tensor(0.5, dtype=kind, device=DEVICE)
    function = lambda x: (torch.where(x > 0, x * half, torch.zeros_like(x)) + torch.ones_like(x) - torch.tensor(3.0),)
    check(function, normal(4, 5, kind=kind))


def test_comparisons_with_constants_are_in_double_precision():
    """0.3000000001 is not below 0.3, but both are the same number in single precision."""
    x = torch.tensor([[0.3000000001, 0.3, 0.2999999999]], dtype=torch.float64, device=DEVICE)
    function = lambda x: (x >= 0.3, x > 0.3, x <= 0.3, x < 0.3, torch.where(x > 0.3, x, -x), F.threshold(x, 0.3, 0.0))
    check(function, x)
    program = Program(record(function, x))
    assert program(x)[0].tolist() == [[True, True, False]]
    assert program(x)[1].tolist() == [[True, False, False]]


def test_constants_in_double_precision():
    x = normal(2, 7)
    check(lambda x: (x * 0.1 + 1 / 3, torch.add(x, x, alpha=0.1), torch.clamp_min(x, 0.1), 0.7 - x), x)


@each_kind
def test_bool_results(kind):
    x, y = normal(3, 5, kind=kind), normal(3, 5, seed=1, kind=kind)

    def function(x, y):
        larger = x * 2 > y
        return torch.where(larger, x, y) + 1, larger

    program = check(function, x, y)
    assert program(x, y)[1].dtype == torch.bool


def test_bool_arguments():
    mask, x = normal(3, 5) > 0, normal(3, 5, seed=1)
    check(lambda mask, x: (torch.where(mask, x, 0.0) * 2,), mask, x)
    check(lambda mask, x: (torch.where(mask, x, 0.0) * 2,), mask[0], x)


def test_mixed_kinds_are_left_alone():
    check(lambda x, y: (x + y, x.double() * 2 + y), normal(2, 5, kind=torch.float32), normal(2, 5, seed=1))
    check(lambda x, n: (x * n + 1,), normal(2, 5), torch.arange(5, device=DEVICE))


@each_kind
def test_broadcast_arguments(kind):
    x, row, column, number = (normal(*s, kind=kind) for s in ((4, 3, 5), (5,), (4, 1, 1), ()))
    program = check(lambda x, row, column, number: ((x - row) * column + x * number,), x, row, column, number)
    assert len(clusters(program)) == 1


def test_expanded_results():
    x, row = normal(4, 5), normal(5, seed=1)
    check(lambda x, row: (x + row, (row * 2).expand(4, 5)), x, row)


@each_kind
def test_other_layouts(kind):
    x, y = normal(6, 4, kind=kind), normal(4, 6, seed=1, kind=kind)
    check(lambda x, y: (x.T + y * 2, (x + y.T).T * x.T, (x.T * 2 + 1).reshape(-1), x[:, ::2] * 2 + y.T[:, 1::2]), x, y)
    check(lambda x, y: (x * 2 + 1, x + y.T), x.T, y.T)
    images = normal(2, 3, 4, 5, kind=kind).contiguous(memory_format=torch.channels_last)
    check(lambda images: ((images * 2 + 1).flatten(1), images.permute(0, 2, 3, 1) * 2 - 1), images)


def test_sizes_of_one_and_none():
    check(lambda x: (x * 2 + 1,), normal(1, 1, 1))
    check(lambda x: (x * 2 + 1, (x + 1).sum(1)), normal(3, 0))


# ---------------------------------------------------------------------------------------------------- sums and pieces

LONG = schedule._LARGE + 904  # not a multiple of a block


@each_kind
@pytest.mark.parametrize("wanted", [None, torch.float64], ids=str)
def test_row_sums_go_along(kind, wanted):
    x, y = normal(3, LONG, kind=kind), normal(3, LONG, seed=1, kind=kind)
    program = check(lambda x, y: ((x * y).sum(1, dtype=wanted), ((x - y) * x).sum(-1, keepdim=True), x + y), x, y)
    assert sum(len(c.sums) for c in clusters(program)) == 2


@each_kind
@pytest.mark.parametrize(("dim", "keep"), [(1, False), (-2, True)])
def test_a_bias_is_summed_by_a_kernel(kind, dim, keep):
    program = check(lambda x: (x.sum(dim, keepdim=keep), x.sum(2)), normal(3, 10, 6, kind=kind))
    assert [item.target is column_sum for item in program.items] == [True, False]


def test_sums_that_lie_otherwise_are_left_alone():
    others = lambda x: (x.mT.sum(1), x.sum(1, dtype=torch.float32), x[:, :0].sum(1), x.sum(dim=None, keepdim=True))
    program = check(others, normal(3, 10, 6))
    assert not any(getattr(item, "target", None) is column_sum for item in program.items)


def test_row_sums_in_float64_keep_what_float32_would_lose():
    x = torch.zeros(2, LONG, device=DEVICE)
    x[:, 0], x[:, 1], x[:, 2] = 1e8, 1.0, -1e8
    program = Program(record(lambda x: ((x * 1.0).sum(1, dtype=torch.float64),), x))
    assert clusters(program)[0].sums
    assert program(x)[0].tolist() == [1.0, 1.0]


def test_a_normalised_row():
    """A sum that is used by the arithmetic it came from cannot be in one kernel with it."""
    check(lambda x: (x * 2 / (x * 2).square().sum(1, keepdim=True).sqrt(),), normal(3, LONG))


PIECES = [(4, 600), (4, 3), (4, 5), (4, 392)]


@each_kind
def test_a_gradient_is_read_from_its_pieces(kind):
    theta = normal(4, 1000, kind=kind)
    pieces = [normal(*shape, seed=1 + place, kind=kind) for place, shape in enumerate(PIECES)]
    program = check(lambda theta, *pieces: (theta - 0.1 * torch.cat(pieces, 1),), theta, *pieces)
    assert [c.joined is not None for c in clusters(program)] == [True]
    assert len(program.items) == 1
    turned = [p.T.contiguous().T for p in pieces]  # rows whose numbers do not lie side by side
    same(program(theta, *turned), program(theta, *pieces))
    check_into(lambda theta, *pieces: (theta - 0.1 * torch.cat(pieces, 1),), theta, *pieces)


def test_what_a_mask_shuts_out_is_not_computed():
    x, w, head = normal(4, 5, 6), normal(4, 30), torch.arange(36, device=DEVICE) >= 30
    parts = lambda x, w: (torch.bmm(x.mT, x[:, :, :5]).flatten(1).sin(), w[:, :6].cos())

    def masked(x, w):
        left, right = torch.cat(parts(x, w), 1), torch.cat(parts(x, w), -1)
        return torch.where(head, left, 0.0) + 1, torch.where(head, right, x[0, 0, 0])

    program = check(masked, x, w)
    assert not any(getattr(item, "target", None) is torch.ops.aten.bmm.default for item in program.items)
    read_elsewhere = lambda x, w: (torch.where(head, g := torch.cat(parts(x, w), 1), 0.0), g)
    half = torch.arange(36, device=DEVICE) >= 29  # lets one number of the product through
    twice = lambda x, w: (torch.where(head, g := torch.cat(parts(x, w), 1), g),)
    for function in (read_elsewhere, twice, lambda x, w: (torch.where(half, torch.cat(parts(x, w), 1), 0.0),)):
        program = check(function, x, w)
        assert any(getattr(item, "target", None) is torch.ops.aten.bmm.default for item in program.items)
    first, second = ((n, record(masked, x[:n], w[:n])) for n in (4, 3))
    same(Program(Rows(first, second)(2))(x[:2], w[:2]), masked(x[:2], w[:2]))  # pyright: ignore[reportArgumentType]


def test_pieces_that_somebody_else_needs():
    theta, pieces = normal(4, 1000), [normal(*shape, seed=1 + place) for place, shape in enumerate(PIECES)]

    def function(theta, *pieces):
        g = torch.cat(pieces, 1)
        return theta - 0.1 * g, g, g.cumsum(1)

    program = check(function, theta, *pieces)
    assert all(c.joined is None for c in clusters(program))
    check(lambda theta, *pieces: (theta.T - 0.1 * torch.cat([p.T for p in pieces], 0),), theta, *pieces)
    check(lambda theta, *pieces: (theta - torch.cat(pieces, 1) * torch.cat(pieces[::-1], 1),), theta, *pieces)


def test_pieces_and_sums_in_one_kernel():
    theta = normal(2, 5000)
    pieces = [normal(2, n, seed=n) for n in (3000, 100, 1900)]

    def function(theta, *pieces):
        g = torch.cat(pieces, 1) + 0.1 * theta
        return theta - 0.5 * g, (g * g).sum(1)

    program = check(function, theta, *pieces)
    assert [(c.joined is not None, len(c.sums)) for c in clusters(program)] == [(True, 1)]


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_a_product_is_worked_out_where_it_is_needed(turned):
    """Momentum, and a sum over all of it: the wide layer's gradient is never written."""
    single = functools.partial(normal, kind=torch.float32)
    theta, momentum, small = single(3, 5000), single(3, 5000, seed=1), single(3, 104, seed=2)
    x, g = single(3, 20, 72, seed=3), single(3, 68, 20, seed=4)
    g = g.mT.contiguous().mT if turned else g

    def function(theta, momentum, small, x, g):
        momentum = 0.9 * momentum + torch.cat([torch.bmm(g, x).flatten(1), small], 1)
        return theta - 0.1 * momentum, momentum, (momentum * momentum).sum(1)

    args = (theta, momentum, small, x, g)
    program = check(function, *args)
    (cluster,) = clusters(program)
    assert len(cluster.products) == 1
    assert not any(getattr(item, "target", None) is torch.ops.aten.bmm.default for item in program.items)
    two = lambda *t: function(*t)[:2]
    check_into(two, *args)


@pytest.mark.parametrize("written", [0, 1, 2], ids=["nothing", "one result", "both results"])
def test_products_ahead_of_the_rest(written):
    """The wide layer moves as soon as nobody reads it any more, before the layer below it has its gradient."""
    single = functools.partial(normal, kind=torch.float32)
    theta, momentum, y = single(3, 5000), single(3, 5000, seed=1), single(3, 72, 104, seed=2) / 100
    x, g = single(3, 20, 72, seed=3), single(3, 68, 20, seed=4)

    def function(theta, momentum, x, g, y):
        below = torch.bmm(g.mT, theta[:, :4896].unflatten(1, (68, 72))).sum(1, keepdim=True)
        small = torch.bmm(below.relu() * 2, y).flatten(1)
        momentum = 0.9 * momentum + torch.cat([torch.bmm(g, x).flatten(1), small], 1)
        return theta - 0.1 * momentum, momentum

    args = (theta, momentum, x, g, y)
    program, expected = Program(record(function, *args)), function(*args)
    (before,) = program.ahead
    names = [getattr(item, "name", "") for item in program.items]
    assert names.index("bmm") < before <= names.index("bmm_1")  # after the last look at theta, not after the last
    place = [t.clone() for t in (theta, momentum)]
    same(program(*place, *args[2:], into=place[:written]), expected)


def test_products_of_another_shape_are_left_alone():
    """Several products in a row of numbers, and a part of one."""
    single = functools.partial(normal, kind=torch.float32)
    x, g = single(6, 5, 20, seed=3), single(6, 15, 5, seed=4)
    several = lambda theta, x, g: (theta - torch.cat([torch.bmm(g, x).reshape(3, 600), theta[:, :1]], 1),)
    part = lambda theta, x, g: (theta - torch.cat([torch.bmm(g, x)[:, :10].reshape(1, 200), theta[:, :1]], 1),)
    for function, args in ((several, (single(3, 601), x, g)), (part, (single(1, 201), x[:1], g[:1]))):
        assert not any(c.products for c in clusters(check(function, *args)))


def test_a_product_and_nothing_else():
    single = functools.partial(normal, kind=torch.float32)
    move = lambda x, g: (-0.1 * torch.cat([torch.bmm(g, x).flatten(1)], 1),)
    program = check(move, single(3, 5, 20), single(3, 15, 5, seed=4))
    assert [len(c.products) for c in clusters(program)] in ([1], [])


def test_results_that_lie_otherwise_than_their_argument():
    turn = lambda a, b: ((a.mT.contiguous().mT * 2).mul(3), b)
    check_into(turn, normal(4, 6), normal(4, 6, seed=1))


def test_products_that_are_left_to_the_library():
    single = functools.partial(normal, kind=torch.float32)
    theta, x, g = single(2, 300), single(2, 200, 20, seed=3), single(2, 15, 200, seed=4)
    long = check(lambda theta, x, g: (theta - 0.1 * torch.cat([torch.bmm(g, x).flatten(1)], 1),), theta, x, g)
    double = [t.double() for t in (theta, x[:, :9], g[:, :, :9])]
    other = check(lambda theta, x, g: (theta - 0.1 * torch.cat([torch.bmm(g, x).flatten(1)], 1),), *double)
    needed = lambda theta, x, g: ((d := torch.bmm(g, x)).sum(2), theta - torch.cat([d.flatten(1)], 1))
    twice = check(needed, theta, x[:, :9], g[:, :, :9])
    assert not any(c.products for program in (long, other, twice) for c in clusters(program))


def test_a_gradient_does_not_wait_for_its_loss():
    """Ones like the loss need its shape only: then nobody needs the loss."""
    loss = lambda theta, x: (theta * x).cosh().sum()
    program = check(vmap(lambda theta, x: (theta - 0.1 * grad(loss)(theta, x),)), normal(3, 8), normal(3, 8, seed=1))
    names = [str(getattr(item, "target", "")) for item in program.items]
    assert not any("cosh" in name or "like" in name for name in names)


# ---------------------------------------------------------------------------------------------------- in place


def test_a_result_may_overwrite_its_argument():
    theta, momentum, g = (normal(3, 8, seed=s) for s in range(3))

    def function(theta, momentum, g):
        momentum = 0.9 * momentum + g
        return theta - 0.1 * momentum, momentum

    program = check_into(function, theta, momentum, g)
    assert len(program.safe) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (b, a),
        lambda a, b: (b * 2, a * 2),
        lambda a, b: (b * 2, a),
        lambda a, b: (a * 2, a),
        lambda a, b: (b, b),
        lambda a, b: (a + 1, a + b),
        lambda a, b: (a + b, a + 1),
        lambda a, b: (a + 1, (a.cumsum(1) + b)),
        lambda a, b: (a.T * 2, b.T + a),
        lambda a, b: (a.flip(0) + a, b + 1),
        lambda a, b: (b.T, a.T),
        lambda a, b: (a + a.T, a.T),
        lambda a, b: (a.view(-1).view(4, 4) * 2 + a.T, b[0] + b),
        lambda a, b: (torch.stack([b[0], a[1], b[2], a[3]]), a * b),
        lambda a, b: ((a + 1) * 2, (a + 1).cumsum(0)),
        lambda a, b: (torch.zeros_like(a), a + b),
    ],
    ids=lambda f: str(f.__code__.co_firstlineno),
)
def test_swapped_and_shared_results(function):
    check_into(function, normal(4, 4), normal(4, 4, seed=1))


def test_results_beyond_the_arguments():
    x = normal(3, 5)
    place = x.clone()
    program = Program(record(lambda x: (x + 1, x * 2), x))
    actual = program(place, into=[place])
    assert actual[0] is place
    same(actual, [x + 1, x * 2])


def test_layers_that_write_in_place():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True)).to(DEVICE)
    parts = {name: p.detach().expand(3, *p.shape).contiguous() for name, p in net.named_parameters()}

    def step(x, *tensors):
        loss = lambda t: functional_call(net, dict(zip(parts, t, strict=True)), (x,)).square().mean()
        gradient = grad(loss)(tensors)
        return tuple(t.sub(0.1 * g) for t, g in zip(tensors, gradient, strict=True))

    check(vmap(step), normal(3, 5, 6, kind=torch.float32), *parts.values())


def test_code_that_writes_in_place():
    def function(x, y):
        total = x * 2
        row = total[0]
        total += y
        row.mul_(3)  # a view of what was just written
        return total + 1, row

    check(function, normal(3, 5), normal(3, 5, seed=1))


# ---------------------------------------------------------------------------------------------------- order


def test_no_cycles():
    """What lies between two operations keeps them apart, directly or around two corners."""

    def function(x, y):
        a = x * 2
        b = a.sum(1) + 1  # small arithmetic between two pieces of large arithmetic
        c = a * b[:, None] + y
        d = (c.amax(1) - b) * 2
        return c / d[:, None] - a, b * d

    program = check(function, normal(3, 9), normal(3, 9, seed=1))
    made = [n for item in program.items for n in (item.nodes if isinstance(item, Cluster) else [item])]
    assert len(made) == len(set(made))


BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b * 0.5)]
UNARY = [
    lambda a: a * 0.3,
    lambda a: 1 - a,
    torch.relu,
    lambda a: a.T,
    lambda a: a.flip(0),
    lambda a: a[0].expand(4, 4),
    lambda a: a.sum(1, keepdim=True) * 0.1 + a,
    lambda a: torch.cat([a[:, 2:], a[:, :2]], 1),
    lambda a: a.clone(),
    lambda a: a.cumsum(1) * 0.2,
    lambda a: a.contiguous().view(16).view(4, 4),
    lambda a: a.detach(),
    lambda a: (a > 0).to(a.dtype),
    lambda a: torch.where(a > 0.2, torch.ones_like(a), a),
]
moves = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(moves, st.lists(st.integers(0, 99), min_size=3, max_size=4), st.booleans())
def test_any_program(moves, ends, write):
    """Random steps on three arguments, whose results are then written over them."""

    def function(*args):
        values = list(args)
        for which, left, right in moves:
            a, b = values[left % len(values)], values[right % len(values)]
            which %= len(BINARY) + len(UNARY)
            values.append(BINARY[which](a, b) if which < len(BINARY) else UNARY[which - len(BINARY)](a))
        return tuple(values[-1 - end % len(values)] for end in ends[: 3 if write else None])

    args = [normal(4, 4, seed=s) for s in range(3)]
    (check_into if write else check)(function, *args)


def test_pieces_beside_a_transposed_result():
    """A kernel that reads pieces writes row by row, so what lies column by column is not its result."""
    both = lambda x: torch.cat([x[:, 2:], x[:, :2]], 1)
    check(lambda x, y: (y.T * 0.3 + both(x), y.T * 0.3), normal(4, 4), normal(4, 4, seed=1))
    check(lambda x, y: ((z := y.T + 1) + both(x) * z,), normal(4, 4), normal(4, 4, seed=1))


# ---------------------------------------------------------------------------------------------------- numbers of rows


def two_layers(theta, x, y, centre):
    """A proximal step of a network with one hidden layer, for one client."""

    def loss(theta):
        w, v = theta[:24].view(4, 6), theta[24:36].view(3, 4)
        return F.cross_entropy((x @ w.T).relu() @ v.T, y)

    return (theta - 0.1 * (grad(loss)(theta) + 0.5 * (theta - centre)),)


def inputs(rows, kind=torch.float64):
    y = torch.arange(rows * 5, device=DEVICE).remainder(3).view(rows, 5)
    return normal(rows, 36, kind=kind), normal(rows, 5, 6, seed=1, kind=kind), y, normal(36, seed=2, kind=kind)


step = vmap(two_layers, in_dims=(0, 0, 0, None))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("known", [(4, 3), (7, 3)], ids=str)
def test_a_step_for_any_number_of_rows(known, rows):
    first, second = ((n, record(step, *inputs(n))) for n in known)
    graph = Rows(first, second)(rows)
    direct = record(step, *inputs(rows))
    assert [n.target for n in graph.nodes] == [n.target for n in direct.nodes]
    sizes = lambda graph: [n.meta["val"].shape for n in graph.nodes if isinstance(n.meta.get("val"), Kind)]
    assert sizes(graph) == sizes(direct)
    same(Program(graph)(*inputs(rows)), step(*inputs(rows)))


def test_recordings_that_differ_are_refused():
    other = vmap(lambda *args: (two_layers(*args)[0] * 2,), in_dims=(0, 0, 0, None))
    rate = vmap(lambda *args: (two_layers(*args)[0] - 0.2 * args[0],), in_dims=(0, 0, 0, None))
    again = vmap(lambda *args: (two_layers(*args)[0] - 0.3 * args[0],), in_dims=(0, 0, 0, None))
    for first, second in ((step, other), (rate, again)):
        rows = Rows((4, record(first, *inputs(4))), (3, record(second, *inputs(3))))
        assert not rows.alike
        assert rows(2) is None
    assert Rows((4, record(step, *inputs(4))), (3, record(step, *inputs(3)))).alike


def test_sizes_that_are_no_multiple_of_rows_are_refused():
    half = lambda x: (x[: len(x) // 2] * 2,)
    rows = Rows((5, record(half, normal(5, 3))), (2, record(half, normal(2, 3))))
    assert rows.alike
    assert rows(4) is None


@pytest.mark.parametrize(("batch", "inputs", "taken"), [(3, 2048, True), (40, 2048, False), (3, 512, False)])
def test_a_wide_layer_with_few_samples(batch, inputs, taken, monkeypatch):
    monkeypatch.setattr(schedule, "_WIDE", 1 << 12)
    single = functools.partial(normal, kind=torch.float32)
    layer = lambda x, w: (torch.bmm(x, w.unflatten(1, (4, inputs)).mT).relu() + 1,)
    program = check(layer, single(2, batch, inputs) / 50, single(2, 4 * inputs, seed=1))
    assert taken == any(getattr(item, "target", None) is thin_product for item in program.items)


# ---------------------------------------------------------------------------------------------------- recording


def test_operations_with_several_results_and_constants():
    network = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3)).to(DEVICE, torch.float64)
    names = [name for name, _ in network.named_parameters()]
    fixed = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)

    def loss(parameters, x, y):
        out = functional_call(network, dict(zip(names, parameters, strict=True)), (x,))
        return F.cross_entropy(out * fixed, y)

    def step(x, y, *parameters):
        return tuple(p - 0.1 * g for p, g in zip(parameters, grad(loss)(parameters, x, y), strict=True))

    each = [p.detach().expand(4, *p.shape).contiguous() for p in network.parameters()]
    check(vmap(step), normal(4, 6, 5), torch.arange(24, device=DEVICE).view(4, 6) % 3, *each)
    last = lambda x, w: (
        torch.ops.aten.native_layer_norm_backward(x, x, [5], x[:, :1], x[:, :1], w, None, [True, True, False])[0],
    )
    check(last, normal(4, 5), normal(5))


def test_a_tensor_given_twice_is_two_arguments():
    x = normal(3, 4)
    program = Program(record(lambda a, b: (a + 2 * b,), x, x))
    same(program(x, 3 * x), [7 * x])


def test_what_looks_at_numbers_is_refused():
    with pytest.raises(RuntimeError, match="a step that is recorded cannot look at the numbers of a tensor"):
        record(lambda x: (x * x.sum().item(),), normal(2, 3))


def test_numbers_of_a_constant_are_known():
    check(lambda a: (a[:, : int(torch.tensor(3))] + a[:, torch.tensor(1), None],), normal(2, 5))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_operations_that_write_in_place_below_vmap():
    """Those without a rule for vmap run as they are, and some write over what they have made."""
    larger = vmap(lambda theta, g: (theta - 0.1 * g * (g.abs() > g.abs().quantile(0.5)),))
    check(larger, normal(3, 8), normal(3, 8, seed=1))
    check_into(larger, normal(3, 8), normal(3, 8, seed=1))


@pytest.mark.parametrize("what", ["an argument", "what it did not make"])
def test_a_step_that_writes_over_what_is_not_its_own_is_refused(what):
    kept = normal(2, 3)
    step = (lambda x: (x.mul_(2),)) if what == "an argument" else (lambda x: (kept.mul_(2) + x,))
    with pytest.raises(RuntimeError, match="a step that is recorded cannot write over a tensor"):
        record(step, normal(2, 3))


def test_pieces_that_do_not_say_that_they_are_views():
    check_into(lambda a, b: (torch.cat(torch.unsafe_chunk(a, 2, 1)[::-1], 1) + b, b + 1), normal(3, 8), normal(3, 8))


def test_an_operation_without_a_result():
    check(lambda a: (torch._assert_async((a.abs() < 100).all()) or a * 2,), normal(2, 3))
