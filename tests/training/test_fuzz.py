"""Run folders, configurations, checkpoints and data that were damaged at random: the same result, or one sentence.

Every case changes one or two things in a copy of a tiny run and its data, and gives the folder to one of the commands.
It has to end with the result that it would have had, or with exit code 2 and one sentence; in seconds, within a bound
of memory, without a word about a bug, and with everything outside the folder as it was.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from tiny import contents, copied, make

from perfed.cli.app import main
from perfed.training import files

SECONDS = 20  # that a case may take
MEMORY = 3 * 2**30  # bytes of addresses that a case may take on top of what the process has
VALUES = [-1, 0, 1, 2, 10**18, 1e308, -1e-9, float("nan"), "", "x", "../../etc", "\x00", True, False, None, [], {}]
VALUES += [[[]], {"a": 1}, "9" * 400, "[red]", 2**63, 0.5, [0], ["local"], "nan", "😀", "\udcff"]


# ---------------------------------------------------------------------- what is changed


def flip(draw, path):
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 3])):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(draw, path):
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def insert(draw, path):
    content, place = path.read_bytes(), draw.randrange(path.stat().st_size + 1)
    more = draw.choice([b"\0" * 8, b"{", b"}", b"\xff", b"\n", b'"', b"[" * 3000, b"9" * 5000, draw.randbytes(20)])
    path.write_bytes(content[:place] + more + content[place:])


def empty(draw, path):
    path.write_bytes(b"")


def remove(draw, path):
    path.unlink()


def grow(draw, path):
    """To four gigabytes, of which the disk holds none."""
    os.truncate(path, 4 * 2**30)


def twice(draw, path):
    path.write_bytes(path.read_bytes() * 2)


def lines(draw, path):
    """Leave out, repeat or exchange lines."""
    every = path.read_bytes().splitlines(keepends=True) or [b""]
    first, second = draw.randrange(len(every)), draw.randrange(len(every))
    every[first] = draw.choice([b"", every[first] * 2, every[second]])
    path.write_bytes(b"".join(every))


def another(draw, path):
    """What another file of the run holds."""
    top = next(parent for parent in path.parents if (parent / "data").is_dir())
    others = [other for other in sorted(top.rglob("*")) if other.is_file() and not other.is_symlink()]
    path.write_bytes(draw.choice(others).read_bytes())


def kind(draw, path):
    """Something else in its place."""
    path.unlink()
    what = draw.choice(["folder", "pipe", "link", "loop", "nothing"])
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        outside = next(parent for parent in path.parents if (parent / "precious").is_dir()) / "precious"
        path.symlink_to({"link": outside / "thesis.txt", "loop": path, "nothing": outside / "none"}[what])


def nodes(value):
    """Every place in nested plain values: what it is in, and its key there."""
    inside = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, child in inside:
        yield value, key
        if isinstance(child, dict | list):
            yield from nodes(child)


def another_value(draw, value):
    """Change or leave out a value somewhere in nested ones."""
    places = list(nodes(value))
    if places:
        owner, key = draw.choice(places)
        if draw.random() < 0.3:
            del owner[key]
        else:
            owner[key] = draw.choice(VALUES)


def json_value(draw, path):
    every = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    place = draw.randrange(len(every))
    value = json.loads(every[place])
    another_value(draw, value)
    if draw.random() < 0.3:  # as an older perfed, which wrote no checksum
        value.pop("seal", None)
    every[place] = json.dumps(value)
    path.write_text("\n".join(every) + "\n")


def setting(draw, path):
    """Give a setting another value, or leave it out."""
    every = path.read_text().splitlines()
    places = [number for number, line in enumerate(every) if " = " in line]
    place = draw.choice(places)
    name = every[place].partition(" = ")[0]
    value = json.dumps(draw.choice(VALUES), ensure_ascii=True).replace("NaN", "nan").replace("null", "[]")
    every[place] = draw.choice(["", f"{name} = {value}", f"{name}x = 1", f"{name} = {draw.randrange(100)}"])
    path.write_text("\n".join(every) + "\n")


def checkpoint(draw, path):
    """A checkpoint with a right checksum that says something else."""
    tree = files.load_tree(path)
    owner, key = draw.choice(list(nodes(tree)))
    value = draw.choice([*VALUES[:9], torch.zeros(3), torch.zeros(0), torch.full((12,), float("nan"))])
    if draw.random() < 0.3:
        del owner[key]
    else:
        owner[key] = value
    with contextlib.suppress(TypeError):
        files.save_tree(path, tree)


ANY = (flip, cut, insert, empty, remove, grow, twice, lines, another, kind)
SPECIAL = {".json": [json_value] * 6, ".jsonl": [json_value] * 6, ".toml": [setting] * 25}


def change(draw, run, data):
    """Change one thing; returns what and where."""
    among = sorted(path for path in (data if draw.random() < 0.15 else run).rglob("*"))
    among = [path for path in among if path.is_file() and not path.is_symlink()]
    if draw.random() < 0.3:  # the rarest and most important
        among = [
            path for path in among if path.name in ("config.toml", "clients.json", "env.json", "result.json")
        ] or among
    path = draw.choice(among)
    ways = [*ANY, *SPECIAL.get(path.suffix, [])]
    if path.name.startswith("round_") and path.suffix == ".safetensors":
        ways += [checkpoint] * 10
    way = draw.choice(ways)
    with contextlib.suppress(Exception):  # it has been changed already, and cannot be read as what it was
        way(draw, path)
    return f"{way.__name__} {path.name} in {path.parent.name}"


# ---------------------------------------------------------------------- what comes of it


def carry_out(words):
    """Exit code, output and complaints of a command."""
    out, err = io.StringIO(), io.StringIO()

    def too_long(*_):
        raise TimeoutError(f"longer than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    argv, sys.argv = sys.argv, ["perfed", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        return end.code, out.getvalue(), err.getvalue()
    finally:
        sys.argv = argv
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def outcome(run):
    """What a run has ended with: every method's scores, and the bytes of its models."""
    ended = {}
    for name in ("local", "mine"):
        path = run / name / "result.json"
        if path.is_file():
            models = {each.parent.name: each.read_bytes() for each in (run / name).rglob("clients/*/model.safetensors")}
            ended[name] = json.loads(path.read_text())["clients"], models
    return ended


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


