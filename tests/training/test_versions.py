"""Run folders of version 0.1 load and resume; `run-0.1.tar.xz` holds a run that was killed after round 4 of 6.

Made by perfed 0.1.0 (commit a1bd630): `perfed run local ditto --rounds 6 --clients 3 --epochs 1 --batch-size 50
--model mlr --checkpoint-every 2 --engine sequential --no-baseline`; `ditto.json` is what the same command ends with
uninterrupted.
"""

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

import perfed
from perfed import api

ARCHIVE = Path(__file__).parent / "run-0.1.tar.xz"


@pytest.fixture
def old(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_what_is_finished_loads(old):
    run = perfed.load(old / "begun")
    result = run.result("local")
    assert result["rounds"] == 6
    assert [client.name for client in run.clients("local")] == ["client_00", "client_01", "client_02"]
    client = run.client("client_01", "local")
    assert client.model()(torch.zeros(2, *run.about["shape"])).shape == (2, 10)
    assert client.accuracy == result["clients"][1]["personal"]["test"]["accuracy"]


def test_what_was_interrupted_goes_on(old):
    words = io.StringIO()
    run = api.resume(old / "begun", Console(file=words))
    ended, expected = run.result("ditto"), json.loads((old / "ditto.json").read_text())
    assert "perfed was 0.1.0, now" in words.getvalue()
    assert ended.keys() - {"settings", "sha256"} == expected.keys()
    assert ended["bytes"] == expected["bytes"]
    for client, other in zip(ended["clients"], expected["clients"], strict=True):
        for metric, score in other["personal"]["test"].items():
            assert client["personal"]["test"][metric] == pytest.approx(score, abs=1e-5)
    rounds = [line["round"] for line in run.folder.method("ditto").rounds()]
    assert rounds == [1, 2, 3, 4, 5, 6]
