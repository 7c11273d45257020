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
from perfed.methods.pgfed import PGFed
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.studies.bench import cpu, find, gpu
from perfed.studies.bench.plain import Loop
from perfed.training.catalog import names


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
    assert len(lines) == sum(len(measured[part]) for part in ("steps", "methods", "folds", "runs") if part in measured)
    assert all("reached" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "settings", "times"),
    [
        ("ditto", {}, 2),
        ("apfl", {}, 2.2),
        ("pfedme", {"inner_steps": 5, "momentum": 0.0}, 5),
        ("fedcurv", {}, 1.2),
        ("fedmd", {"digest_epochs": 2}, 1.2),  # there are half as many public samples
    ],
)
def test_gradients_are_counted_over_those_of_fedavg(name, settings, times):
    count = gpu.gradients(name, {"epochs": 5, "batch_size": 10, **settings}, samples=160, public=80)
    assert count == pytest.approx(times)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The benchmark of GPUs with a network so small, and pictures, that a CPU carries it out."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "SHAPE", (3, 2, 2))
    monkeypatch.setattr(gpu, "network", lambda name: make_network(ModelConfig(name="mlp", hidden=8), (3, 2, 2), 10))
    monkeypatch.setattr(gpu, "Vectorised", lambda job, fast, **more: Vectorised(job, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_the_surveys_methods_are_measured_where_they_are_there(on_a_cpu, monkeypatch):
    monkeypatch.setattr(gpu, "FOLDS", gpu.FOLDS | {"nobody": {}})
    times = iter([9.0, 8.0, 6.0, *99 * (9.0, 8.0, 7.2)])  # rounds that warm up, and the one that counts
    monkeypatch.setattr(gpu, "gradients", lambda name, *about: {"fedmd": 1.5}.get(name, 1.0))
    part = gpu.clients_part
    monkeypatch.setattr(gpu, "clients_part", lambda federation: part(federation) and next(times))
    rows = {row["method"]: row for row in gpu.fold_rows(1, clients=2, samples=10)}
    assert len(rows) == 1 + len(set(gpu.FOLDS) & set(names()))
    assert (rows["FedAvg"]["times_fedavg"], rows["FedAvg"]["reached"]) == (1, True)
    assert rows["FedCL"]["per_gradient"] == pytest.approx(1.2)
    assert rows["FedMD"]["per_gradient"] == pytest.approx(1.2 / 1.5)
    assert all(row["notices"] == [] and "gradients" in gpu._in_words("folds", row) for row in rows.values())


def test_rows_of_methods_and_complete_runs(on_a_cpu):
    rows = gpu.method_rows(1, clients=2, batch=80)
    assert [row["gradients"] for row in rows] == [1, 2, 2.2, 5]
    data = gpu.images([8] * 4, [2] * 4)
    run = gpu.whole_run("Tiny", gpu.make(FedAvg, "any"), data, cohort=2, rounds=2, every=1, limit=9, aim=1)
    assert (run["rounds"], run["models"]) == (2, 0)  # one model for all is kept by nobody
    assert gpu.whole_run("Tiny", gpu.make(PGFed, "any"), data, 2, 1, 1, 9, 1)["models"] == 4


@pytest.mark.slow
def test_complete_runs_as_they_are(on_a_cpu):
    assert gpu.pgfed_run(1)["models"] == 100
    assert "Tiny" not in gpu.pfl_again(1)["run"]


def test_an_engine_says_how_long_it_prepares(clients, model):
    engine = Vectorised(Job(FedAvg(model), clients))
    Federation(engine).step()
    assert (engine.tuning_seconds, engine.recording_seconds) == (0, None)  # a CPU needs neither


def test_unknown():
    with pytest.raises(Problem, match="no benchmark 'cp'; did you mean 'cpu'"):
        find("cp")
