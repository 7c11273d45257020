"""Runs whose clients have networks that differ, from the configuration to a saved model."""

import numpy as np
import pytest
from tiny import QUIET, contents, write_clients

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.federation.federation import Federation
from perfed.models.config import ModelConfig
from perfed.models.shares import share
from perfed.studies.measures import flops, memory
from perfed.training.config import from_dict, place_flags

NET = "from torch import nn\n\n\ndef net():\n"
NET += "    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))\n"
METHOD = '''"""Alike: FedAvg among the clients of each network."""

from dataclasses import dataclass

import torch

from perfed.core.messages import Down, Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Alike(FedAvg):
    own_networks = True

    @property
    def groups(self):
        return len(self.networks)

    def init_server(self, clients):
        return torch.stack([model.init(self.context.seed) for model in self.networks])

    def broadcast(self, server, ids):
        return Down(own=server[self.network_of[ids]])

    def local(self, client, down, data):
        return client, Up(mean=self.descend(down.own, data) - down.own, group=self.context.network)

    def personalise(self, client, down, data):
        return down.own
'''


def settings(home, **more):
    (home / "alike.py").write_text(METHOD)
    (home / "net.py").write_text(NET)
    raw = {"data": {"name": "folder", "dir": str(home / "data")}, "methods": ["local", str(home / "alike.py")]}
    raw |= {"model": {"networks": ["mlp", "mlr"], "hidden": 5, "clients": {"[c-z]": f"{home / 'net.py'}:net"}}}
    raw |= {"train": {"epochs": 1, "lr": 0.01}}
    return raw | {"run": {"rounds": 3, "engine": "sequential", "checkpoint_every": 1, **more}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("networks")
    write_clients(home / "data")
    api.start(from_dict(settings(home)), home / "run", QUIET)
    return home


@pytest.fixture
def run(home):
    return perfed.load(home / "run")


SIZES = {"mlp": 4 * 5 + 5 + 5 * 2 + 2, "mlr": 4 * 2 + 2, "net.py:net": 4 * 3 + 3 + 2 * 3 + 3 * 2 + 2}


def test_a_run_says_who_has_which(run, home):
    assert [client["network"] for client in run.about["clients"]] == list(SIZES)
    result = run.result("alike")
    assert (result["networks"], result["parameters"]) == ([0, 1, 2], SIZES)
    assert result["settings"]["model.clients"] == "[c-z]=net.py:net"
    sent = 3 * 4 * (sum(SIZES.values()) + 2 * 3)  # rounds, bytes of a number; with BatchNorm's statistics
    agreed = run.about["preparation"]["traffic"]["up_mean"]  # what the columns are scaled by
    assert (result["bytes"]["down_own"], result["bytes"]["up_mean"]) == (sent, agreed + sent)
    card = (home / "run" / "alike" / "clients" / "c" / "card.md").read_text()
    assert "network: net.py:net; rounds: 3" in card
    assert "network mlp, mlr, net.py:net, 3 rounds" in (home / "run" / "report" / "summary.md").read_text()


@pytest.mark.parametrize("method", ["local", "alike"])
def test_a_client_predicts_with_its_own_network(run, home, method):
    for client, kinds in zip(run.clients(method), ["MLP", "MLR", "Sequential"], strict=True):
        network = client.model()
        inner = network.network if hasattr(network, "preparation") else network
        assert type(inner).__name__ == kinds
        assert sum(p.numel() for p in inner.parameters()) == SIZES[run.network_name(client.id)]
        arrays = np.load(home / "data" / f"{client.name}.npz")
        assert client.predict(arrays["x"]).shape == arrays["y"].shape


def test_a_run_that_was_stopped_ends_as_if_it_had_never_been(home, tmp_path):
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "Alike" and self.round == 2:
            raise KeyboardInterrupt
        return begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(from_dict(settings(home)), tmp_path / "run", QUIET)
    api.resume(tmp_path / "run", QUIET)
    mine, whole = contents(tmp_path / "run" / "alike"), contents(home / "run" / "alike")
    results = (".safetensors", "metrics.jsonl", "rounds.jsonl")
    same = [name for name in whole if name.endswith(results) and not name.startswith("checkpoints")]
    assert len(same) == 6
    assert [name for name in same if mine[name] != whole[name]] == []


def test_one_network_is_one_network(home, tmp_path):
    raw = settings(home) | {"model": {"networks": "mlp", "hidden": 5}}
    config = api.start(from_dict(raw | {"methods": ["local", "fedavg"]}), tmp_path / "run", QUIET).config
    assert (config.model.name, config.model.networks, config.model.clients) == ("mlp", "", "")


def test_costs_are_those_of_each_clients_network(run):
    sizes = [client["train"] for client in run.about["clients"]]
    ours, methods = flops(run, "local"), run.entries
    # A multiply-add is two; the backward pass of a first layer has no gradient of its input.
    each = [6 * (4 * 5 + 5 * 2) - 2 * 4 * 5, 4 * 4 * 2, 6 * (4 * 3 + 3 * 2) - 2 * 4 * 3]
    assert ours == 3 * sum(n * cost for n, cost in zip(sizes, each, strict=True))
    assert memory(run.config, methods["local"], run.about)["client_state"] == 4 * SIZES["mlp"]
    assert memory(run.config, methods["alike"], run.about)["server_state"] == 3 * 4 * SIZES["mlp"]


def test_newcomers_are_told_that_no_network_is_theirs(run, home):
    with pytest.raises(Problem, match=r"have networks that differ \(mlp, mlr, net.py:net\), and none of them is"):
        perfed.personalise(run, home / "data" / "a.npz", "local")


# ---------------------------------------------------------------------- who has which


def test_clients_are_dealt_networks_and_may_have_their_own():
    names = ["a", "b", "ward_1", "d", "ward_2"]
    assert share(ModelConfig(networks="mlp, mlr"), names) == (["mlp", "mlr"], (0, 1, 0, 1, 0))
    config = ModelConfig(name="mlp", clients={"ward_*": "lenet", "ward_2": "mlr"})  # a name goes before a pattern
    assert share(config, names) == (["mlp", "lenet", "mlr"], (0, 0, 1, 0, 2))
    assert share(ModelConfig(name="mlp", clients="*=mlr"), names) == (["mlr"], (0,) * 5)
    assert share(ModelConfig(clients={"ward[1]": "mlr"}), ["ward[1]", "b"]) == (["", "mlr"], (1, 0))


@pytest.mark.parametrize(("model", "words"), [
    ({"name": "mlp", "networks": "mlp,mlr"}, "model.name is 'mlp' and model.networks 'mlp,mlr': set one of them"),
    ({"networks": "mlp,lent"}, "there is no network 'lent'; did you mean 'lenet'"),
    ({"clients": {"a": "lent"}}, "there is no network 'lent'; did you mean 'lenet'"),
    ({"clients": {"d": "mlp"}}, "model.clients: no client is called 'd'"),
    ({"clients": {"a": 3}}, "model.clients names a network for 'a', not 3"),
    ({"clients": {"a=b": "mlp"}}, "a pattern has . in their place"),
    ({"clients": "a"}, "model.clients is written as client=network"),
    ({"networks": "mlp,mlr,lenet", "clients": {"c": "mlp"}}, "no client has the network 'lenet'"),
    ({"networks": "mlp,mlr"}, r"FedAvg is not made for clients whose networks differ \(mlp, mlr\)"),
    ({"networks": "mlp,mlr", "head": "fc1"}, "the model has no module 'fc1'"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(home, tmp_path, model, words):
    raw = settings(home) | {"model": model, "methods": ["local", "fedavg"]}
    with pytest.raises(Problem, match=words):
        api.begin(from_dict(raw), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_files_outside_the_folder_are_no_networks_of_a_run(home, tmp_path):
    api.begin(from_dict(settings(home)), tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("files/net.py:net", f"{home / 'net.py'}:net"))
    with pytest.raises(Problem, match="not one of its own files"):
        perfed.load(tmp_path / "run")


def test_options_of_the_command_line():
    raw = place_flags({"networks": "mlp,mlr", "model_clients": "a=mlp", "clients": 3}, ["local"])
    assert (raw["model"], raw["data"]) == ({"networks": "mlp,mlr", "clients": "a=mlp"}, {"clients": 3})


def test_own_files_of_one_name_are_refused(home, tmp_path):
    """A run's folder holds copies side by side, so neither may take the other's place."""
    raw = settings(home)
    other = tmp_path / "net.py"
    other.write_text((home / "net.py").read_text() + "# another one")
    raw["model"] = {"networks": [f"{home / 'net.py'}:net", f"{other}:net"]}
    with pytest.raises(Problem, match=r"net.py' and '.*net.py' have the same file name: rename one of them"):
        api.start(from_dict(raw), tmp_path / "run", QUIET)
    (tmp_path / "alike.py").write_text((home / "net.py").read_text())
    raw["model"] = {"networks": ["mlp", f"{tmp_path / 'alike.py'}:net"], "hidden": 5}
    with pytest.raises(Problem, match=r"alike.py' and '.*alike.py' have the same file name"):
        api.start(from_dict(raw), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()
