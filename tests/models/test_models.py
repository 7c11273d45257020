"""The networks, and the user's own."""

from __future__ import annotations

import pytest
import torch

from perfed import models
from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.task import IGNORED, Binary, Multilabel, NextToken, Regression
from perfed.models import build, make_network, networks, suits
from perfed.models.config import ModelConfig
from perfed.models.trial import refuse_other_gradients, unbatchable


def clients(shape, classes=10, dtype=torch.float32):
    split = Split(torch.zeros((2, *shape), dtype=dtype), torch.zeros(2, dtype=torch.int64), (2,))
    return Clients(("a",), split, split, split, classes)


def count(name, shape, classes=10, **settings):
    return sum(p.numel() for p in build(ModelConfig(name=name, **settings), clients(shape, classes))().parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "numbers"),
    [
        ("lenet", (3, 32, 32), 10, 62_006),
        ("lenet", (3, 32, 32), 100, 69_656),
        ("fedavgcnn", (3, 32, 32), 10, 878_538),
        ("fedavgcnn", (3, 32, 32), 100, 924_708),
        ("fedavgcnn", (1, 28, 28), 11, 582_539),
        ("mlr", (784,), 10, 7_850),
        ("mlr", (1, 28, 28), 10, 7_850),
        ("mlr", (60,), 10, 610),
    ],
)
def test_numbers_of_parameters(name, shape, classes, numbers):
    assert count(name, shape, classes) == numbers


def test_mlp_width():
    assert count("mlp", (60,), hidden=20) == 1_430


@pytest.mark.parametrize("name", networks())
def test_every_network_gives_logits_and_has_a_head(name):
    shape = (3, 32) if name in ("gru", "lstm") else (3, 32, 32)
    model = build(ModelConfig(name=name), clients(shape, 7))()
    assert model(torch.rand(4, *shape)).shape == (4, 7)
    assert [child for child, _ in model.named_children()][-1] == "head"
    assert model.get_submodule("head").out_features == 7


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_recurrent_networks_read_series_and_tokens(name):
    series = clients((3, 9), 7)
    assert unbatchable(build(ModelConfig(name=name), series), series) == ""
    network = make_network(ModelConfig(name=name), (9,), 7)()
    tokens = torch.randint(7, (4, 9))
    out = network(tokens)
    assert out.shape == (4, 9, 7)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7  # what comes later is not known earlier
    moved = (network(changed) != out).any(-1)
    assert not moved[:, :5].any()
    assert moved[:, 5:].all()
    for shape in ((9,), (3, 9, 9)):
        with pytest.raises(Problem, match=f"^model.name '{name}' (reads|needs) tokens .*or series"):
            build(ModelConfig(name=name), clients(shape))


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_stay_whole_numbers(name, dtype):
    x = torch.randint(7, (3, 5))
    split = Split(x, torch.where(x > 5, IGNORED, x), (3,))
    talk = Clients(("a",), split, split, split, task=NextToken(7))
    make = build(ModelConfig(name=name, hidden=4), talk, str(dtype).removeprefix("torch."))
    assert unbatchable(make, talk, dtype) == ""
    refuse_other_gradients(make, name, talk, dtype)


@pytest.mark.parametrize("task", [Regression(2), Multilabel(2), Binary(1)], ids=lambda task: task.kind)
def test_the_task_says_how_many_outputs(task, tmp_path):
    y = torch.tensor([[0.0, 1.0], [1.0, 1.0]])[:, : task.outputs]
    split = Split(torch.rand(2, 3), y, (2,))
    people = Clients(("a",), split, split, split, task=task)
    assert build(ModelConfig(), people)().head.out_features == task.outputs
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net(shape, outputs):\n    return nn.Linear(3, 5)\n")
    with pytest.raises(Problem, match=rf"one number for each of {task.outputs} .*: \(1, {task.outputs}\) for one"):
        build(ModelConfig(name=f"{tmp_path / 'net.py'}:net"), people)


def test_a_linear_network_is_one_layer():
    assert count("linear", (60,), 10) == 610
    assert suits((80,), "next_token") == "gru"
    assert suits((10,), "regression") == "mlp"


