"""Scenarios: what they set, what goes before them, and what their clients are like."""

import tomllib

import pytest
import torch

import perfed
from perfed.core.errors import Problem
from perfed.data import load
from perfed.data.catalog import scenarios as known
from perfed.data.catalog import with_scenario
from perfed.data.config import DataConfig
from perfed.discover import load_member
from perfed.training.config import from_dict, place_flags, to_toml


def data(**settings):
    """The section `data` that options make."""
    return from_dict(place_flags(settings, ["fedavg"])).data


def relabelled(**settings):
    about = load(DataConfig(relabel=1.0, **settings), 0).partition["skews"]["relabel"]
    return torch.tensor(about["groups"]), torch.tensor(about["maps"])


@pytest.mark.parametrize("name", known())
def test_each_is_made_of_settings_that_exist_and_a_description(name):
    settings = load_member("perfed.data.scenarios", name).SETTINGS
    assert known()[name]
    DataConfig(**settings)
    assert not {"name", "dir", "scenario", "partition_seed"} & set(settings)
    found = data(scenario=name)
    assert {key: getattr(found, key) for key in settings} == settings
    assert load(found, 0).train.size == load(DataConfig(**settings), 0).train.size  # of the digits, offline


def test_what_a_user_sets_goes_before_a_scenario_whatever_its_value():
    """Also where it is what the setting would be without a scenario."""
    default = DataConfig()
    found = data(scenario="label_groups", relabel=default.relabel, clients=5)
    assert (found.relabel, found.clients, found.test, found.scenario) == (default.relabel, 5, 0.5, "label-groups")
    assert from_dict({"data": {"scenario": "rotation", "rotate": "0,90,180,270"}}).data.rotate == "0,90,180,270"
    assert data(scenario="label-groups", data="mnist").name == "mnist"


def test_a_configuration_that_was_written_down_is_read_again():
    """What it spells out goes before the scenario that it names."""
    config = from_dict(place_flags({"scenario": "label-swaps", "samples": 0, "stratify": True}, ["fedavg"]))
    assert from_dict(tomllib.loads(to_toml(config))).data == config.data
    assert (config.data.samples, config.data.stratify, config.data.relabel_groups) == (0, True, 0)


@pytest.mark.parametrize("settings", [{}, {"scenario": ""}, {"clients": 3}])
def test_without_a_scenario_nothing_is_set(settings):
    assert with_scenario(settings) == settings


def test_a_wrong_name_is_refused_with_the_nearest(tmp_path):
    for wrong, sentence in (
        ("label-grups", r"there is no scenario 'label-grups'; did you mean 'label-groups'\?"),
        ("x", f"known: {', '.join(sorted(known()))}"),
        ("rotation.py", r"'rotation.py' is a file"),
    ):
        with pytest.raises(Problem, match=sentence):
            data(scenario=wrong)
    with pytest.raises(Problem, match=r"data.scenario must be text, not 3"):
        from_dict({"data": {"scenario": 3}})


def test_clients_that_are_given_are_named_in_place_of_a_partition():
    with pytest.raises(Problem, match=r"leave out data.partition 'iid', or say 'natural' in place of the scenario's"):
        load(data(scenario="label-groups", data="synthetic"), 0)
    clients = load(data(scenario="label-groups", data="synthetic", partition="natural", clients=4), 0)
    assert len(clients) == 4
    assert clients.partition["skews"]["relabel"]["maps"][1] == [(y + 3) % 10 for y in range(10)]


# --- what their clients are like ------------------------------------------------------------------------------------


def test_label_groups_are_halves_and_one_of_them_shifts_by_three():
    clients = load(data(scenario="label-groups"), 3)
    about = clients.partition["skews"]["relabel"]
    assert sorted(about["groups"]) == [0] * 10 + [1] * 10
    assert about["maps"] == [list(range(10)), [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]]
    plain = load(data(scenario="label-groups", relabel=0), 3)
    for split in ("train", "test"):
        table = clients.split(split)
        shift = torch.tensor(about["groups"]).repeat_interleave(torch.tensor(table.size)) * 3
        assert torch.equal(table.y, (plain.split(split).y + shift) % 10)
    assert set(clients.train.size) == {44, 45}
    assert set(clients.test.size) == {45}


def test_label_swaps_are_every_clients_own_and_samples_are_few():
    clients = load(data(scenario="label-swaps"), 0)
    about = clients.partition["skews"]["relabel"]
    maps = torch.tensor(about["maps"])
    assert about["groups"] == list(range(20))
    assert ((maps != torch.arange(10)).sum(1) == 2).all()
    assert len(maps.unique(dim=0)) > 10  # of 45 pairs, 20 draws
    assert set(clients.train.size) == set(clients.test.size) == {30}


def test_rotation_turns_half_of_the_clients_upside_down():
    assert sorted(load(data(scenario="rotation"), 0).partition["skews"]["rotate"]) == [0] * 10 + [180] * 10


def test_dirichlet_has_clients_of_very_different_sizes():
    sizes = load(data(scenario="dirichlet"), 0).train.size
    assert min(sizes) >= 13
    assert max(sizes) > 3 * min(sizes)


# --- the settings that they brought along ---------------------------------------------------------------------------


def test_a_shift_of_labels_grows_from_group_to_group():
    groups, maps = relabelled(relabel_by="shift", relabel_groups=4, relabel_shift=2)
    assert maps[:, 0].tolist() == [0, 2, 4, 6]
    assert torch.equal((maps - maps[:, :1]) % 10, torch.arange(10).expand(4, 10))
    assert groups.bincount().tolist() == [5] * 4


@pytest.mark.parametrize("by", ["permutation", "swap", "shift"])
def test_with_no_groups_each_client_renames_by_itself(by):
    groups, maps = relabelled(relabel_by=by, relabel_groups=0)
    assert groups.tolist() == list(range(20))
    assert (maps.sort(1).values == torch.arange(10)).all()
    assert len(maps.unique(dim=0)) >= 10


def test_groups_that_would_be_alike_are_refused():
    sentence = (
        r"data.relabel_shift is 5, which renames 10 labels in only 2 ways, but data.relabel_groups makes 3 groups"
    )
    with pytest.raises(Problem, match=sentence):
        relabelled(relabel_by="shift", relabel_shift=5, relabel_groups=3)
    with pytest.raises(Problem, match=r"data.relabel_shift is 10, .* in only 1 ways"):
        relabelled(relabel_by="shift", relabel_shift=10, relabel_groups=0)


def test_a_run_and_a_picture_say_who_relabels(tmp_path):
    from perfed.report.partition import heading

    settings = dict(scenario="label-swaps", clients=4, rounds=1, epochs=1, hidden=4, out=tmp_path / "run")
    run = perfed.run("fedavg", **settings, baseline=False, engine="sequential", save_models="none")
    assert run.folder.config().data.scenario == "label-swaps"
    config = data(scenario="label-swaps", clients=4)
    assert "100% relabelled by swap client by client" in heading(load(config, 0), config)
    config = data(scenario="label-groups", clients=4)
    assert "100% relabelled by shift in 2 groups" in heading(load(config, 0), config)
