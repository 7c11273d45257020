"""Killed anywhere, a resumed run ends with the same bytes as one that was never stopped.

Exempt are: times.jsonl and env.json (clock times, when the run was made), .lock (empty), the column `time` of
report/summary.md, and in checkpoints the length of times.jsonl. Everything else is compared byte by byte.
"""

import fnmatch
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import matplotlib.figure  # noqa: F401  imported here once, so that no forked process has to
import pytest
import scipy.stats  # noqa: F401
import sklearn.datasets  # noqa: F401

from perfed.federation.federation import Federation
from perfed.training import files
from perfed.training.observers.log import MetricsLog

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about names that click will rename
    from perfed.cli import app

WORDS = "--rounds 8 --clients 6 --checkpoint-every 2 --epochs 1 --batch-size 50 --hidden 8 --out run".split()  # noqa: SIM905
SEQUENTIAL = ["--engine", "sequential"]
METHODS = ("local", "fedavg", "pgfed")
LIMIT = 60  # seconds that any process here may take


# ---------------------------------------------------------------------- processes


class Child:
    """`perfed WORDS` in a process of its own, forked to save the imports; `prepare` may arm it to die somewhere."""

    def __init__(self, folder, *words, prepare=lambda: None):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._live(list(words), prepare)

    def _live(self, words, prepare):
        code = 99
        try:
            os.setsid()
            signal.alarm(LIMIT)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
            os.chdir(self.folder)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            sys.argv = ["perfed", *words]
            prepare()
            app.main()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self):
        """The exit code; -9 where it was killed."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    @property
    def out(self):
        return (self.folder / "stdout").read_text()

    @property
    def err(self):
        return (self.folder / "stderr").read_text()

    def nobody_is_left(self):
        """Whether every process that it started is gone, too."""
        for _ in range(500):
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        return False


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop(number):
    return lambda: os.kill(os.getpid(), number)


def at_write(pattern, when):
    """Die before a file is written, when half of it is, or after."""

    def prepare():
        real = files.Folder.write

        def write(self, path, content):
            if not fnmatch.fnmatch(str(path), f"run/{pattern}"):
                return real(self, path, content)
            if when == "half":
                whole = (
                    content.encode()
                    if isinstance(content, str)
                    else b"".join([content] if isinstance(content, bytes) else content)
                )
                path.with_name(f".{path.name}.tmp").write_bytes(whole[: len(whole) // 2])
            elif when == "after":
                real(self, path, content)
            return die()

        files.Folder.write = write

    return prepare


def at_line(method, name, round, half=False):
    """Die before a round's lines go into a log, or when half of them have."""

    def prepare():
        real = MetricsLog._append

        def append(self, path, lines):
            if (path.parent.name, path.name, lines[0]["round"]) != (method, name, round):
                return real(self, path, lines)
            if half:
                text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
                with path.open("a") as file:
                    file.write(text[: len(text) // 2])
            return die()

        MetricsLog._append = append

    return prepare


def in_round(kind, round, do=die):
    """Die (or do something else) when a round has been computed and nothing is written yet."""

    def prepare():
        real = Federation.begin

        def step(self, *args):
            ids = real(self, *args)
            if (type(self.method).__name__, self.round) == (kind, round):
                do()
            return ids

        Federation.begin = step

    return prepare


MOMENTS = {
    "before any round": at_line("local", "metrics.jsonl", 1),
    "before the first checkpoint": at_line("local", "rounds.jsonl", 2),
    "in the middle of a line": at_line("local", "metrics.jsonl", 4, half=True),
    "in the middle of a checkpoint's rows": at_write("local/checkpoints/round_00000004.rows", "half"),
    "between the two files of a checkpoint": at_write("local/checkpoints/round_00000004.rows", "after"),
    "in the middle of a checkpoint": at_write("local/checkpoints/round_00000004.safetensors", "half"),
    "after a checkpoint, before an old one goes": at_write("local/checkpoints/round_00000006.safetensors", "after"),
    "between checkpoints of the second method": in_round("FedAvg", 5),
    "between two logs": at_line("fedavg", "times.jsonl", 7),
    "in the export of the models": at_write("fedavg/clients/client_03/model.safetensors", "half"),
    "before a result": at_write("fedavg/result.json", "before"),
    "before the first checkpoint of the last method": in_round("PGFed", 1),
    "after the last model": at_write("pgfed/clients/client_05/model.safetensors", "after"),
    "after the last result": at_write("pgfed/result.json", "after"),
    "in the report": at_write("report/clients.csv", "half"),
}


# ---------------------------------------------------------------------- what must be equal


def digests(folder, whole=True):
    """What each file holds, less what is exempt; a run that is not whole may hold pieces of files."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name in ("times.jsonl", "env.json", ".lock"):
            continue
        content = path.read_bytes()
        if name == "report/summary.md":
            lines = content.decode().splitlines()
            content = "\n".join(line.rpartition("|")[0].rpartition("|")[0] or line for line in lines).encode()
        if path.parent.name == "checkpoints" and path.suffix == ".safetensors" and whole:
            tree = files.load_tree(path)
            del tree["logs"]["times.jsonl"]
            content = repr(json.dumps(tree, default=lambda t: t.numpy().tobytes().hex())).encode()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def assert_same(folder, expected):
    found = digests(folder)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []
    for method in METHODS:
        lines = (folder / method / "metrics.jsonl").read_text().splitlines()
        seen = [(one["round"], one["client"]) for one in map(json.loads, lines)]
        assert len(seen) == len(set(seen)) == 8 * 6
        assert len((folder / method / "times.jsonl").read_text().splitlines()) == 8


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Runs here are compared with those of fresh processes, which draw the picture."""
    from perfed.report.picture import picture

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfed.report.folder.picture", picture)
        yield


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A run that was never stopped, by the installed program in a fresh process."""
    home = tmp_path_factory.mktemp("whole")
    words = [Path(sys.executable).parent / "perfed", "run", *WORDS, *SEQUENTIAL]
    subprocess.run(words, cwd=home, check=True, capture_output=True, timeout=LIMIT)
    found = digests(home / "run")
    assert sum(name.endswith("model.safetensors") for name in found) == 3 * 6
    assert len(set(found.values())) > 40
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory, expected):
    """The folder of the same run, made by a forked process: the same bytes."""
    home = tmp_path_factory.mktemp("forked")
    child = Child(home, "run", *WORDS, *SEQUENTIAL)
    assert child.wait() == 0, child.err
    assert_same(home / "run", expected)
    return home / "run"


@pytest.fixture
def stopped(whole, tmp_path):
    """A run that was killed in round 7 of its last method; checkpoints of rounds 4 and 6 are there."""
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "report")
    shutil.rmtree(tmp_path / "run" / "pgfed" / "clients")
    (tmp_path / "run" / "pgfed" / "result.json").unlink()
    checkpoints = sorted((tmp_path / "run" / "pgfed" / "checkpoints").glob("*.safetensors"))
    assert [path.stem for path in checkpoints] == ["round_00000004", "round_00000006"]
    return checkpoints


def resume(folder, *words):
    child = Child(folder, "resume", "run", *words)
    return child.wait(), child


# ---------------------------------------------------------------------- kill -9


ALONE = ["between checkpoints of the second method", "in the export of the models"]


@pytest.mark.parametrize(
    "moment", [name if name in ALONE else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_killed_there(tmp_path, expected, moment):
    child = Child(tmp_path, "run", *WORDS, *SEQUENTIAL, prepare=MOMENTS[moment])
    assert child.wait() == -signal.SIGKILL, child.err
    assert len(digests(tmp_path / "run", whole=False)) < len(expected)
    code, child = resume(tmp_path)
    assert code == 0, child.err
    assert_same(tmp_path / "run", expected)


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, expected):
    """All the moments in one run: every resumption is killed at the next one."""
    verb = ["run", *WORDS, *SEQUENTIAL]
    for moment, prepare in MOMENTS.items():
        child = Child(tmp_path, *verb, prepare=prepare)
        assert child.wait() == -signal.SIGKILL, f"{moment}: {child.err}"
        verb = ["resume", "run"]
    code, child = resume(tmp_path)
    assert code == 0, child.err
    assert_same(tmp_path / "run", expected)


def kill_at_random(home, expected, draw, engine, longest):
    child = Child(home, "run", *WORDS, *engine)
    time.sleep(draw.uniform(0.05, longest))
    done = child.kill() == 0
    assert child.nobody_is_left()
    if not (home / "run" / "config.toml").exists():
        shutil.rmtree(home / "run", ignore_errors=True)  # killed before it was a run
        child = Child(home, "run", *WORDS, *engine)
        assert child.wait() == 0, child.err
    else:
        code, child = resume(home)
        assert code == 0, child.err
    if engine != SEQUENTIAL:
        expected = {name: value for name, value in expected.items() if name != "config.toml"}
        (home / "run" / "config.toml").unlink()  # names the engine
    assert_same(home / "run", expected)
    return done


@pytest.mark.slow
def test_killed_at_random(tmp_path, expected):
    draw = random.Random(0)
    for at in range(2):
        kill_at_random(tmp_path / str(at), expected, draw, SEQUENTIAL, 1.0)


def test_killed_with_workers(tmp_path, expected):
    """Two processes end with the bytes of one; none of them outlives a killed parent, and none holds its folder."""
    kill_at_random(tmp_path, expected, random.Random(1), ["--engine", "workers", "--workers", "2"], 0.8)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_killed_twenty_times(tmp_path, expected, engine):
    draw = random.Random(2)
    words = SEQUENTIAL if engine == "sequential" else ["--engine", "workers", "--workers", "3"]
    finished = sum(kill_at_random(tmp_path / str(at), expected, draw, words, 2.0) for at in range(20))
    assert finished < 15  # most kills did hit


# ---------------------------------------------------------------------- damage


def test_newest_checkpoint_truncated(tmp_path, stopped, expected):
    stopped[1].write_bytes(stopped[1].read_bytes()[:-100])
    code, child = resume(tmp_path, "--json")
    assert code == 0, child.err
    notices = [line for line in child.err.splitlines() if "going back" in line]
    assert len(notices) == 1
    assert "round_00000006" in notices[0]
    assert json.loads(child.out.splitlines()[-1])["run"] == "run"
    assert_same(tmp_path / "run", expected)


def test_newest_checkpoint_empty(tmp_path, stopped, expected):
    stopped[1].write_bytes(b"")
    code, child = resume(tmp_path)
    assert code == 0, child.err
    assert child.out.count("going back") == 1
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("damage", [lambda content: content[:-100], lambda content: b"", None])
def test_newest_rows_damaged(tmp_path, stopped, expected, damage):
    rows = stopped[1].with_suffix(".rows")
    if damage is None:
        rows.unlink()
    else:
        rows.write_bytes(damage(rows.read_bytes()))
    code, child = resume(tmp_path)
    assert code == 0, child.err
    assert child.out.count("going back") == 1
    assert_same(tmp_path / "run", expected)


def test_both_checkpoints_damaged(tmp_path, stopped):
    for path in stopped:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    code, child = resume(tmp_path)
    assert code == 2
    assert child.err.startswith("perfed: ")
    assert child.err.count("\n") == 1
    assert "damaged" in child.err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_lines_of_a_log_lost(tmp_path, stopped):
    log = tmp_path / "run" / "pgfed" / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:1000])
    code, child = resume(tmp_path)
    assert code == 2
    assert "metrics.jsonl" in child.err


# ---------------------------------------------------------------------- one at a time, and orderly ends


def test_two_processes_on_one_folder(tmp_path, expected):
    def wait_here():
        Path("waiting").touch()
        signal.pause()

    first = Child(tmp_path, "run", *WORDS, *SEQUENTIAL, prepare=in_round("Local", 5, do=wait_here))
    try:
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        (tmp_path / "second").mkdir()
        second = Child(tmp_path / "second", "resume", "../run")
        assert second.wait() == 2
        assert "another process" in second.err
        assert second.err.startswith("perfed: ")
        assert second.err.count("\n") == 1
    finally:
        assert first.kill() == -signal.SIGKILL
    assert resume(tmp_path)[0] == 0
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_asked_to_stop(tmp_path, expected, number, code):
    child = Child(tmp_path, "run", *WORDS, *SEQUENTIAL, prepare=in_round("FedAvg", 5, do=stop(number)))
    assert child.wait() == code, child.err
    assert "Traceback" not in child.err
    assert child.err.splitlines()[-1] == "stopped; continue with: perfed resume run"
    end, child = resume(tmp_path)
    assert end == 0, child.err
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_the_whole_group_is_asked_to_stop(tmp_path, number, code):
    """As a terminal does for Ctrl-C, and service managers for SIGTERM: workers get the signal, too."""
    ask = lambda: os.killpg(os.getpid(), number)
    words = [*WORDS, "--engine", "workers", "--workers", "2"]
    child = Child(tmp_path, "run", *words, prepare=in_round("Local", 5, do=ask))
    assert child.wait() == code, child.err
    assert "Traceback" not in child.err
    assert child.nobody_is_left()


def test_a_finished_run_stays_as_it_is(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    content = lambda: {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    before = content()
    code, child = resume(tmp_path, "--json")
    assert code == 0, child.err
    assert content() == before
    assert [one["method"] for one in json.loads(child.out.splitlines()[-1])["methods"]] == list(METHODS)


def test_a_comparison_that_was_killed(tmp_path):
    words = ["compare", "local", *WORDS[:-2], "--seeds", "2", *SEQUENTIAL]

    def kill_in_seed_1():
        real = Federation.begin

        def step(self, *args):
            if self.seed == 1 and self.round == 3:
                die()
            return real(self, *args)

        Federation.begin = step

    assert Child(tmp_path, *words, "--out", "whole").wait() == 0
    assert Child(tmp_path, *words, "--out", "run", prepare=kill_in_seed_1).wait() == -signal.SIGKILL
    code, child = resume(tmp_path, "--json")
    assert code == 0, child.err
    for seed in ("seed_0", "seed_1"):
        assert digests(tmp_path / "run" / seed) == digests(tmp_path / "whole" / seed)
    one, other = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "whole"))
    assert json.loads(child.out.splitlines()[-1]) == one
    for result in (one, other):
        for method in result["methods"]:
            del method["seconds"], method["runs"]
    assert one["methods"] == other["methods"]
