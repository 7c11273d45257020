"""Everything the README and the guides show runs, in order, in one folder per page; the table of methods is current."""

import ast
import doctest
import importlib
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import experiments
import pytest
from facts import catalogue
from systems import systems

from perfed.cli import main
from perfed.report.methods import table
from perfed.report.table_page import headline
from perfed.report.table_page import page as reproduction
from perfed.report.tables import markdown
from perfed.training.catalog import methods

ROOT = Path(__file__).parent.parent.parent
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
                if line.startswith("$ python examples/"):
                    runpy.run_path(str(ROOT / line.removeprefix("$ python ")), run_name="__main__")
                    continue
                assert line.startswith("$ perfed ")
                command(line[2:], monkeypatch)


SHOWN = [p for p in sorted((ROOT / "src").rglob("*.py")) if ">>> " in p.read_text()]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_what_docstrings_show_is_so(path):
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_examples_run(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(script.read_text(), script.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_readme_method_is_a_method(tmp_path):
    """The method shown in the README passes for FedProx."""
    shown = next(text for kind, text in blocks(ROOT / "README.md") if "class FedProx" in text)
    (tmp_path / "shown.py").write_text('"""FedProx: as shown."""\n\n' + shown)
    from perfed.contract import checks, toy
    from perfed.training.catalog import find

    mine, theirs = (checks.reference(toy.maker(e)()) for e in (find(str(tmp_path / "shown.py")), methods()["fedprox"]))
    checks.compare(mine, theirs, "the README's FedProx", tolerance=0)


def verified():
    """What the tests of each method say, read off their names."""
    rows = []
    for name, entry in methods().items():
        file = ROOT / "tests" / "methods" / f"test_{name}.py"
        assert file.is_file(), f"the method '{name}' has no tests: write tests/methods/test_{name}.py"
        tree = ast.parse(file.read_text())
        tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        said = "; ".join(test.removeprefix("test_").replace("_", " ") for test in tests)
        rows.append((f"[{entry.title}](../src/perfed/methods/{name}.py)", said))
    return markdown(("method", "tests"), rows)


def gpu(path=ROOT / "bench" / "results" / "gpu.json"):
    """What `perfed bench gpu --json` found, as it lies in the folder of results."""
    if not path.is_file():
        return "Not measured yet.\n"
    found = json.loads(path.read_text())
    told = lambda row: "yes" if row["reached"] else "no"
    steps = [
        (r["network"], str(r["clients"]), str(r["batch"]), f"{r['plain_ms']:.1f}", f"{r['perfed_ms']:.3f}",
         f"**{r['times_faster']:.0f}**", f"{r['least']:g}", told(r), f"{r['share_of_peak']:.1%}")
        for r in found["steps"]
    ]  # fmt: skip
    costs = [
        (r["method"], f"{r['round_ms']:.1f}", f"{r['times_fedavg']:.2f}", f"{r['gradients']:g}",
         f"**{r['per_gradient']:.2f}**", f"{r['most']:g}", told(r))
        for r in found["methods"]
    ]  # fmt: skip
    folds = [
        (r["method"], f"{r['round_ms']:.1f}", f"{r['times_fedavg']:.2f}", f"{r['gradients']:.3g}",
         f"**{r['per_gradient']:.2f}**", f"{r['most']:g}", told(r))
        for r in found.get("folds", [])
    ]  # fmt: skip
    runs = [
        (r["run"], str(r["rounds"]), f"**{r['seconds']:.1f}**", f"{r['limit_s']:g}", told(r),
         f"{r['recording_s'] or 0:.1f}", f"{r['useful_slots']:.3f}")
        for r in found["runs"]
    ]  # fmt: skip
    faster = ("network", "clients", "batch", "loop, ms", "perfed, ms", "times faster", "at least", "reached", "of peak")
    dearer = ("method", "round, ms", "times FedAvg", "gradients", "per gradient", "at most", "reached")
    survey = (
        "The clients' part of a round of the survey's methods, measured and counted alike:\n",
        markdown(dearer, folds),
    )
    whole = ("run", "rounds", "seconds", "at most", "reached", "of it recording", "useful slots")
    quick = ", a try-out (`--quick`)" if found["quick"] else ""
    return "\n".join([
        "A step of a whole cohort, against a PyTorch loop over its clients in the same run:\n", markdown(faster, steps),
        "A round of personalised methods, against FedAvg's and the gradients they take:\n", markdown(dearer, costs),
        *(survey if folds else ()),
        "Complete runs, from data in the host's memory to every client's model there:\n", markdown(whole, runs),
        f"([gpu.json](../bench/results/gpu.json): `perfed bench gpu --json --repeats {found['repeats']}` at "
        f"{found['commit']}{quick}, seed 0, medians; {found['device']}, torch {found['torch']}. *Of peak*: of a large "
        f"matrix product's {found['matrix_product_tflops']:.0f} TFLOP/s in the same precision.)\n",
    ])  # fmt: skip


def test_the_gpu_table_shows_what_was_measured(tmp_path):
    assert gpu(tmp_path / "none.json") == "Not measured yet.\n"
    step = {"network": "lenet", "clients": 50, "batch": 64, "plain_ms": 90.0, "perfed_ms": 0.5, "times_faster": 180.0,
            "least": 90, "reached": True, "share_of_peak": 0.125}  # fmt: skip
    cost = {"method": "Ditto", "round_ms": 9.0, "times_fedavg": 2.5, "gradients": 2, "per_gradient": 1.25, "most": 1.2,
            "reached": False}  # fmt: skip
    run = {"run": "PGFed", "rounds": 300, "seconds": 50.04, "limit_s": 75.0, "reached": True, "recording_s": None,
           "useful_slots": 0.9876}  # fmt: skip
    fold = cost | {"method": "FedMD", "gradients": 1.2, "per_gradient": 1.04, "most": 1.3, "reached": True}
    rows = {"steps": [step], "methods": [cost], "folds": [fold], "runs": [run]}
    found = rows | { "device": "a GPU", "torch": "2.13.0", "commit": "abc",
             "repeats": 3, "quick": False, "matrix_product_tflops": 371.2}  # fmt: skip
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    text = gpu(tmp_path / "gpu.json")
    assert "| lenet | 50 | 64 | 90.0 | 0.500 | **180** | 90 | yes | 12.5% |" in text
    assert "| Ditto | 9.0 | 2.50 | 2 | **1.25** | 1.2 | no |" in text
    assert "survey's methods, measured and counted alike:\n\n| method |" in text
    assert "| FedMD | 9.0 | 2.50 | 1.2 | **1.04** | 1.3 | yes |" in text
    assert "| PGFed | 300 | **50.0** | 75 | yes | 0.0 | 0.988 |" in text
    assert "--repeats 3` at abc, seed 0" in text
    assert "a GPU, torch 2.13.0" in text


def test_a_table_of_experiments_has_runs_in_rows_and_seeds_side_by_side(tmp_path):
    row = {"of": "fedprox", "method": "fedprox", "settings": {"mu": 0.1, "samples": 9}, "what": "rounds 6 to 10"}
    plain = row | {"method": "fedavg", "settings": {"samples": 9}}
    lines = [row | {"seed": 0, "value": 0.5}, row | {"seed": 1, "value": 0.75}, plain | {"seed": 1, "value": 0.25},
             row | {"seed": 1, "value": 1234.5, "what": "rounds 16 to 20"}]  # fmt: skip
    expected = """All with `--samples 9`; seeds 0 / 1:

| run | rounds 6 to 10 | rounds 16 to 20 |
| --- | --- | --- |
| `fedavg` | - / 0.250 | - / - |
| `fedprox --mu 0.1` | 0.500 / 0.750 | - / 1,234 |
"""
    assert experiments.table(lines) == expected
    assert experiments.sections(tmp_path / "none.jsonl") == "Not measured yet.\n"


@pytest.mark.parametrize(
    ("page", "mark", "make"),
    [
        ("README.md", "methods", table),
        ("README.md", "headline", headline),
        ("docs/verified.md", "tests", verified),
        ("docs/reproduction.md", "tables", reproduction),
        ("docs/speed.md", "gpu", gpu),
        ("docs/comparison.md", "experiments", experiments.sections),
        ("docs/taxonomy.md", "systems", systems),
        ("docs/catalogue.md", "methods", catalogue),
    ],
)
def test_generated_table_is_current(page, mark, make):
    text = (ROOT / page).read_text()
    head, rest = text.split(f"<!-- {mark} -->\n")
    _, tail = rest.split(f"<!-- /{mark} -->")
    expected = f"{head}<!-- {mark} -->\n{make()}<!-- /{mark} -->{tail}"
    if os.environ.get("PERFED_WRITE_DOCS"):
        (ROOT / page).write_text(expected)
        text = expected
    assert text == expected, "run the tests once with PERFED_WRITE_DOCS=1 to bring the table up to date"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"
