"""Options of training that every method has, in a run: they reach its rounds, and a run that is resumed ends alike."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
from tiny import QUIET, settings, write_clients

from perfed import api
from perfed.core.errors import Problem
from perfed.federation.federation import Federation
from perfed.report.tables import options
from perfed.training.config import RunConfig, from_dict
from perfed.training.prepare import optimizer_of, prepare


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("perfed.report.folder.picture", lambda run: b"")  # takes longer than all the rest


@pytest.fixture
def home(tmp_path):
    write_clients(tmp_path / "data")
    return tmp_path


def interrupted(config, folder, round):
    """Begin a run that is interrupted before a round of its second method."""
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "Mine" and self.round == round - 1:
            raise KeyboardInterrupt
        return begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, folder, QUIET)


def result(folder):
    return json.loads((folder / "mine" / "result.json").read_text())


OPTIONS = {
    "cosine, momentum": {"lr_schedule": "cosine", "lr_end": 0.1, "server_optimizer": "momentum"},
    "step, adam": {"lr_schedule": "step", "lr_step": 2, "server_optimizer": "adam", "server_rate": 0.05},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_that_is_resumed_ends_alike(home, name):
    options = OPTIONS[name]
    config = from_dict(settings(home, **options))
    api.start(config, home / "whole", QUIET)
    interrupted(config, home / "stopped", 4)
    api.resume(home / "stopped", QUIET)
    before, after = result(home / "whole"), result(home / "stopped")
    assert before["clients"] == after["clients"]
    assert before["settings"].items() >= {f"run.{key}": value for key, value in options.items()}.items()
    assert before["sha256"]["mine/server.safetensors"] == after["sha256"]["mine/server.safetensors"]


def test_a_card_names_the_options_of_its_model(home):
    given = settings(home, lr_schedule="step", server_optimizer="momentum", rounds=1, class_weights="balanced")
    given["train"]["clip"] = 2
    run = api.start(from_dict(given), home / "run", QUIET)
    cards = {name: (home / "run" / name / "clients" / "a" / "card.md").read_text() for name in ("local", "mine")}
    assert "\n- training: class_weights balanced, lr_schedule step, clip 2\n" in cards["local"]
    assert (
        "\n- training: class_weights balanced, lr_schedule step, server_optimizer momentum, clip 2\n" in cards["mine"]
    )
    usual = dataclasses.replace(run.config, run=RunConfig(), method={})
    assert options(SimpleNamespace(config=usual), "mine") == ""


def test_a_schedule_over_more_rounds_is_told(home):
    config = from_dict(settings(home, lr_schedule="linear"))
    interrupted(config, home / "run", 4)
    file = home / "run" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 4", "rounds = 5"))
    shutil.rmtree(home / "run" / "local")
    with pytest.raises(Problem, match=r"run.rounds 4 -> 5; put them back"):
        api.resume(home / "run", QUIET)
    api.resume(home / "run", QUIET, allow_change=True)
    assert result(home / "run")["changes"] == [{"round": 3, "settings": {"run.rounds": [4, 5]}}]


def test_a_servers_optimizer_is_settled_when_a_run_begins(home):
    interrupted(from_dict(settings(home, server_optimizer="adam")), home / "run", 4)
    file = home / "run" / "config.toml"
    file.write_text(file.read_text().replace('server_optimizer = "adam"', 'server_optimizer = "yogi"'))
    shutil.rmtree(home / "run" / "local")
    with pytest.raises(Problem, match=r"which cannot change on the way: run.server_optimizer 'adam' -> 'yogi';"):
        api.resume(home / "run", QUIET, allow_change=True)


@pytest.mark.parametrize("names", [["local", "fedavg", "fedamp", "scaffold"], ["local"]])
def test_servers_that_do_not_add_means_are_refused(home, names):
    config = from_dict(settings(home, server_optimizer="yogi") | {"methods": names})
    told = ", ".join(names[2:] or names)
    with pytest.raises(Problem, match=f"the server of {told} does not just add: run it with --server-optimizer none$"):
        prepare(config)
    fine = from_dict(settings(home, server_optimizer="yogi") | {"methods": [*names[:2], "ditto"]})
    optimizer = optimizer_of(prepare(fine).config.run)  # the baseline sends nothing, and stays as it is
    assert (optimizer.rate, optimizer.tau) == (0.01, 0.001)


def test_settings_of_another_optimizer_are_refused(home):
    with pytest.raises(
        Problem, match=r"^run.server_beta2 belongs to run.server_optimizer = adam or yogi, not momentum$"
    ):
        from_dict(settings(home, server_optimizer="momentum", server_beta2=0.9))
    with pytest.raises(Problem, match=r"^run.server_rate belongs to run.server_optimizer = momentum or adam or"):
        from_dict(settings(home, server_rate=0.9))
