"""Draws that are functions of a key."""

import math

import pytest
import torch
from torch.func import vmap

from perfed.core.random import derive, normal


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_normal_numbers_on_a_gpu():
    keys = derive(torch.tensor(4), torch.arange(50))
    draw = vmap(lambda key: normal(key, (2001,), torch.float32))
    assert torch.equal(draw(keys.cuda()).cpu(), draw(keys))
    exact = vmap(lambda key: normal(key, (2001,), torch.float64))
    torch.testing.assert_close(exact(keys.cuda()).cpu(), exact(keys), rtol=1e-14, atol=1e-14)
