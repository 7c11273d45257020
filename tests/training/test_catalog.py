"""Methods are read from their files: only from those that are named."""

from pathlib import Path

import pytest

from perfed.contract.toy import maker
from perfed.core.errors import Problem
from perfed.training import catalog
from perfed.training.config import assign, from_dict, place_flags


@pytest.fixture
def parsed(monkeypatch):
    """The names of the files that are parsed, in order, from the first on."""
    names = []
    parse = catalog.parse
    monkeypatch.setattr(catalog, "parse", lambda path: names.append(path.name) or parse(path))
    for cached in (catalog._shipped, catalog._classes, catalog.common):
        cached.cache_clear()
    return names


def test_a_name_reads_its_file_and_what_it_derives_from(parsed):
    assert catalog.find("pgfedmo").name == "pgfedmo"
    assert sorted(parsed) == ["method.py", "pgfed.py", "pgfedmo.py"]
    catalog.find("pgfedmo")
    assert len(parsed) == 3


def test_a_configuration_reads_its_methods_alone(parsed):
    raw = place_flags({"rounds": 3, "lr": 0.2, "mu": 0.5}, ["fedprox"])
    assign(raw, "fedprox.mu=0.1")
    from_dict(raw)
    assert sorted(set(parsed)) == ["fedavg.py", "fedprox.py", "method.py"]


def test_a_wrong_name_reads_nothing(parsed):
    with pytest.raises(Problem, match="did you mean 'fedavg'"):
        catalog.find("fedavgg")
    assert parsed == []


def test_a_list_reads_every_file_and_none_three_times(parsed):
    assert list(catalog.methods()) == catalog.names()
    own = {path.name for path in (Path(catalog.__file__).parent.parent / "methods").glob("*.py")} - {"__init__.py"}
    assert set(parsed) == {"method.py", *own}
    assert max(map(parsed.count, parsed)) <= 2  # as a method, and as the base of another


def test_a_users_file_is_read_anew(tmp_path):
    path = tmp_path / "mine.py"
    text = "from perfed.methods.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    share: float = {}\n"
    for value in (0.5, 0.75):
        path.write_text(text.format(value))
        assert catalog.find(str(path)).fields["share"].default == value


def test_a_setting_may_have_another_value_in_the_contracts_toy(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom perfed.core.fields import hyper\n"
        "from perfed.methods.fedavg import FedAvg\n\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        '    steps: int = hyper(500, "steps of a generator", at_least=0, toy=0)\n'
    )
    entry = catalog.find(str(path))
    assert (entry.fields["steps"].default, entry.fields["steps"].bounds) == (500, {"at least": 0})
    assert maker(entry)().steps == 0
    assert maker(entry)(steps=7).steps == 7


def test_a_method_says_whether_it_is_made_after_descriptions(tmp_path):
    path = tmp_path / "mine.py"
    body = "from perfed.methods.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    reference = "A. Author: A title.\nhttps://arxiv.org/abs/1"
    for second, told in (
        (f"After the description\nof {reference}", True),
        (f"{reference} After the description of it.", False),
        ("After the description of somebody without a source.", False),
    ):
        path.write_text(f'"""Mine: an idea.\n\n{second}\n\nMore.\n"""\n{body}')
        assert catalog.find(str(path)).described is told
        assert catalog.find(str(path)).summary == "an idea"
