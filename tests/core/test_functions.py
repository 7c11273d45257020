"""Functions in a form that is alike on every engine, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from perfed.core.errors import Problem
from perfed.core.functions import Alike, plain_draw
from perfed.core.random import derive

D = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def keyed(function, key, train=True):
    with Alike(key, train, plain_draw):
        return function()


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": "bool"}, {"mask": "float"}, {"enable_gqa": True}],
    ids=str,
)
def test_batched_attention(options):
    options = dict(options)
    mask = {"bool": random(5, 4) > -0.5, "float": random(5, 4)}.get(options.pop("mask", ""))
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = random(3, 2, 4, 5, 6), random(3, 2, heads, 4, 6, seed=1), random(3, 2, heads, 4, 6, seed=2)
    attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **options)
    actual = keyed(lambda: vmap(attention)(q, k, v), None)
    torch.testing.assert_close(actual, torch.stack([attention(*row) for row in zip(q, k, v, strict=True)]))


def test_dropout_of_attention_is_right_on_average():
    q, k, v = random(1, 2, 3, 4), random(1, 2, 5, 4, seed=1), random(1, 2, 5, 4, seed=2)
    dropped = vmap(lambda key: keyed(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), key))
    many = dropped(derive(torch.arange(4000), 1))
    assert (many.std(0) > 0.01).all()
    assert (many.mean(0) - F.scaled_dot_product_attention(q, k, v)).abs().max() < 0.06


@pytest.mark.parametrize("weights", [False, True], ids=["plain", "with weights"])
def test_multi_head_attention_draws_from_the_key(weights):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=D), random(3, 5, 8)
    run = lambda key: keyed(lambda: attention(x, x, x, need_weights=weights)[0], key)
    before = torch.get_rng_state()
    first, again, other = run(derive(1)), run(derive(1)), run(derive(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    batched = vmap(run)(torch.stack([derive(1), derive(2)]))
    torch.testing.assert_close(batched, torch.stack([first, other]))


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"batch_first": True}, {"proj_size": 3}],
    ids=str,
)
def test_batched_recurrent_layers(kind, options):
    if "proj_size" in options and kind != "LSTM":
        pytest.skip("only an LSTM has projections")
    torch.manual_seed(0)
    layer, x = getattr(nn, kind)(4, 5, dtype=D, **options), random(3, 6, 2, 4)
    actual = keyed(lambda: vmap(layer)(x), None)
    expected = [layer(rows) for rows in x]
    torch.testing.assert_close(actual[0], torch.stack([out for out, _ in expected]))
    last = torch.stack([state[0] if kind == "LSTM" else state for _, state in expected])
    torch.testing.assert_close(actual[1][0] if kind == "LSTM" else actual[1], last)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_batched_cells(cell):
    torch.manual_seed(0)
    layer, x = cell(4, 5, dtype=D), random(3, 2, 4)
    torch.testing.assert_close(keyed(lambda: vmap(layer)(x), None), _stacked([layer(rows) for rows in x]))


def _stacked(results):
    whole = isinstance(results[0], torch.Tensor)
    return torch.stack(results) if whole else tuple(map(torch.stack, zip(*results, strict=True)))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.dropout, (40, 50)),
        (F.dropout1d, (20, 30, 4)),
        (F.dropout2d, (20, 30, 4, 2)),
        (F.dropout3d, (20, 30, 2, 2, 2)),
        (torch.dropout, (40, 50)),
        (torch.feature_dropout, (20, 30, 4)),
    ],
    ids=["dropout", "1d", "2d", "3d", "torch", "feature"],
)
def test_dropout_as_a_function(function, shape):
    x = torch.ones(shape, dtype=D)
    first = keyed(lambda: function(x, 0.25, True), derive(1))
    assert torch.equal(first, keyed(lambda: function(x, 0.25, True), derive(1)))
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    units = first.flatten(2)[:, :, 0] if len(shape) > 2 else first
    assert abs(float((units == 0).double().mean()) - 0.25) < 0.05
    assert torch.equal(first, units.view(*shape[:2], *(1,) * (len(shape) - 2)).expand(shape))
    assert torch.equal(keyed(lambda: function(x, 0.25, False), derive(1)), x)


def test_dropout_in_place():
    x = torch.ones(30, 30, dtype=D)
    out = keyed(lambda: F.dropout(x, 0.5, inplace=True), derive(1))
    assert out.data_ptr() == x.data_ptr()
    assert set(x.unique().tolist()) == {0.0, 2.0}
    assert not keyed(lambda: F.dropout(torch.ones(3), 1.0), derive(1)).any()


def test_two_dropouts_drop_other_units():
    x = torch.ones(50, dtype=D)
    first, second = keyed(lambda: (F.dropout(x, 0.5), F.dropout(x, 0.5)), derive(1))
    assert not torch.equal(first, second)


def test_dropout_that_has_no_keyed_form():
    x = torch.ones(3, 4)
    with pytest.raises(Problem, match="drops units in evaluation, too"):
        keyed(lambda: F.dropout(x, 0.5), None, train=False)
    with pytest.raises(RuntimeError, match=r"key=batch\.key"):
        keyed(lambda: F.dropout(x, 0.5), None)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    assert len(keyed(lambda: nn.GRU(4, 5, 2)(packed)[0].data, derive(1))) == 5
    with pytest.raises(Problem, match="no keyed form for packed sequences"):
        keyed(lambda: nn.GRU(4, 5, 2, dropout=0.5)(packed), derive(1))
    with pytest.raises(Problem, match="no keyed form for packed sequences"):
        keyed(lambda: nn.LSTM(4, 5, 2, dropout=0.5)(packed), derive(1))


@pytest.mark.parametrize("dims", [2, 3])
def test_means_of_images_in_any_layout(dims):
    """PyTorch asks for strides, for which vmap would run one client after another."""
    pool, last = {2: (F.adaptive_avg_pool2d, 4), 3: (F.adaptive_avg_pool3d, 5)}[dims]
    x = random(3, 2, *(4,) * dims, 5).movedim(last, 2)  # channels last in memory
    for size in (1, (1,) * dims, 2):
        actual = keyed(lambda size=size: vmap(pool, in_dims=(0, None))(x, size), None)
        torch.testing.assert_close(actual, torch.stack([pool(rows, size) for rows in x]))
