"""A run whose clients make samples for themselves: what is said of them, and that it can be resumed."""

import json

import pytest
import tiny

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.federation.federation import Federation
from perfed.report.tables import remarks
from perfed.training.config import from_dict

METHOD = '''"""Twice: each client trains on a second sample beside each of class 1, and leaves some of class 0 out."""
from dataclasses import dataclass

import torch

from perfed.core.messages import Extension
from perfed.core.random import derive, uniform
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Twice(FedAvg):
    def drawn(self, batch, theta):
        draw = uniform(derive(batch.key, batch.index), (), batch.x.dtype)
        return batch.x * (1 + 0.1 * theta.mean() + 0.1 * draw[:, None]), batch.y, draw

    def extend(self, client, down, data):
        x, y, draw = data.map(self.drawn, down.shared)
        return Extension(x, y, data.mask() & (y == 1), (y == 1) | (draw < 0.5))
'''


@pytest.fixture
def config(tmp_path):
    tiny.write_clients(tmp_path / "data")
    raw = tiny.settings(tmp_path, participation=0.67, save_round="best", rounds=5)
    (tmp_path / "twice.py").write_text(METHOD)
    raw["methods"] = ["local", str(tmp_path / "twice.py")]
    return from_dict(raw)


def test_what_is_made_up_is_counted(config, tmp_path):
    run = api.start(config, tmp_path / "run", tiny.QUIET)
    log = [json.loads(line) for line in (tmp_path / "run" / "twice" / "rounds.jsonl").read_text().splitlines()]
    by_round = {line["round"]: sorted(line["extended"]) for line in log if "extended" in line}
    assert sorted(name for names in by_round.values() for name in names) == ["a", "b", "c"]
    assert by_round[1] == log[0]["cohort"]
    result = json.loads((tmp_path / "run" / "twice" / "result.json").read_text())
    sizes = {
        client["name"]: client["train"]
        for client in json.loads((tmp_path / "run" / "clients.json").read_text())["clients"]
    }
    for name, counts in result["extended"].items():
        assert counts["train"] == sizes[name] + counts["made"] - counts["left_out"]
        assert min(counts.values()) > 0
    (line,) = [line for line in remarks(run.summary()) if "joined" in line]
    assert line.startswith("Twice: ")
    assert line.endswith(f"they train on {sum(counts['train'] for counts in result['extended'].values())}")


def test_a_stopped_run_goes_on_as_if_it_had_not(config, tmp_path, monkeypatch):
    api.start(config, tmp_path / "whole", tiny.QUIET)
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "Twice" and self.round == 3:
            raise KeyboardInterrupt
        return begin(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, tmp_path / "stopped", tiny.QUIET)
    kept = [path.name for path in (tmp_path / "stopped" / "twice" / "checkpoints").glob("extended_*")]
    assert 1 <= len(kept) <= 2
    api.resume(tmp_path / "stopped", tiny.QUIET)
    for name in ("rounds.jsonl", "metrics.jsonl", "server.safetensors"):
        assert (tmp_path / "stopped" / "twice" / name).read_bytes() == (
            tmp_path / "whole" / "twice" / name
        ).read_bytes()
    assert (
        perfed.load(tmp_path / "stopped").summary()[1]["scores"]
        == perfed.load(tmp_path / "whole").summary()[1]["scores"]
    )


def test_a_damaged_file_is_noticed(config, tmp_path, monkeypatch):
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "Twice" and self.round == 3:
            raise KeyboardInterrupt
        return begin(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, tmp_path / "stopped", tiny.QUIET)
    for path in (tmp_path / "stopped" / "twice" / "checkpoints").glob("extended_*"):
        path.write_bytes(path.read_bytes()[:-4] + b"1234")
    with pytest.raises(Problem, match=r"extended_.* is damaged"):
        api.resume(tmp_path / "stopped", tiny.QUIET)
