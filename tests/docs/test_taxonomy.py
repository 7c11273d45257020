"""The survey's tree: every method and every system stands on the page, every file that it names is there."""

import re

import pytest
from facts import listed
from systems import OUTSIDE, SYSTEMS, place_of
from test_docs import ROOT

from perfed.training.catalog import methods

TAXONOMY, CATALOGUE = (ROOT / "docs" / f"{name}.md" for name in ("taxonomy", "catalogue"))


def missing(page: str, facts: str) -> list[str]:
    """Methods of `perfed list methods --json` that a page of the tree does not lead to, or that have no section."""
    leads = lambda name: f"](../src/perfed/methods/{name}.py)" in page and f"](catalogue.md#{name})" in page
    return [name for name in listed() if not leads(name) or f"\n## {name}\n" not in facts]


def gone(page: str) -> list[str]:
    """Files and sections that a page of the tree leads to, and that are not there."""
    files = [name for name in re.findall(r"\]\((\.\./[^)#]+)\)", page) if not (TAXONOMY.parent / name).is_file()]
    return files + [name for name in re.findall(r"\]\(catalogue\.md#([^)]+)\)", page) if name not in listed()]


def test_every_method_is_on_the_page_and_every_file_is_there():
    page, facts = TAXONOMY.read_text(), CATALOGUE.read_text()
    assert missing(page, facts) == []
    assert gone(page) == []
    without = "".join(line for line in page.splitlines(keepends=True) if "catalogue.md#ditto" not in line)
    assert missing(without, facts) == ["ditto"]
    assert missing(page, facts.replace("## ditto\n", "")) == ["ditto"]
    assert gone(page.replace("ditto", "dito")) == ["../src/perfed/methods/dito.py", "dito"]


def test_the_page_has_all_systems():
    assert len(SYSTEMS) == 63
    page = TAXONOMY.read_text()
    assert [system.title for system in SYSTEMS if f"\n| {system.title} |" not in page] == []
    beside = ("FedEM", "pFedBayes", "FLIX", "Known clusters, AL2GD (Lyu et al.)", "HierFAVG")
    sources = {system.title: system.source for system in SYSTEMS}
    assert {sources[title] for title in beside} == {"pFedMT, related work"}


def test_methods_that_carry_out_no_system_stand_where_their_category_says():
    known = methods()
    assert place_of(known["fedbn"])[2] == "Parameter decoupling"
    assert place_of(known["fedavg"]) == (OUTSIDE, "", "")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "fedprox",
            ["1 P down, 1 P up; sums", "| `--mu` | 0.1 | at least 0 |", "`perfed run fedprox --data digits` |"],
        ),
        ("local", ["0 P down, 0 P up; nothing is sent", "may differ from client to client", "none: what every method"]),
        ("fedalign", ["`perfed run fedalign --data digits --model resnet --norm batch`", "| `--clip` | 10.0 |"]),
        ("zhao", ["labelled public ones, which each client is sent", "sums over clients", "| clients' own, and"]),
        ("ifca", ["sums over each group of clients", "2 P down"]),
    ],
)
def test_facts_are_those_of_the_file(name, facts):
    section = CATALOGUE.read_text().split(f"\n## {name}\n")[1].partition("\n## ")[0]
    assert [fact for fact in facts if fact not in section] == []
