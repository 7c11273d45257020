"""Nothing below a run folder is followed or opened through a link, and nothing but plain files is opened there."""

import importlib.util
import os
import py_compile
import shutil
import sys
from pathlib import Path

import pytest
from tiny import METHOD, NET, QUIET, contents, copied, make, settings

import perfed
from perfed import api
from perfed.core.errors import Problem
from perfed.studies.compare import Comparison
from perfed.training import files
from perfed.training.config import from_dict
from perfed.training.newcomers import personalise


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def precious(tmp_path):
    """Somebody's files, which no run may touch."""
    folder = tmp_path / "precious"
    (folder / "inner").mkdir(parents=True)
    (folder / "thesis.txt").write_text("ten years of work\n" * 1000)
    (folder / "inner" / "round_00000001.safetensors").write_text("mine")
    return folder


def use(run):
    """Everything that is done with a run folder; what is refused is refused in one sentence."""
    load = lambda: perfed.load(run)
    doings = [
        lambda: api.resume(run, QUIET),
        lambda: load().client("a", "mine").model(),
        lambda: load().folder.method("mine").scores(),
        lambda: load().folder.method("mine").seconds(),
        lambda: load().folder.method("mine").server(),
        lambda: load().folder.environment(),
        lambda: personalise(load(), "local", load().config.data, 1, 0, run.with_name(f"{run.name}_joined"), QUIET),
    ]
    refused = []
    for do in doings:
        try:
            do()
        except Problem as problem:
            refused.append(str(problem))
    return refused


FILES = (".lock", "config.toml", "env.json", "clients.json", "files/net.py", "files/mine.py", "report/summary.md")
FILES += tuple(f"mine/{name}" for name in ("metrics.jsonl", "rounds.jsonl", "times.jsonl", "result.json"))
FILES += ("mine/server.safetensors", "mine/checkpoints/round_00000003.safetensors", "mine/.result.json.tmp")
FILES += ("mine/checkpoints/round_00000003.rows", "mine/clients/a/model.safetensors", "local/result.json")
FILES += ("mine/checkpoints/.round_00000003.rows.tmp", "report/.summary.md.tmp", "mine/clients/a/card.md")
FOLDERS = ("files", "mine", "mine/checkpoints", "mine/clients", "mine/clients/a", "report", "local", "mine/best")
FOLDERS += ("local/newcomers", "local/newcomers/a")
SOME = (".lock", "config.toml", "files/net.py", "mine/metrics.jsonl", "mine/checkpoints", "mine/clients", "report")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("stopped", SOME),
        *[pytest.param(kind, FILES + FOLDERS, marks=pytest.mark.slow) for kind in ("stopped", "finished")],
    ],
)
def test_links_are_not_followed(home, tmp_path, precious, monkeypatch, kind, names):
    """A link in place of every file and folder: to a file of somebody's, to a folder, to nothing, and to a twin."""
    monkeypatch.setattr("perfed.report.folder.picture", lambda run: b"")  # takes longer than all the rest
    before, twin = contents(precious), copied(home, kind, tmp_path / "twin")
    same = contents(twin)
    for number, name in enumerate(names):
        targets = [precious / "thesis.txt"] if name in FILES else [precious / "inner", precious]
        for turn, target in enumerate([*targets, tmp_path / "nothing", twin / name]):
            run = copied(home, kind, tmp_path / f"{number}_{turn}")
            link = run / name
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
            link.symlink_to(target)
            refused = use(run)
            assert contents(precious) == before, name
            assert contents(twin) == same, name
            assert not (tmp_path / "nothing").exists(), name
            assert all("link" in text or "not one of its own" in text or "missing" in text for text in refused), refused
            shutil.rmtree(run)


def test_a_link_is_named(home, tmp_path, precious):
    run = copied(home, "stopped", tmp_path / "run")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(precious / "thesis.txt")
    with pytest.raises(Problem, match=r"run/\.lock' is a link, and nothing in a run folder is followed elsewhere"):
        api.resume(run, QUIET)


