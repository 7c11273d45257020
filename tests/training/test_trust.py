"""What a run refuses to do silently: other data on resume, code from elsewhere, unseeded networks, other scales."""

import io
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.training import files
from perfed.training.config import from_dict
from perfed.training.folder import MethodFolder, RunFolder
from perfed.training.observers.checkpoint import Checkpoints, restore
from perfed.training.observers.log import MetricsLog
from perfed.training.prepare import create, prepare
from perfed.training.statistics import gain_with_test

QUIET = Console(quiet=True)


def write_clients(folder, dtype="float32", scale=1.0):
    Path(folder).mkdir()
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        x = draw.integers(0, 200, size=(60, 4))
        np.savez(Path(folder) / f"{name}.npz", x=(x * scale).astype(dtype), y=(x[:, 0] > 100).astype(int))


def settings(folder, **more):
    raw = {"data": {"name": "folder", "dir": str(folder)}, "methods": ["local", "fedavg"]}
    raw["run"] = {"rounds": 2, "engine": "sequential", **more}
    return raw | {"train": {"epochs": 1, "lr": 0.01}}


def test_resume_refuses_other_data(tmp_path):
    write_clients(tmp_path / "data")
    folder = create(prepare(from_dict(settings(tmp_path / "data"))), tmp_path / "run")
    (tmp_path / "data" / "a.npz").rename(tmp_path / "data" / "d.npz")  # as many clients, other ones
    with pytest.raises(Problem, match="no longer what they were"):
        api.resume(folder, QUIET)
    (tmp_path / "data" / "d.npz").rename(tmp_path / "data" / "a.npz")
    api.resume(folder, QUIET)
    loaded = dict(np.load(tmp_path / "data" / "a.npz"))
    np.savez(tmp_path / "data" / "a.npz", x=loaded["x"] + 1, y=loaded["y"])  # the same sizes, other numbers
    with pytest.raises(Problem, match="digest"):
        api.resume(folder, QUIET)


def test_resume_mentions_other_versions(tmp_path, capsys):
    write_clients(tmp_path / "data")
    folder = create(prepare(from_dict(settings(tmp_path / "data"))), tmp_path / "run")
    about = files.read_json(folder / "env.json")
    about["versions"]["torch"] = "1.0"
    files.write_json(folder / "env.json", about)
    api.resume(folder, Console())
    assert "torch was 1.0, now" in capsys.readouterr().out


def test_the_configuration_names_what_auto_meant(tmp_path):
    write_clients(tmp_path / "data")
    folder = create(prepare(from_dict(settings(tmp_path / "data", engine="auto"))), tmp_path / "run")
    run = RunFolder(folder).config().run
    assert run.engine in ("workers", "sequential", "vectorised")
    assert run.device in ("cpu", "cuda")


@pytest.mark.parametrize("name", ["/elsewhere/method.py", "../method.py", "files/../../method.py", "method.py"])
def test_a_run_folder_names_no_code_outside_it(name, tmp_path):
    write_clients(tmp_path / "data")
    folder = create(prepare(from_dict(settings(tmp_path / "data"))), tmp_path / "run")
    text = (folder / "config.toml").read_text().replace('"fedavg"]', f'"{name}"]')
    (folder / "config.toml").write_text(text)
    with pytest.raises(Problem, match="not one of its own files"):
        RunFolder(folder).config()


def test_folders_of_clients_are_never_read_from_a_file(tmp_path):
    write_clients(tmp_path / "data")
    run = api.start(from_dict(settings(tmp_path / "data")), tmp_path / "run", QUIET)
    about = files.read_json(run.path / "clients.json")
    about["clients"][0]["folder"] = "../../../../escape"
    files.write_json(run.path / "clients.json", about)
    assert perfed.load(run.path).client("a").path.is_relative_to(run.path)


@pytest.mark.parametrize(("dtype", "scale"), [("uint8", 1), ("float32", 0.01)])
def test_predict_scales_as_training_did(dtype, scale, tmp_path):
    """A table of bytes is no picture: it was not divided by 255 in training, so not for predictions either."""
    write_clients(tmp_path / "data", dtype, scale)
    run = api.start(from_dict(settings(tmp_path / "data", precision="float64")), tmp_path / "run", QUIET)
    client, raw = run.client("a"), np.load(tmp_path / "data" / "a.npz")["x"]
    by_hand = client.model()(torch.as_tensor(raw.astype("float64"))).argmax(1).numpy()
    assert (client.predict(raw) == by_hand).all()


