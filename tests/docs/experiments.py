"""The part of docs/comparison.md on each method's own setting: what its tests claim, and what they measured."""

import ast
import json
from pathlib import Path

from perfed.report.tables import markdown
from perfed.training.catalog import methods

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "bench" / "results" / "experiments.jsonl"
TESTS = ROOT / "tests" / "methods" / "beat"


def sections(kept=KEPT):
    """A section for each file of tests that was measured; the first line of what is kept says how."""
    if not kept.is_file():
        return "Not measured yet.\n"
    how, *lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    parts = [
        f"([{kept.name}](../bench/results/{kept.name}): `{how['command']}` at {how['commit']}; {how['machine']}, "
        f"torch {how['torch']}.)\n"
    ]
    for name, entry in methods().items():
        rows = [line for line in lines if line["of"] == name]
        if rows:
            tree = ast.parse((TESTS / f"test_{name}.py").read_text(encoding="utf-8"))
            parts += [f"### {entry.title}\n", f"{ast.get_docstring(tree)}\n", claims(tree), table(rows)]
    return "\n".join(parts)


def claims(tree):
    """The names of tests as sentences, with what is said beside them."""
    lines = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name, said = node.name.removeprefix("test_").replace("_", " "), ast.get_docstring(node) or ""
            lines.append(f"- *{name}*{': ' * bool(said)}{' '.join(said.split())}\n")
    return "".join(lines)


def table(rows):
    """A row for each run that was asked for, a column for each number, with the seeds side by side."""
    first = rows[0]["settings"]
    shared = {key for key in first if all(row["settings"].get(key) == first[key] for row in rows)}
    whats, seeds = sorted({row["what"] for row in rows}, key=natural), sorted({row["seed"] for row in rows})
    found = {}
    for row in rows:
        own = {key: value for key, value in row["settings"].items() if key not in shared}
        found.setdefault(asked(row["method"], own), {})[row["what"], row["seed"]] = row["value"]
    cells = {
        name: [" / ".join(number(values.get((what, seed))) for seed in seeds) for what in whats]
        for name, values in sorted(found.items())
    }
    numbers = " / ".join(map(str, seeds))
    said = f"All with `{asked('', {key: first[key] for key in shared})}`; seeds" if shared else "Seeds"
    return f"{said} {numbers}:\n\n" + markdown(("run", *whats), [(f"`{name}`", *row) for name, row in cells.items()])


def asked(method, settings):
    """A run as its command line has it."""
    words = [method] * bool(method)
    for key, value in sorted(settings.items()):
        name = key.replace("_", "-")
        words.append(f"--{name} {value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}")
    return " ".join(words)


def natural(what):
    """What a heading is sorted by: its numbers as numbers."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in what.split()]


def number(value):
    """A share with three places, a large number without."""
    return "-" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"
