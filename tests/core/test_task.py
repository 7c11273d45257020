"""Tasks: their losses, scores and predictions against scikit-learn, and their plain form."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, r2_score, roc_auc_score

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.full_scores import of_labels, of_numbers
from perfed.core.task import IGNORED, Binary, Classification, Multilabel, NextToken, Regression, task_of

SIZES = (30, 0, 41, 1)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_labels_are_scored_as_scikit_learn_does():
    out, y = drawn(sum(SIZES), 3).round(decimals=1), (drawn(sum(SIZES), 3, seed=1) > 0.6).double()  # with equal outputs
    y[:30, 2] = 0  # a label that nobody here has
    found = of_labels(out, y, SIZES)
    one, three = slice(0, 30), slice(30, 71)
    auc = lambda rows, labels: sum(roc_auc_score(y[rows, k], out[rows, k]) for k in labels) / len(labels)
    ap = lambda rows, labels: sum(average_precision_score(y[rows, k], out[rows, k]) for k in labels) / len(labels)
    assert found["auc"][[0, 2]].tolist() == pytest.approx([auc(one, [0, 1]), auc(three, [0, 1, 2])], abs=1e-12)
    assert found["average_precision"][[0, 2]].tolist() == pytest.approx([ap(one, [0, 1]), ap(three, [0, 1, 2])])
    assert found["auc"][[1, 3]].isnan().all()
    assert found["average_precision"][1].isnan()


def test_numbers_are_scored_as_scikit_learn_does():
    out, y = drawn(sum(SIZES), 2), drawn(sum(SIZES), 2, seed=1)
    y[:30, 1] = 5.1  # a target that never changes counts nowhere
    found = of_numbers(out, y, SIZES)["r2"]
    assert found[0].item() == pytest.approx(r2_score(y[:30, 0], out[:30, 0]))
    assert found[2].item() == pytest.approx(r2_score(y[30:71], out[30:71]))
    assert found[[1, 3]].isnan().all()


def test_binary_is_a_label_alone():
    out, y = drawn(20, 1), (drawn(20, seed=1) > 0).float()
    task = Binary()
    assert torch.allclose(
        task.losses(out, y), F.binary_cross_entropy_with_logits(out[:, 0], y.double(), reduction="none")
    )
    assert torch.equal(task.rates(out, y)["accuracy"], ((out[:, 0] > 0) == (y > 0)).double())
    assert task.predicted(out).shape == (20,)
    assert task.full(out, y, [20])["auc"].item() == pytest.approx(roc_auc_score(y, out[:, 0]))
    slope = torch.func.grad(lambda z: task.losses(z, torch.ones(1)).sum())(torch.zeros(1, 1))
    assert slope.item() == -0.5  # also where the formula has a kink
    assert task.losses(torch.tensor([[1000.0], [-1000.0]]), torch.tensor([1.0, 1.0])).tolist() == [0.0, 1000.0]


def test_regression_trains_on_standardised_labels_and_scores_in_their_units():
    y = 1000 + 30 * drawn(50)
    task = Regression.measured(y)
    inside = task.standardised(y)
    assert inside.dtype == torch.float32
    assert inside.mean().item() == pytest.approx(0, abs=1e-5)
    assert inside.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    out = drawn(50, 1, seed=1)
    predicted, rates = task.predicted(out), task.rates(out, inside)
    assert predicted.mean() > 900
    assert torch.allclose(rates["absolute_error"], (predicted - y).abs(), rtol=1e-4)
    assert torch.allclose(rates["squared_error"], (predicted - y) ** 2, rtol=1e-3)
    assert task.full(out, inside, [50])["r2"].item() == pytest.approx(r2_score(y, predicted), rel=1e-5)
    assert rates["loss"].mean().item() == pytest.approx(((out[:, 0] - inside) ** 2).mean().item())


def test_several_targets_each_have_their_own_scale():
    y = drawn(40, 2) * torch.tensor([1.0, 100.0]) + torch.tensor([0.0, 7.0])
    task = Regression.measured(y)
    assert torch.allclose(task.predicted(task.standardised(y)), y.float(), atol=1e-4)
    constant = Regression.measured(torch.full((3,), 4.0))
    assert (constant.shift, constant.scale) == ((4.0,), (1.0,))
    with pytest.raises(Problem, match="2 targets needs as many numbers as scale, not 1"):
        Regression(2, (0.0, 0.0), (1.0,))


def test_positions_that_are_not_counted_change_nothing():
    out, y = drawn(3, 5, 7), torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    y[1, 2:] = IGNORED
    y[2] = IGNORED
    task = NextToken(7)
    losses = task.losses(out, y)
    assert losses[1].item() == pytest.approx(F.cross_entropy(out[1, :2], y[1, :2]).item())
    assert losses[2] == 0
    scores = task.finish({name: each.mean() for name, each in task.rates(out, y).items()})
    known = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    assert scores["loss"].item() == pytest.approx(known.item())
    assert scores["perplexity"].item() == pytest.approx(math.exp(known))
    assert scores["accuracy"].item() == pytest.approx((out.argmax(-1) == y).sum().item() / 7)
    g = torch.func.grad(lambda out: task.losses(out, y).mean())(out)
    assert g.isfinite().all()
    assert not g[2].any()


@pytest.mark.parametrize(
    "task", [Classification(3), Binary(), Multilabel(4), Regression(2, (1.0, 2.0), (0.5, 3.0)), NextToken(80)]
)
def test_a_task_is_read_back_from_plain_values(task):
    assert task_of(task.plain()) == task
    assert task.headline in task.scores


def test_directions():
    assert Classification().better("accuracy") == "higher"
    assert Classification().better("loss") == "lower"
    assert Regression().better("absolute_error") == "lower"
    assert Regression().better("r2") == "higher"
    assert NextToken().sign("perplexity") == -1


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        (Classification(2), torch.tensor([0, 1]), torch.tensor([0, 2])),
        (Binary(), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0])),
        (Regression(), torch.tensor([0.0, 1.0]), torch.tensor([0.0, torch.nan])),
        (NextToken(2), torch.tensor([[0, IGNORED]]), torch.tensor([[0, -1]])),
    ],
)
def test_labels_that_are_not_the_tasks_are_refused(task, good, bad):
    task.refuse(good, "test samples")
    with pytest.raises(Problem, match="a label of test samples is"):
        task.refuse(bad, "test samples")


def test_a_task_that_nobody_knows():
    with pytest.raises(Problem, match="no task 'regresion'; did you mean 'regression'"):
        task_of({"kind": "regresion"})


def test_clients_learn_classes_unless_they_say_otherwise():
    split = Split(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), (1,))
    assert Clients(("a",), split, split, split, 3).task == Classification(3)
    assert Clients(("a",), split, split, split, task=Binary()).task == Binary()
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    assert Clients(("a",), split, split, split, task=NextToken(9)).ready(tokens, torch.float64) is tokens
