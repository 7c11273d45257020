"""SMOTE: who is near whom within a class, and what is drawn from classes that are evened out."""

import pytest
import torch
from torch.func import vmap

from perfed.core.random import derive
from perfed.methods.shared.smote import Table, draw, neighbours


def table(z, y, rows=0, most=5):
    """The table of these samples, and so many rows of filling."""
    count, numbers = z.shape
    z = torch.cat([z, z.new_zeros(rows, numbers)])
    y, real = torch.cat([y, y.new_zeros(rows)]), torch.arange(count + rows) < count
    size, near, others = neighbours(torch.arange(count), z, y, real, most)
    fill = lambda found: torch.cat([found, found.new_zeros(rows, *found.shape[1:])])
    return Table(z, y, *map(fill, (size, near, others)))


def some(counts, seed=0, numbers=3):
    draw = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.randn(len(y), numbers, generator=draw, dtype=torch.float64), y[torch.randperm(len(y), generator=draw)]


def is_own(made, z):
    """Whether each sample is one of `z`."""
    return (made[:, None] == z).all(2).any(1)


def test_neighbours_are_the_nearest_others_of_the_class():
    z, y = some([9, 4, 2, 1])
    found = table(z, y, rows=3)
    for i, label in enumerate(y.tolist()):
        others = [j for j in range(len(y)) if y[j] == label and j != i]
        others.sort(key=lambda j: float((z[i] - z[j]).norm()))
        assert found.others[i] == min(5, len(others))
        assert found.near[i, : found.others[i]].tolist() == others[:5]
        assert found.size[i] == (y == label).sum()
    assert found.size[len(y) :].tolist() == [0, 0, 0]


def test_a_twin_is_a_neighbour_and_nobody_is_their_own():
    """Public code drops the first of the nearest, whoever that is: where two samples are equal, it may be the other."""
    z = torch.tensor([[1.0, 0], [1, 0], [1, 0], [5, 0]])
    found = table(z, torch.zeros(4, dtype=torch.int64), most=3)
    for i in range(4):
        assert sorted(found.near[i].tolist()) == [j for j in range(4) if j != i]
    assert found.near[:3, 2].tolist() == [3, 3, 3]  # the farthest comes last


def test_what_is_made_of_two_samples_lies_between_them():
    z = torch.tensor([[0.0, 1.0], [4.0, 3.0], *([9.0, 9.0] for _ in range(6))], dtype=torch.float64)
    made, label = draw(derive(1), 500, table(z, torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])))
    made = made[label == 0]
    along = made[:, 0] / 4
    torch.testing.assert_close(made[:, 1], 1 + 2 * along, rtol=1e-12, atol=1e-12)
    assert 0 <= float(along.min()) < 0.05
    assert 0.95 < float(along.max()) <= 1
    between = along[(along > 0) & (along < 1)]  # uniform, from either end
    assert float(between.mean()) == pytest.approx(0.5, abs=0.05)


def test_all_classes_come_alike_often_and_as_many_own_samples_as_there_are():
    """A minority of 3 beside 12: in a set evened out 3 of its 12 are its own. Of the majority all are."""
    z, y = some([12, 3, 6])
    made, label = draw(derive(2), 12_000, table(z, y, rows=4))
    share = label.bincount(minlength=3) / len(label)
    assert share.tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
    own = [float(is_own(made[label == k], z[y == k]).double().mean()) for k in range(3)]
    assert own == pytest.approx([1, 3 / 12, 6 / 12], abs=0.02)
    assert own[0] == 1


def test_every_sample_of_a_class_and_every_neighbour_is_drawn_alike_often():
    z, y = some([40, 4])
    made, label = draw(derive(3), 40_000, table(z, y))
    first = made[label == 1]
    own = first[is_own(first, z[y == 1])]
    often = (own[:, None] == z[y == 1]).all(2).double().mean(0)
    assert often.tolist() == pytest.approx([1 / 4] * 4, abs=0.03)
    around = z[y == 1].mean(0)  # each point between two is as likely as from the other end: the mean stays
    assert (first.mean(0) - around).abs().max() < 0.03


def test_a_class_with_one_sample_repeats_it_and_an_absent_one_stays_absent():
    z, y = some([7, 1, 0, 4])
    made, label = draw(derive(4), 2000, table(z, y, rows=5))
    assert label.unique().tolist() == [0, 1, 3]
    assert (made[label == 1] == z[y == 1]).all()


def test_even_classes_stay_as_they_are():
    z, y = some([5, 5, 5])
    made, label = draw(derive(5), 1000, table(z, y, rows=2))
    assert all(is_own(made[label == k], z[y == k]).all() for k in range(3))


def test_filling_is_never_drawn():
    z, y = some([2, 3])
    made, _ = draw(derive(6), 1000, table(z + 10, y, rows=20))  # filling is at 0
    assert float(made.min()) > 5


def test_a_single_sample_and_none_at_all():
    z, y = some([1])
    made, _ = draw(derive(7), 3, table(z, y))
    assert torch.equal(made, z.expand(3, 3))
    empty = table(z[:0], y[:0], rows=1)
    assert draw(derive(7), 3, empty)[0].isfinite().all()


def test_many_clients_at_once():
    tables = [table(*some([6, 2, 1], seed), rows=1) for seed in range(4)]
    keys = derive(torch.tensor(8), torch.arange(4))
    made, label = vmap(lambda key, *fields: draw(key, 7, Table(*fields)))(
        keys, *map(torch.stack, zip(*tables, strict=True))
    )
    for key, each, z, y in zip(keys, tables, made, label, strict=True):
        alone = draw(key, 7, each)
        torch.testing.assert_close((z, y), alone, rtol=1e-12, atol=1e-12)
