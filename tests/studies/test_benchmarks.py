"""Benchmarks measure the same thing on both sides. How fast is not asserted: that is for the benchmarks to say."""

import json
from pathlib import Path

import pytest
import torch

from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.studies.bench import cpu, find, gpu
from perfed.studies.bench.plain import Loop


def test_the_plain_loop_is_fedavg():
    clients, _ = cpu._clients(quick=True)
    build = make_network(ModelConfig(name="mlp", hidden=8), clients.shape, clients.classes)
    train, test = (cpu._tensors(clients, name) for name in ("train", "test"))
    loop = Loop(build, train, test, lr=0.1, batch_size=1000, epochs=2)  # one batch each: no order to differ in
    ours = Federation(Sequential(Job(FedAvg(Model(build), lr=0.1, batch_size=1000, epochs=2), clients)))
    loop.round()
    theirs = loop.round()
    ours.step()
    ours.step()
    torch.testing.assert_close(ours.method.model.flat(loop.server), ours.server, rtol=1e-4, atol=1e-5)
    mine = ours.evaluate()["personal"]["test"]["accuracy"].mean()
    assert theirs == pytest.approx(float(mine), abs=1e-6)


def test_cpu():
    said = []
    found = find("cpu").measure(quick=True, say=said.append)
    assert found["quick"]
    assert said
    for one in found["findings"]:
        assert one["plain_cpu_s"] >= 0
        assert (one["wall_ratio"] is None) == (one["wall_target"] is None)
    text = "\n".join(cpu.report(found))
    assert "target 0.70" in text
    assert "synthetic" in text


def test_the_gpu_report_has_a_line_for_each_row():
    measured = json.loads((Path(__file__).parents[2] / "bench" / "results" / "gpu.json").read_text())
    head, *lines = gpu.report(measured)
    assert measured["device"] in head
    assert len(lines) == sum(len(measured[part]) for part in ("steps", "methods", "runs"))
    assert all("reached" in line for line in lines)


def test_an_engine_says_how_long_it_prepares(clients, model):
    engine = Vectorised(Job(FedAvg(model), clients))
    Federation(engine).step()
    assert (engine.tuning_seconds, engine.recording_seconds) == (0, None)  # a CPU needs neither


def test_unknown():
    with pytest.raises(Problem, match="no benchmark 'cp'; did you mean 'cpu'"):
        find("cp")