VERBS = {
    "resume": ["resume", "run", "--quiet"],
    "check": ["models", "run", "--check"],
    "predict": ["predict", "run", "--client", "a", "--input", "x.npy"],
}


MORE = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow), pytest.param(3000, marks=MORE)])
def test_damaged_at_random(home, tmp_path, monkeypatch, count):
    import numpy as np

    monkeypatch.setattr("perfed.report.folder.picture", lambda run: b"")  # takes longer than all the rest
    monkeypatch.setattr("os.fsync", lambda handle: None)
    monkeypatch.chdir(tmp_path)
    expected = outcome(home / "finished")
    assert set(expected) == {"local", "mine"}
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("ten years of work\n" * 100)
    np.save(tmp_path / "x.npy", np.ones((2, 4), dtype="float32"))
    shutil.copytree(home / "finished", tmp_path / "run")
    answer = carry_out(VERBS["predict"])
    assert answer[0] == 0
    shutil.rmtree(tmp_path / "run")
    wrong, ended = [], []
    for case in range(count):
        draw = random.Random(case + (0 if count < 1000 else 10**6))
        shutil.copytree(home / "data", tmp_path / "data")
        run = copied(home, draw.choice(["stopped", "stopped", "finished"]), tmp_path / "run")
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(config.replace(str(home / "data"), str(tmp_path / "data")))
        changes = [change(draw, run, tmp_path / "data") for _ in range(draw.choice([1, 1, 1, 2]))]
        verb = draw.choice(["resume", "resume", "check", "predict"])
        outside = (
            contents(tmp_path / "precious"),
            contents(home / "finished"),
            {path.name for path in tmp_path.iterdir()},
        )
        code, out, err = carry_out(VERBS[verb])
        ended.append(code)
        good = code in (0, 2) and "bug" not in err and "Traceback" not in err
        if code == 2:
            good = good and err.startswith("perfed: ") and err.count("\n") == 1 and len(err) < 1000
        if code == 0 and verb == "resume":
            good = good and all(expected[name] == each for name, each in outcome(run).items())
        if code == 0 and verb == "predict":
            good = good and out == answer[1]
        same = (
            contents(tmp_path / "precious"),
            contents(home / "finished"),
            {path.name for path in tmp_path.iterdir()},
        ) == outside
        if not good or not same:
            wrong.append(
                f"{case}: {verb} after {'; '.join(changes)}: {code}, {err[-300:]!r}{'' if same else ', others changed'}"
            )
        for folder in ("run", "data"):
            shutil.rmtree(tmp_path / folder)
    assert not wrong, "\n".join(wrong)
    assert count / 20 < ended.count(0) < count * 0.8  # damage that is harmless, and damage that is not