def test_equal_gains_are_ties():
    """0.7 - 0.6 and 0.6 - 0.5 differ in the last bit, and must not be ranked by it."""
    base = np.array([0.5, 0.6, 0.7, 0.8, 0.3, 0.2])
    exact = gain_with_test(base, base + np.array([0.1, 0.1, -0.1, 0.1, 0.1, -0.1]))
    scaled = gain_with_test(np.array([5, 6, 7, 8, 3, 2.0]), np.array([6, 7, 6, 9, 4, 1.0]))
    assert exact["p"] == scaled["p"]
    assert (exact["better"], exact["worse"], exact["clients"]) == (4, 2, 6)


def test_a_log_that_lost_lines_sends_resume_to_an_older_checkpoint(tmp_path):
    write_clients(tmp_path / "data")
    experiment = prepare(from_dict(settings(tmp_path / "data")))
    from perfed.engines.base import Job
    from perfed.engines.local import Sequential
    from perfed.federation.federation import Federation
    from perfed.training.catalog import find

    make = lambda: Federation(Sequential(Job(experiment.method(find("fedavg")), experiment.clients)))
    federation, log = make(), MetricsLog(MethodFolder(tmp_path))
    checkpoints = Checkpoints(MethodFolder(tmp_path), 1, log)
    for line in ("one", "two"):
        federation.step()
        log._append(tmp_path / "rounds.jsonl", [{"is": line}])
        checkpoints.write(federation)
    (tmp_path / "rounds.jsonl").write_text('{"is": "one"}\n')
    said = []
    again = make()
    assert restore(MethodFolder(tmp_path), again, said.append) == {
        "metrics.jsonl": 0,
        "rounds.jsonl": 14,
        "times.jsonl": 0,
    }
    assert again.round == 1
    assert "lines are missing" in said[0]


def test_a_state_that_would_not_come_back_is_refused(tmp_path):
    pair = namedtuple("pair", "a b")
    with pytest.raises(TypeError, match="not pair"):
        files.save_tree(tmp_path / "state", {"x": pair(torch.ones(1), torch.ones(1))})


NETS = {
    "noise": "self.head(x.flatten(1) + (torch.randn(4) if self.training else 0))",
    "dropout at any time": "F.dropout(self.head(x.flatten(1)), 0.5)",
    "mixes samples": "self.head(x.flatten(1) - x.flatten(1).mean(0))",
}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("noise", "random numbers of its own in training"),
        ("dropout at any time", "random numbers of its own in evaluation"),
        ("mixes samples", "mixes the samples"),
    ],
)
def test_networks_that_would_differ_silently_are_refused(what, message, tmp_path):
    with pytest.raises(Problem, match=message):
        prepare(with_net(what, tmp_path, engine="vectorised"))


def test_a_network_that_cannot_be_batched_trains_client_by_client(tmp_path, monkeypatch):
    """Where nobody asked for the batched engine, as on a GPU."""
    monkeypatch.setattr("perfed.training.prepare.pick_engine", lambda *_: "vectorised")
    config = with_net("mixes samples", tmp_path, engine="auto")
    out = io.StringIO()
    api.start(config, tmp_path / "run", Console(file=out, width=200))
    assert out.getvalue().count("clients train one after another, as the network cannot be batched: it mixes") == 1
    assert RunFolder(tmp_path / "run").config().run.engine == "sequential"


def with_net(what, tmp_path, **run):
    """The configuration of a run with one of the networks."""
    write_clients(tmp_path / "data")
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "class Net(nn.Module):",
        "    def __init__(self):",
    ]
    lines += ["        super().__init__()", "        self.head = nn.Linear(4, 2)", "    def forward(self, x):"]
    (tmp_path / "net.py").write_text("\n".join([*lines, f"        return {NETS[what]}", ""]))
    raw = settings(tmp_path / "data", **run) | {"model": {"name": f"{tmp_path / 'net.py'}:Net"}}
    return from_dict(raw)


def test_the_callers_threads_come_back(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        perfed.run("local", clients=3, rounds=1, epochs=1, engine="sequential", out=tmp_path / "run")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
