"""The script of PGFed's Figure 2: its objective against the formula, and a small run from end to end."""

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import perfed
from perfed.core.errors import Problem

SPEC = importlib.util.spec_from_file_location("pgfed_fig2", Path(__file__).parents[2] / "bench" / "pgfed_fig2.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure") / "run"
    how = {"clients": 4, "rounds": 2, "epochs": 1, "hidden": 8, "engine": "sequential", "baseline": False}
    perfed.run("fedavg", out=folder, precision="float64", **how)
    return folder


def test_a_step_follows_the_formula(finished):
    """theta - lr * grad(f_i + mu / (N - 1) * sum of f_j over j != i), with f_j a client's mean loss."""
    experiment, start = script.opened(finished, "cpu")
    clients, lr, mu, i = experiment.clients, 0.2, 0.7, 2
    model = experiment.method(experiment.config.entries()[0]).model
    theta = start.clone().requires_grad_()
    ends = np.cumsum((0, *clients.train.size))
    x = clients.ready(clients.train.x, theta.dtype)
    f = [cross_entropy(model.apply(theta, x[a:b])[0], clients.train.y[a:b]) for a, b in itertools.pairwise(ends)]
    objective = f[i] + mu / 3 * sum(f[j] for j in range(4) if j != i)
    expected = start - lr * torch.autograd.grad(objective, theta)[0]
    found = start - lr * script.gradient(model, start, x, clients.train.y, script.weights(clients.train, i, mu))
    assert (found - expected).abs().max() < 1e-12
    assert (found - start).abs().max() > 1e-4

    val, test = script.walk(experiment, model, start, 1, lr, mu, (i,))
    mine = slice(clients.test.start[i], clients.test.start[i] + clients.test.size[i])
    right = model.apply(expected, clients.ready(clients.test.x[mine], theta.dtype))[0].argmax(1) == clients.test.y[mine]
    assert test[1, i] == pytest.approx(right.double().mean().item())
    assert val.shape == test.shape == (2, 4)
    assert np.isnan(test[:, [0, 1, 3]]).all()


def test_settings_are_chosen_on_validation_samples_of_some_clients(finished, monkeypatch):
    """Test accuracy would choose the other rate; what was chosen is then walked by everybody."""

    def walk(_experiment, _model, _start, steps, lr, mu, who):
        found = np.full((2, steps + 1, 4), np.nan)
        found[0, :, list(who)], found[1, :, list(who)] = lr + mu, -lr
        return found

    monkeypatch.setattr(script, "walk", walk)
    experiment, start = script.opened(finished, "cpu")
    tried = list(script.study(experiment, start, 2, [0.1, 0.2], [0.5, 0.3], on=2))
    picked = [(one["objective"], one["lr"], one["mu"], one["on"]) for one in tried if one["chosen"]]
    assert picked == [("implicit", 0.2, 0.0, 4), ("explicit", 0.2, 0.5, 4)]
    assert [one["on"] for one in tried] == [4, 4, 2, 2, 2, 2, 4]
    assert np.isnan(tried[2]["val"][0]).tolist() == [False, True, True, False]
    sizes = (0, *experiment.clients.val.size[1:])  # who has no validation sample chooses nothing
    fewer = replace(experiment.clients, val=replace(experiment.clients.val, size=sizes))
    experiment = replace(experiment, clients=fewer)
    tried = list(script.study(experiment, start, 2, [0.1, 0.2], [0.5, 0.3], on=2))
    assert np.isnan(tried[2]["val"][0]).tolist() == [True, False, True, False]


def test_from_a_finished_run_to_a_figure(finished, tmp_path, capsys):
    words = [str(finished), "--steps", "2", "--lr", "0.1,0.01", "--mu", "0.5", "--on", "3"]
    script.main([*words, "--out", str(tmp_path / "new")])
    assert capsys.readouterr().out.count("written") == 3
    about = json.loads((tmp_path / "new/pgfed-fig2.json").read_text())
    assert about["command"] == "python bench/pgfed_fig2.py RUN --steps 2 --lr 0.1,0.01 --mu 0.5 --on 3"
    assert [(one["paper"], one["tried_on"]) for one in about["objectives"]] == [(5.4, 4), (7.73, 3)]
    lines = (tmp_path / "new/pgfed-fig2.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 * 3  # two rates for each objective and the better one for all clients, three points each
    for one in about["objectives"]:
        assert np.mean([gain for gain in one["gains"] if gain is not None]) == pytest.approx(one["gain"], abs=1e-3)
        (last,) = [l for l in lines if l.startswith(f"{one['objective']},{one['lr']},{one['mu']},4,True,2,")]
        assert float(last.rpartition(",")[2]) == one["gain"]
    assert all((tmp_path / f"new/pgfed-fig2.{kind}").stat().st_size > 5000 for kind in ("png", "svg"))


def test_what_it_cannot_use(tmp_path):
    with pytest.raises(Problem, match="name the folder of a finished run of FedAvg, or say --quick"):
        script.main([])
    run = perfed.run("local", out=tmp_path / "run", clients=3, rounds=1, epochs=1, hidden=8, engine="sequential")
    with pytest.raises(Problem, match="has no finished fedavg"):
        script.main([str(run.path)])
