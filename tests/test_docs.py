"""Everything the README and the guides show runs, in order, in one folder per page; the table of methods is current."""

import ast
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from perfed.catalog import methods
from perfed.cli import main
from perfed.report.methods import table
from perfed.report.table_page import page as reproduction
from perfed.report.tables import markdown

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


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_examples_run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(script.read_text(), script.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_readme_method_is_a_method(tmp_path):
    """The method shown in the README passes for FedProx."""
    shown = next(text for kind, text in blocks(ROOT / "README.md") if "class FedProx" in text)
    (tmp_path / "shown.py").write_text('"""FedProx: as shown."""\n\n' + shown)
    from perfed import contract
    from perfed.catalog import find

    mine, theirs = (
        contract.reference(contract.maker(e)()) for e in (find(str(tmp_path / "shown.py")), methods()["fedprox"])
    )
    contract.compare(mine, theirs, "the README's FedProx", tolerance=0)


def verified():
    """What the tests of each method say, read off their names."""
    rows = []
    for name, entry in methods().items():
        tree = ast.parse((ROOT / "tests" / "methods" / f"test_{name}.py").read_text())
        tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        said = "; ".join(test.removeprefix("test_").replace("_", " ") for test in tests)
        rows.append((f"[{entry.title}](../src/perfed/methods/{name}.py)", said))
    return markdown(("method", "tests"), rows)


@pytest.mark.parametrize(
    ("page", "mark", "make"),
    [
        ("README.md", "methods", table),
        ("docs/verified.md", "tests", verified),
        ("docs/reproduction.md", "tables", reproduction),
    ],
)
def test_generated_table_is_current(page, mark, make):
    text = (ROOT / page).read_text()
    head, rest = text.split(f"<!-- {mark} -->\n")
    _, tail = rest.split(f"<!-- /{mark} -->")
    expected = f"{head}<!-- {mark} -->\n{make()}<!-- /{mark} -->{tail}"
    if os.environ.get("PERFED_WRITE_DOCS"):
        (ROOT / page).write_text(expected)
    assert text == expected, "run the tests once with PERFED_WRITE_DOCS=1 to bring the table up to date"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"
