"""Draws that are functions of a key."""

import math

import pytest
import torch
from torch.func import vmap

from perfed.core.random import TABLE, choose_by, derive, normal, pick, uniform


def test_normal_numbers_are_normal():
    z = normal(derive(3), (200_000,), torch.float64)
    moments = [float((z**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.04)
    below = [float((z < limit).double().mean()) for limit in (-2, -1, 0, 0.5, 1.5)]
    assert below == pytest.approx([0.5 * (1 + math.erf(x / 2**0.5)) for x in (-2, -1, 0, 0.5, 1.5)], abs=4e-3)
    assert abs(float((z[::2] * z[1::2]).mean())) < 0.01  # the two that are made together
    assert float((normal(derive(4), (200_000,), torch.float64) * z).mean()) == pytest.approx(0, abs=0.01)


def test_normal_numbers_are_a_function_of_key_and_place():
    key = derive(1, 2)
    assert torch.equal(normal(key, (7,))[:4], normal(key, (2, 2)).flatten())
    assert normal(key, ()) == normal(key, (5,))[0]
    assert normal(key, (0, 3)).shape == (0, 3)
    assert normal(key, (2,), torch.float64).tolist() == pytest.approx([-1.301871, 0.642826], abs=1e-6)
    assert torch.equal(normal(key, (9,), torch.float64).float(), normal(key, (9,)))


def test_normal_numbers_of_many_keys_at_once():
    keys = derive(torch.tensor(4), torch.arange(5))
    together = vmap(lambda key: normal(key, (7, 3)))(keys)
    assert torch.equal(together, torch.stack([normal(key, (7, 3)) for key in keys]))


def test_numbers_follow_from_key_and_place_however_many_are_drawn():
    """Beyond the counters that are made once, too: what is drawn first does not change."""
    key = derive(1, 2)
    many = uniform(key, (2 * TABLE + 5,), torch.float64)
    assert torch.equal(uniform(key, (9,), torch.float64), many[:9])
    assert torch.equal(uniform(key, (TABLE + 1,), torch.float64), many[: TABLE + 1])
    assert len(many.unique()) == len(many)  # no counter comes twice


def test_draws_of_several_lengths_are_compiled():
    def step(key, start):
        return start + uniform(derive(key, 1), (3,)) + uniform(derive(key, 2), (5,))[2:]

    keys, start = derive(torch.tensor(4), torch.arange(2)), torch.zeros(2, 3)
    compiled = torch.compile(vmap(step), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(keys, start), vmap(step)(keys, start))


def test_picks_follow_the_weights():
    """Places of weight 0 are never drawn, the others in proportion to their weights."""
    weight = torch.tensor([0.0, 1.0, 0.0, 5.0, 2.0, 0.0])
    share = pick(derive(5), 40_000, weight).bincount(minlength=6) / 40_000
    assert share.tolist() == pytest.approx((weight / 8).tolist(), abs=0.01)
    assert share[weight == 0].tolist() == [0, 0, 0]
    assert torch.equal(pick(derive(5), 9, weight), pick(derive(5), 20, weight)[:9])


def test_picks_among_those_that_are_true():
    drawn = pick(derive(6), 300, torch.tensor([False, True, True, False]))
    assert drawn.unique().tolist() == [1, 2]
    assert pick(derive(6), 3, torch.zeros(4)).tolist() == [0, 0, 0]  # of nothing
    assert pick(derive(6), 0, torch.ones(4)).tolist() == []


def test_picks_of_many_keys_and_weights_at_once():
    keys, weights = derive(torch.tensor(4), torch.arange(5)), torch.arange(20.0).view(5, 4) % 7
    together = vmap(lambda key, weight: pick(key, 6, weight))(keys, weights)
    assert torch.equal(together, torch.stack([pick(key, 6, weight) for key, weight in zip(keys, weights, strict=True)]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_normal_numbers_on_a_gpu():
    keys = derive(torch.tensor(4), torch.arange(50))
    draw = vmap(lambda key: normal(key, (2001,), torch.float32))
    assert torch.equal(draw(keys.cuda()).cpu(), draw(keys))
    exact = vmap(lambda key: normal(key, (2001,), torch.float64))
    torch.testing.assert_close(exact(keys.cuda()).cpu(), exact(keys), rtol=1e-14, atol=1e-14)


def test_numbers_are_chosen_by_their_odds():
    """One after another, in proportion to the odds of those that are left."""
    odds, pairs = torch.tensor([5.0, 3, 0, 2]), 4000
    first = [choose_by(derive(1, number), 1, odds)[0] for number in range(pairs)]
    assert [first.count(each) / pairs for each in range(4)] == pytest.approx([0.5, 0.3, 0, 0.2], abs=0.02)
    two = [choose_by(derive(2, number), 2, odds) for number in range(pairs)]
    both = 0.5 * 3 / 5 + 0.3 * 5 / 7  # 0 then 1, or 1 then 0
    assert two.count([0, 1]) / pairs == pytest.approx(both, abs=0.02)
    assert {tuple(each) for each in two} == {(0, 1), (0, 3), (1, 3)}


def test_no_more_numbers_are_chosen_than_have_odds():
    assert choose_by(derive(1), 3, torch.tensor([0.0, 1e-30, 0, 1e30])) == [1, 3]
    assert choose_by(derive(1), 3, torch.zeros(4)) == []
    assert choose_by(derive(1), 0, torch.ones(4)) == []