def test_the_folder_itself_may_be_reached_by_a_link(home, tmp_path):
    copied(home, "stopped", tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert api.resume(tmp_path / "link", QUIET).result("mine")["rounds"] == 4


@pytest.mark.parametrize("name", ["mine/metrics.jsonl", "mine/rounds.jsonl", "mine/times.jsonl"])
def test_a_log_with_another_name_elsewhere_is_not_changed(home, tmp_path, name):
    run = copied(home, "stopped", tmp_path / "run")
    (run / name).write_bytes((run / name).read_bytes() + b'{"half": ')
    os.link(run / name, tmp_path / "other")
    before = (tmp_path / "other").read_bytes()
    with pytest.raises(Problem, match="hard link"):
        api.resume(run, QUIET)
    assert (tmp_path / "other").read_bytes() == before


@pytest.mark.parametrize("name", ["config.toml", "clients.json", ".lock", "mine/metrics.jsonl", "local/result.json"])
def test_a_pipe_is_not_waited_for(home, tmp_path, name):
    run = copied(home, "stopped", tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(Problem, match=r"not a plain file|cannot open"):
        api.resume(run, QUIET)


def test_bytecode_beside_a_users_file_is_neither_run_nor_written(home, tmp_path, monkeypatch):
    """What Python keeps in __pycache__ would be run in place of the file that is there to be read."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    run = copied(home, "finished", tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (run / "files" / "__pycache__").symlink_to(tmp_path / "elsewhere")
    model = lambda: perfed.load(run).client("a", "mine").model()
    model()
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n" + NET)
    cached = importlib.util.cache_from_source(str(run / "files" / "net.py"))
    py_compile.compile(tmp_path / "evil.py", cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    model()
    assert not (tmp_path / "canary").exists()


def test_paths_that_lead_out(tmp_path):
    (tmp_path / "run").mkdir()
    folder = files.Folder(tmp_path / "run")
    with pytest.raises(Problem, match="leads out"):
        folder.write(folder.root / ".." / "a" / "b", "text")
    with pytest.raises(ValueError, match="not in the subpath"):
        folder.read(Path("/etc/passwd"))


# ---------------------------------------------------------------------- comparisons


@pytest.fixture
def comparison(home, tmp_path):
    """A comparison with a method and a network of the user's own, of which nothing has been run."""
    (tmp_path / "data").symlink_to(home / "data")
    return Comparison.create(from_dict(settings(tmp_path)), 2, tmp_path / "compare")


def test_a_comparison_has_its_own_files(comparison, tmp_path, monkeypatch):
    """It is resumed without the files it was made with, and has what they said then."""
    monkeypatch.setattr("perfed.report.folder.picture", lambda run: b"")
    for name in ("mine.py", "net.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    again = Comparison.open(comparison.folder)
    assert [method["method"] for method in api.compare(again, QUIET)["methods"]] == ["local", "mine"]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["../cmp/evil.py", "{}/evil.py", "files/../../evil.py", "evil.py", "files/evil.py", "../evil"]
)
@pytest.mark.parametrize("what", ["method", "network"])
def test_a_comparison_names_no_code_outside_it(comparison, tmp_path, name, what):
    folder, evil = comparison.folder, f"open({str(tmp_path / 'canary')!r}, 'w')\n{METHOD}\n{NET}"
    (tmp_path / "cmp").mkdir()
    for path in (tmp_path / "evil.py", tmp_path / "evil", tmp_path / "cmp" / "evil.py", folder / "evil.py"):
        path.write_text(evil)
    (folder / "files" / "evil.py").symlink_to(tmp_path / "evil.py")
    was = "files/mine.py" if what == "method" else "files/net.py:net"
    new = name.format(tmp_path) + ":net" * (what == "network")
    path = folder / "compare.toml"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, new))
    with pytest.raises(Problem, match=r"not one of its own files|is a link"):
        Comparison.open(folder)
    assert not (tmp_path / "canary").exists()


def test_links_in_a_comparison_are_not_followed(comparison, tmp_path, precious):
    before = contents(precious)
    for name in ("compare.toml", "compare.json", "files"):
        path, kept = comparison.folder / name, tmp_path / "kept"
        path.rename(kept)
        path.symlink_to(kept)
        with pytest.raises(Problem, match="is a link"):
            Comparison.open(comparison.folder)
        path.unlink()
        kept.rename(path)
    (comparison.folder / "result.json").symlink_to(precious / "thesis.txt")
    (comparison.folder / "compare.md").symlink_to(precious / "thesis.txt")
    api.compare(Comparison.open(comparison.folder), QUIET)
    assert contents(precious) == before


@pytest.mark.parametrize(
    "plan", ["[]", '{"seeds": []}', "{}", '{"seeds": 3}', '{"seeds": ["0"]}', '{"seeds": [0], "target": "x"}', "{"]
)
def test_a_plan_that_is_none(comparison, plan):
    (comparison.folder / "compare.json").write_text(plan)
    with pytest.raises(Problem, match=r"compare.json' is damaged"):
        Comparison.open(comparison.folder)
