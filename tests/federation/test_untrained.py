"""Clients without training samples: nobody asks them to train, and they predict with the server's model."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch

import perfed
from perfed.contract.toy import maker, toy_clients
from perfed.core.errors import Problem
from perfed.core.tree import leaves
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation
from perfed.training.catalog import methods

SIZES = (23, 0, 17, 0, 9)
EMPTY = [id for id, size in enumerate(SIZES) if not size]
ENGINES = {"sequential": Sequential, "workers": lambda *a: Workers(*a, workers=2), "vectorised": Vectorised}


def federation(entry, kind=Sequential, **changed):
    method = maker(entry)(**changed)
    return Federation(kind(Job(method, toy_clients(SIZES), 3, cohort=2)))


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_leaves_them_out(name):
    fed = federation(methods()[name])
    for _ in range(3):
        assert not set(fed.step()) & set(EMPTY)
    models = {}
    scores = fed.evaluate(lambda id, made: models.setdefault(id, made["personal"]), full=True)
    assert not fed.look()
    assert all(torch.isfinite(leaf).all() for model in models.values() for leaf in leaves(model))
    assert torch.isfinite(scores["personal"]["test"]["accuracy"]).all()
    try:
        shared = fed.method.global_model(fed.server)
    except Problem:
        return
    if shared.shape == (fed.method.model.width,):
        assert all(torch.equal(models[id], shared) for id in EMPTY)


@pytest.mark.parametrize("engine", ["workers", "vectorised"])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "ifca", "pgfed"])
def test_engines_agree(name, engine):
    feds = [federation(methods()[name], kind) for kind in (Sequential, ENGINES[engine])]
    for fed in feds:
        for _ in range(2):
            fed.step()
    first, second = (fed.evaluate(full=True)["personal"]["test"] for fed in feds)
    for fed in feds:
        fed.engine.close()
    for metric, values in first.items():
        torch.testing.assert_close(second[metric], values, equal_nan=True)


def test_a_cohort_that_is_named_is_looked_through():
    fed = federation(methods()["fedavg"])
    assert fed.step([0, 1, 2]) == [0, 2]
    before = fed.server.clone()
    assert fed.step(EMPTY) == []
    assert torch.equal(fed.server, before)
    assert fed.round == 2


def test_cohorts_are_drawn_from_the_others_alike():
    """Three clients with samples are drawn as three clients without others beside them would be."""
    method = maker(methods()["fedavg"])()
    alone = Federation(Sequential(Job(method, toy_clients(tuple(size for size in SIZES if size)), 3, cohort=2)))
    able = [id for id, size in enumerate(SIZES) if size]
    fed = federation(methods()["fedavg"])
    assert [fed.step() for _ in range(4)] == [[able[place] for place in alone.step()] for _ in range(4)]


def write(folder, trained=("a", "b", "c"), empty=("d",)):
    folder.mkdir()
    for seed, name in enumerate((*trained, *empty)):
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(40, 3)).astype("float32")
        y = (x[:, 0] > 0).astype(int)
        first = 0 if name in empty else 30
        np.savez(folder / f"{name}.npz", x_train=x[:first], y_train=y[:first], x_test=x[30:], y_test=y[30:])
    return folder


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_goes_on_and_is_resumed(tmp_path, engine):
    settings = dict(data="folder", data_dir=str(write(tmp_path / "d")), engine=engine, epochs=1, model="mlr")
    whole = perfed.run("ditto", out=tmp_path / "whole", rounds=4, checkpoint_every=2, **settings)
    assert [client.name for client in whole.clients()] == ["a", "b", "c", "d"]
    cohorts = [line["cohort"] for line in whole.folder.method("ditto").rounds()]
    assert cohorts == [["a", "b", "c"]] * 4
    assert whole.client("d").accuracy > 0.7  # by the others' model: Local's is the initial one
    assert all(torch.isfinite(p).all() for p in whole.client("d").model().parameters())
    summary = (tmp_path / "whole" / "report" / "summary.md").read_text()
    assert "1 client without training samples (d) did not train" in summary
    rows = list(csv.DictReader((tmp_path / "whole" / "report" / "clients.csv").read_text().splitlines()))
    assert rows[3]["train"] == "0"
    result = json.loads((tmp_path / "whole" / "ditto" / "result.json").read_text())
    (tmp_path / "whole" / "ditto" / "result.json").unlink()  # as after a kill behind the checkpoint of round 2
    again = perfed.api.resume(tmp_path / "whole", perfed.api.Console(quiet=True))
    assert json.loads((again.path / "ditto" / "result.json").read_text()) == result


def test_nobody_has_training_samples(tmp_path):
    with pytest.raises(Problem, match="no client has a training sample"):
        perfed.run("fedavg", data="folder", data_dir=str(write(tmp_path / "d", (), ("a", "b"))), out=tmp_path / "run")


def test_with_samples_everywhere_nothing_is_different():
    fed = Federation(Sequential(Job(maker(methods()["ditto"])(), toy_clients(), seed=3)))
    assert all(request.general is None for request in fed.evaluations(keep=False, full=False))
    assert dataclasses.replace(fed).clients.able == list(range(5))
