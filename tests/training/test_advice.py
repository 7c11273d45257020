"""What a run that diverged says may help."""

import dataclasses

import numpy as np
import torch

import perfed
from perfed.contract.toy import toy_clients
from perfed.training.prepare import about_inputs


def test_inputs_that_are_too_large_are_found():
    clients = toy_clients()
    assert about_inputs(clients) == ""
    clients.train.x[23 + 7 + 4, 2] = -3e30
    assert about_inputs(clients) == "inputs reach 3e+30 (client 'client_2', feature 2): scale them"
    named = dataclasses.replace(clients, columns=("age", "bmi", "crp", "d", "e", "f"))
    assert about_inputs(named) == "inputs reach 3e+30 (client 'client_2', column 'crp'): scale them"
    images = dataclasses.replace(clients.train, x=torch.full((86, 1, 2, 2), 255, dtype=torch.uint8))
    assert about_inputs(dataclasses.replace(clients, train=images)) == ""


def test_a_run_that_diverges_says_where_its_inputs_are_large(tmp_path):
    (tmp_path / "d").mkdir()
    for seed, name in enumerate("ab"):
        x = np.random.default_rng(seed).normal(size=(30, 2, 3)).astype("float32")
        x[:, 0, 1] *= 1e30 if name == "b" else 1
        np.savez(tmp_path / "d" / f"{name}.npz", x=x, y=np.arange(30) % 2)
    settings = dict(data="folder", data_dir=str(tmp_path / "d"), model="mlr", rounds=4, quorum=1.0, engine="sequential")
    run = perfed.run("fedavg", out=tmp_path / "run", baseline=False, **settings)
    assert run.diverged["fedavg"].endswith("e+30 (client 'b', feature 1): scale them")
    assert "smaller lr" not in run.diverged["fedavg"]