@pytest.mark.parametrize(("norm", "buffers"), [("batch", True), ("group", False)])
def test_resnet_normalisation(norm, buffers):
    model = build(ModelConfig(name="resnet", norm=norm), clients((1, 8, 8)))()
    assert bool(list(model.buffers())) == buffers
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("shape", "network"),
    [
        ((1, 28, 28), "FedAvgCNN"),
        ((3, 32, 32), "FedAvgCNN"),
        ((1, 8, 8), "MLP"),
        ((3, 32, 20), "MLP"),
        ((9, 128), "MLP"),
        ((60,), "MLP"),
    ],
)
def test_what_suits_the_data(shape, network):
    assert type(build(ModelConfig(), clients(shape))()).__name__ == network


def test_bytes_are_made_ready_for_the_trial():
    assert build(ModelConfig(), clients((3, 32, 32), dtype=torch.uint8))()


def test_each_call_makes_a_new_network_and_the_trial_draws_nothing():
    torch.manual_seed(0)
    make = build(ModelConfig(), clients((60,)))
    first, second = make(), make()
    torch.manual_seed(0)
    again = make()
    assert torch.equal(first.get_parameter("head.weight"), again.get_parameter("head.weight"))
    assert not torch.equal(first.get_parameter("head.weight"), second.get_parameter("head.weight"))


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("fedavgcn", (3, 32, 32), "no network 'fedavgcn'; did you mean 'fedavgcnn'"),
        ("fedavgcnn", (1, 8, 8), "'fedavgcnn' needs images of at least 16x16 pixels, not 8x8"),
        ("lenet", (1, 15, 40), "'lenet' needs images of at least 16x16 pixels, not 15x40"),
        ("resnet", (9, 128), r"'resnet' needs images \[channels, height, width\], but a sample has shape \(9, 128\)"),
    ],
)
def test_networks_that_do_not_fit(name, shape, sentence):
    with pytest.raises(Problem, match=sentence):
        build(ModelConfig(name=name), clients(shape))


def test_a_network_is_one_file(monkeypatch, tmp_path):
    (tmp_path / "two_layers.py").write_text(
        '"""Two layers: of width model.hidden."""\n\nfrom torch import nn\n\n\n'
        "def network(shape, classes, config):\n"
        "    return nn.Sequential(nn.Linear(shape[0], config.hidden), nn.Linear(config.hidden, classes))\n"
    )
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(models, "__path__", [str(tmp_path), *models.__path__])
    assert networks() == {"two-layers": "of width model.hidden"}
    assert count("two-layers", (6,), classes=4, hidden=3) == 7 * 3 + 4 * 4


OWN = """
import math
from dataclasses import dataclass
from torch import nn

@dataclass
class Setting:
    width: "int" = 3

def good(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))

def bare():
    return nn.Linear(6, 4)

def number(shape, classes):
    return 3

def narrow(shape, classes):
    return nn.Linear(6, 3)

def pair(shape, classes):
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()

def wrong(shape, classes):
    return nn.Linear(5, 4)

def broken(shape, classes):
    raise RuntimeError("no luck")
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("function", ["good", "bare"])
def test_own_network(own, function):
    model = build(ModelConfig(name=f"{own}:{function}"), clients((6,), 4))()
    assert model(torch.rand(2, 6)).shape == (2, 4)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("goood", "has no function 'goood'; did you mean 'good'"),
        ("number", "returned int, not a torch.nn.Module"),
        ("narrow", r"one number for each of 4 classes: \(1, 4\) for one sample, not \(1, 3\)"),
        ("pair", "not tuple"),
        ("wrong", r"cannot take a sample of shape \(6,\): RuntimeError"),
        ("broken", "raised RuntimeError: no luck"),
    ],
)
def test_own_network_that_does_not_fit(own, function, sentence):
    with pytest.raises(Problem, match=sentence):
        build(ModelConfig(name=f"{own}:{function}"), clients((6,), 4))


def test_own_file_that_is_not_usable(own, tmp_path):
    with pytest.raises(Problem, match=r"there is no file 'missing.py'"):
        build(ModelConfig(name="missing.py:make"), clients((6,)))
    with pytest.raises(Problem, match=r"must name a function too: path.py:factory"):
        build(ModelConfig(name=str(own)), clients((6,)))
    for text, error in (("import sys; sys.exit(3)", "SystemExit"), ("1 +", "SyntaxError")):
        own.write_text(text)
        with pytest.raises(Problem, match=error):
            build(ModelConfig(name=f"{own}:good"), clients((6,)))
    other = tmp_path / "net.txt"
    other.write_text(OWN)
    with pytest.raises(Problem, match="is not a Python file"):
        build(ModelConfig(name=f"{other}:good"), clients((6,)))
