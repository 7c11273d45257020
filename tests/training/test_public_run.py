"""A run whose method needs public samples: where they are from, what is said; it can be resumed and joined."""

import json

import numpy as np
import pytest
import tiny
from rich.console import Console

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.federation.federation import Federation
from perfed.report.tables import remarks
from perfed.training.config import from_dict

METHOD = '''"""MD: clients learn what all of them say of public samples.

A toy.
"""
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from perfed import Method, Up
from perfed.core.model import average


@dataclass(frozen=True)
class MD(Method):
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = "unlabelled"
    sends_public: ClassVar[bool] = True

    def init_server(self, clients):
        return torch.zeros(2, dtype=self.model.dtype)

    def init_client(self):
        return self.model.init(self.context.seed)

    def outputs(self, batch, theta):
        return self.model.apply(theta, batch.x)[0]

    def mean(self, batch, theta):
        return average(self.outputs(batch, theta).square().sum(1), batch.weight)

    def local(self, client, down, data):
        theta = self.descend(client, data) + 1e-3 * down.shared.mean()
        return theta, Up(mean=data.public.map(self.outputs, theta))

    def aggregate(self, server, cohort):
        return cohort.mean.mean(0)

    def refine(self, server, cohort, public):
        return server + public.mean(self.mean, self.model.init(self.context.seed))

    def personalise(self, client, down, data):
        return client
'''


def settings(home, **more):
    raw = tiny.settings(home, **more)
    (home / "md.py").write_text(METHOD)
    raw["methods"] = ["local", str(home / "md.py")]
    return raw


@pytest.fixture
def home(tmp_path):
    tiny.write_clients(tmp_path / "data")
    return tmp_path


def test_a_share_is_held_out_for_all_methods(home, capsys):
    api.start(from_dict(settings(home)), home / "run", Console(width=200))
    told = capsys.readouterr().out
    assert "md needs public samples, so data.public is 0.1, for all methods of this run" in told
    assert "18 samples are public" in told
    about = json.loads((home / "run" / "clients.json").read_text())
    assert about["public"]["samples"] == 18
    assert sum(client[split] for client in about["clients"] for split in ("train", "val", "test")) == 180 - 18
    assert "public = 0.1" in (home / "run" / "config.toml").read_text()
    times = [json.loads(line) for line in (home / "run" / "md" / "times.jsonl").read_text().splitlines()]
    assert all(0 < line["refine"] < line["seconds"] for line in times)
    assert "refine" not in (home / "run" / "local" / "times.jsonl").read_text()
    sent = json.loads((home / "run" / "md" / "result.json").read_text())["bytes"]["extra"]
    assert sent == {"public_data": 3 * 18 * 4 * 4}
    (line,) = [line for line in remarks(perfed.load(home / "run").summary()) if "public" in line]
    assert line == "MD: public data once to each client, not in down: 864 B"


def test_a_stopped_run_goes_on_as_if_it_had_not(home, monkeypatch):
    config = from_dict(settings(home, participation=0.67))
    api.start(config, home / "whole", tiny.QUIET)
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "MD" and self.round == 2:
            raise KeyboardInterrupt
        return begin(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, home / "stopped", tiny.QUIET)
    api.resume(home / "stopped", tiny.QUIET)
    for name in ("rounds.jsonl", "metrics.jsonl", "server.safetensors"):
        assert (home / "stopped" / "md" / name).read_bytes() == (home / "whole" / "md" / name).read_bytes()


def test_other_public_samples_are_noticed(home):
    config = from_dict(settings(home))
    api.start(config, home / "run", tiny.QUIET)
    about = json.loads((home / "run" / "clients.json").read_text())
    about["public"]["digest"] = "0" * 64
    (home / "run" / "clients.json").write_text(json.dumps(about))
    with pytest.raises(Problem, match="public"):
        api.resume(home / "run", tiny.QUIET)


def test_a_public_folder_is_found_from_everywhere_and_may_move(home, monkeypatch):
    raw = settings(home, rounds=1)
    (home / "more").mkdir()
    np.savez(home / "more" / "m.npz", x=np.random.default_rng(1).normal(size=(20, 4)).astype("float32"), y=[0, 1] * 10)
    monkeypatch.chdir(home)
    api.start(from_dict(raw | {"data": raw["data"] | {"public_data": "more"}}), home / "run", tiny.QUIET)
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    path = home / "run" / "config.toml"
    assert f'public_data = "{home / "more"}"' in path.read_text()
    (home / "more").rename(home / "moved")
    path.write_text(path.read_text().replace(str(home / "more"), str(home / "moved")))
    assert not any(each["changes"] for each in perfed.load(home / "run").summary())
    api.resume(home / "run", tiny.QUIET)


def test_newcomers_get_them(home):
    api.start(from_dict(settings(home)), home / "run", tiny.QUIET)
    draw = np.random.default_rng(1)
    (home / "new").mkdir()
    x = draw.integers(0, 200, size=(40, 4))
    np.savez(home / "new" / "d.npz", x=(x * 0.01).astype("float32"), y=(x[:, 0] > 100).astype(int))
    joined = perfed.personalise(home / "run", home / "new", "md", out=home / "joined")
    assert [client.name for client in joined.clients()] == ["d"]
