"""Everything the README and the guides show runs, in order, in one folder per page; the table of methods is current."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from perfed.cli import main
from perfed.report.methods import table

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page):
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text()) if kind in ("console", "python")]


def command(line, monkeypatch):
    monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0, line


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind, text in blocks(page):
        named = re.match(r"# file: (\S+)\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        elif kind == "python":
            exec(compile(text, page.name, "exec"), {"__name__": "snippet"})
        else:
            lines = [line for line in text.splitlines() if line.startswith("$ ")]
            assert lines, f"a console block without a command in {page.name}"
            for line in lines:
                assert line.startswith("$ perfed ")
                command(line[2:], monkeypatch)


def test_readme_method_is_a_method(tmp_path):
    """The method shown in the README passes for FedProx."""
    shown = next(text for kind, text in blocks(ROOT / "README.md") if "class FedProx" in text)
    (tmp_path / "shown.py").write_text('"""FedProx: as shown."""\n\n' + shown)
    from perfed import contract
    from perfed.catalog import find, methods

    mine, theirs = (
        contract.reference(contract.maker(e)()) for e in (find(str(tmp_path / "shown.py")), methods()["fedprox"])
    )
    contract.compare(mine, theirs, "the README's FedProx", tolerance=0)


def test_table_of_methods_is_current():
    text = (ROOT / "README.md").read_text()
    head, rest = text.split("<!-- methods -->\n")
    _, tail = rest.split("<!-- /methods -->")
    expected = f"{head}<!-- methods -->\n{table()}<!-- /methods -->{tail}"
    if os.environ.get("PERFED_WRITE_DOCS"):
        (ROOT / "README.md").write_text(expected)
    assert text == expected, "run the tests once with PERFED_WRITE_DOCS=1 to bring the README's table up to date"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"
