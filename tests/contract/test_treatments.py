"""The contract of treatments of uploads: the ones there are pass, and each planted mistake gets a sentence."""

import dataclasses
import json
import re

import pytest
import torch

from perfed.cli import methods as methods_cli
from perfed.contract import checks, toy, treatments
from perfed.core.errors import ClientError, Problem
from perfed.core.messages import Up
from perfed.core.random import uniform
from perfed.core.tree import tree_map
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.training.catalog import methods
from perfed.wire.base import Transform
from perfed.wire.identity import Identity


class Int8(Transform):
    """Send changes in eight bits, with a scale; the weight tells which kind of numbers they were."""

    def client(self, up, key):
        def short(tensor):
            scale = tensor.abs().amax().clamp_min(1e-12) / 127
            noise = uniform(key, tensor.shape, tensor.dtype)
            return {"scale": scale, "q": (tensor / scale + noise).floor().clamp(-127, 127).to(torch.int8)}

        return dataclasses.replace(up, mean=tree_map(short, up.mean))

    def server(self, uploads):
        is_short = lambda node: isinstance(node, dict) and set(node) == {"scale", "q"}
        wide = lambda node: node["q"].to(node["scale"].dtype) * by_row(node["scale"], node["q"])
        return dataclasses.replace(uploads, mean=walk(uploads.mean, is_short, wide))


def by_row(numbers, like):
    return numbers.view(-1, *(1,) * (like.dim() - 1))


def walk(tree, at, change):
    if at(tree):
        return change(tree)
    if isinstance(tree, dict):
        return {key: walk(value, at, change) for key, value in tree.items()}
    return type(tree)(walk(value, at, change) for value in tree) if isinstance(tree, tuple | list) else tree


class OneTensor(Identity):
    """Take every mean for one tensor."""

    def client(self, up, key):
        return dataclasses.replace(up, mean=up.mean.half())


class Short(Transform):
    """Forget to make the numbers wide again."""

    def client(self, up, key):
        return dataclasses.replace(up, mean=tree_map(lambda t: t.half(), up.mean))


class Wide(Short):
    """Make all numbers float32 again, whatever they were."""

    def server(self, uploads):
        return dataclasses.replace(uploads, mean=tree_map(lambda t: t.float(), uploads.mean))


class Rounded(Transform):
    """Cut whole numbers of `own` short."""

    def client(self, up, key):
        return dataclasses.replace(up, own=tree_map(lambda t: t.float() / 3, up.own))

    def server(self, uploads):
        return dataclasses.replace(uploads, own=tree_map(lambda t: t * 3, uploads.own))


class Nothing(Transform):
    def client(self, up, key):
        return None


class Picky(Transform):
    def client(self, up, key):
        raise Problem("it takes no uploads of Local")


class Tuples(Transform):
    def server(self, uploads):
        return uploads.mean, uploads.own


class Weightless(Transform):
    def client(self, up, key):
        return Up(up.mean, up.own, None, up.group)


class Choosing(Transform):
    def client(self, up, key):
        large = tree_map(lambda t: t if t.double().abs().sum() > 1 else t * 0, up.mean)
        return dataclasses.replace(up, mean=large)


class Global(Transform):
    def client(self, up, key):
        return dataclasses.replace(up, mean=tree_map(lambda t: t + torch.rand(()), up.mean))


class Writing(Transform):
    def client(self, up, key):
        return dataclasses.replace(up, mean=tree_map(lambda t: t.mul_(1.0 if t.dim() == 0 else 0.5), up.mean))


CLIENT, SERVER, BATCHED, DRAWS = treatments.CLIENT, treatments.SERVER, treatments.BATCHED, treatments.DRAWS
MISTAKES = {
    OneTensor: (CLIENT, r"test_treatments.py, line \d+: AttributeError: trees: 'dict' object has no attribute 'half'"),
    Short: (SERVER, r"one tensor \(float32\): .* another form .* \(mean: its numbers are float16, not float32\)"),
    Wide: (SERVER, r"one tensor \(float64\): .* \(mean: its numbers are float32, not float64\)"),
    Rounded: (SERVER, r"\(own/\S+: its numbers are float32, not (int64|float64)\)"),
    Nothing: (CLIENT, "client must return an Up, not None"),
    Tuples: (SERVER, r"one tensor: server must return Uploads, not tuple"),
    Weightless: (CLIENT, "a weight: client drops the weight that a method gave"),
    Choosing: (BATCHED, r"an `if`, .* over a tensor: .*torch.where\(condition, a, b\) chooses"),
    Global: (DRAWS, "one tensor: it draws from the global random state of torch, not from its key"),
    Writing: (DRAWS, "one tensor: it writes into the upload that it is given"),
}


@pytest.mark.parametrize("wire", [Transform(), Int8()], ids=["identity", "int8"])
def test_a_right_treatment_passes(wire, monkeypatch):
    monkeypatch.setattr(treatments, "SENDERS", ("fedavg", "local"))
    assert [(check, error) for check, ok, error in treatments.check_treatment(wire) if not ok] == []


@pytest.mark.slow
@pytest.mark.parametrize("wire", [Transform(), Int8()], ids=["identity", "int8"])
def test_a_right_treatment_passes_with_all_senders(wire):
    assert [(check, error) for check, ok, error in treatments.check_treatment(wire) if not ok] == []


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_of_a_treatment_gets_a_sentence(kind, monkeypatch):
    monkeypatch.setattr(treatments, "SENDERS", ())
    title, sentence = MISTAKES[kind]
    failed = {check: error for check, ok, error in treatments.check_treatment(kind()) if ok is False}
    assert list(failed) == [title], failed
    assert re.search(sentence, failed[title]), failed[title]


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_errors_of_a_run_name_treatment_and_method(engine):
    make = lambda wire, name="local": engine(Job(toy.maker(methods()[name])(epochs=1), toy.toy_clients(), wire=wire))
    for wire, kind, sentence in [
        (OneTensor(), ClientError, r"method Local \(test_treatments.py, line \d+\): AttributeError: 'tuple' object"),
        (Nothing(), ClientError, r"method Local: TypeError: client must return an Up, not None"),
        (Picky(), Problem, r"method Local \(test_treatments.py, line \d+\): it takes no uploads of Local"),
        (Tuples(), Problem, r"method Local: TypeError: server must return Uploads, not tuple"),
    ]:
        with pytest.raises(kind, match=f"wire '{type(wire).__name__}', {sentence}"):
            Federation(make(wire)).step()
    whole = dataclasses.make_dataclass("x", [])  # a treatment that leaves its bytes as they are
    Whole = type("Whole", (Int8, whole), {"server": Transform.server})
    with pytest.raises(Problem, match=r"wire 'Whole', method FedAvg: TypeError: server must give back 'mean/q' as fl"):
        Federation(make(Whole(), "fedavg")).step()
    assert checks.play(make(Int8(), "fedavg")).traffic["up_mean"] > 0


def test_a_treatment_is_checked_by_its_name(monkeypatch, capsys):
    monkeypatch.setattr(treatments, "SENDERS", ())
    methods_cli.check("identity", json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["wire"], result["failed"], len(result["checks"])) == ("identity", 0, 4)
    with pytest.raises(Problem, match=r"no method and no treatment of uploads 'identiti'; did you mean 'identity'?"):
        methods_cli.check("identiti")
