"""Wrong input ends in one sentence: exit code 2, one line on standard error, nothing else, nothing left behind."""

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import perfed
from perfed.training.folder import RunFolder

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about names that click will rename
    from perfed.cli import main

TINY = ["--rounds", "2", "--clients", "4", "--epochs", "1", "--engine", "sequential"]


class Bomb:
    """A pickle that does something when it is opened: here, make a file called canary."""

    def __reduce__(self):
        return Path.touch, (Path("canary"),)


def call(monkeypatch, capsys, *words):
    """(exit code, standard output, standard error) of `perfed WORDS`."""
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def everything(folder="."):
    """Every path under a folder with its content; .lock holds nothing, whoever opened it last."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.name not in (".lock", "__pycache__", ".hypothesis"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths if path.suffix != ".pyc"}


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """`refused(*words)`: the one sentence that the command ends with, in a folder that stays as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def check(*words, says=()):
        before = everything()
        code, out, err = call(monkeypatch, capsys, *words)
        assert code == 2, f"exit code {code}: {err}"
        assert out == ""
        assert err.startswith("perfed: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert "a bug?" not in err
        assert everything() == before
        for word in [says] if isinstance(says, str) else says:
            assert word in err
        return err

    return check


# ---------------------------------------------------------------------- words on the command line

WORDS = {
    # name: (words, what the sentence must hold). None of these needs torch.
    "method": (["run", "fedavgg"], ["'fedavgg'", "did you mean 'fedavg'?"]),
    "method far from all": (["run", "zzzzzz"], ["'zzzzzz'", "known:", "pgfed"]),
    "command": (["rnu"], ["'rnu'", "did you mean 'run'?"]),
    "option with a value": (["run", "--engin", "sequential"], ["engin", "did you mean 'engine'?"]),
    "option without a value": (["run", "--rouns"], ["--rouns", "did you mean 'rounds'?"]),
    "option of another method": (["run", "ditto", "--mu", "1"], ["'mu' is a setting of", "pgfed", "and ditto has lam"]),
    "option of other methods": (["run", "fedavg,apfl", "--lamb", "1"], ["'lamb'"]),
    "option of another, and nearly one": (["run", "ditto", "--la", "1"], ["did you mean 'lam'?"]),
    "a file for a treatment": (["run", "--wire", "./x.py"], ["run.wire", "only methods and networks may be files"]),
    "a file for data": (["run", "--data", "x.py"], ["data.name", "only methods and networks may be files"]),
    "a file for a partition": (["run", "--partition", "a/b"], ["data.partition", "only methods and networks may be"]),
    "underscores for dashes": (["run", "--data", "fashion_mnst"], ["did you mean 'fashion-mnist'?"]),
    "more workers than anybody has": (["run", "--workers", "1000"], ["run.workers must be at most 256, not 1000"]),
    "option of another verb": (["list", "--rounds", "3"], ["--rounds"]),
    "value left out": (["run", "--rounds"], ["--rounds", "argument"]),
    "value of a method's option left out": (["run", "pgfed", "--mu"], ["--mu", "needs a value"]),
    "data set": (["run", "--data", "digit"], ["data.name", "did you mean 'digits'?"]),
    "partition": (["run", "--partition", "dirichle"], ["data.partition", "did you mean 'dirichlet'?"]),
    "model": (["run", "--model", "lenett"], ["model.name", "did you mean 'lenet'?"]),
    "engine": (["run", "--engine", "warp"], ["run.engine", "sequential", "vectorised"]),
    "precision": (["run", "--precision", "float16"], ["run.precision", "float32"]),
    "list kind": (["list", "method"], ["'method'", "did you mean 'methods'?"]),
    "method to check": (["check", "fedprx"], ["'fedprx'", "did you mean 'fedprox'?"]),
    "negative": (["run", "--rounds", "-3"], ["run.rounds", "at least 1"]),
    "negative of a method": (["run", "pgfed", "--mu", "-1"], ["pgfed.mu", "at least 0"]),
    "zero rounds": (["run", "--rounds", "0"], ["run.rounds", "at least 1"]),
    "zero learning rate": (["run", "--lr", "0"], ["train.lr", "above 0"]),
    "nan": (["run", "--lr", "nan"], ["train.lr", "finite"]),
    "inf": (["run", "--alpha", "inf"], ["data.alpha", "finite"]),
    "huge": (["run", "--lr", "1e99"], ["train.lr", "too large"]),
    "huge whole number": (["run", "--set", "run.rounds=1e99"], ["run.rounds", "too large"]),
    "too many digits": (["run", "--rounds", "1" * 5000], ["run.rounds"]),
    "too many digits in --set": (["run", "--set", "run.rounds=" + "1" * 5000], ["run.rounds"]),
    "text": (["run", "--rounds", "many"], ["run.rounds", "whole number", "'many'"]),
    "fraction": (["run", "--rounds", "2.5"], ["run.rounds", "whole number"]),
    "true": (["run", "--set", "run.rounds=true"], ["run.rounds", "whole number"]),
    "number for true or false": (["run", "--set", "run.compile=1"], ["run.compile", "true or false"]),
    "participation 0": (["run", "--participation", "0"], ["run.participation", "above 0"]),
    "participation 1.5": (["run", "--participation", "1.5"], ["run.participation", "at most 1"]),
    "nothing left to train on": (["run", "--test", "0.6", "--val", "0.5"], ["data.test + data.val"]),
    "seed": (["run", "--seed", "-1"], ["run.seed"]),
    "--set without =": (["run", "--set", "run.rounds"], ["section.key=value", "run.rounds"]),
    "--set without a key": (["run", "--set", "=3"], ["section.key=value"]),
    "--set an unknown key": (["run", "--set", "run.round=3"], ["run.round", "did you mean 'rounds'?"]),
    "--set an unknown section": (["run", "--set", "rnu.rounds=3"], ["'rnu'", "did you mean 'run'?"]),
    "--set a section": (["run", "--set", "run=3"], ["'run'", "table"]),
    "--set below a value": (["run", "--set", "run.rounds=1", "--set", "run.rounds.x=3"], ["run.rounds"]),
    "settings of a method not in the run": (["run", "fedavg", "--set", "pgfed.mu=1"], ["'pgfed'", "not in this run"]),
    "an unknown setting of a method": (["run", "pgfed", "--set", "pgfed.nu=1"], ["'nu'", "pgfed"]),
    "no configuration file": (["run", "-c", "none.toml"], ["none.toml"]),
    "no method file": (["run", "./none.py"], ["./none.py"]),
    "no model file": (["run", "--model", "none.py:make"], ["none.py"]),
    "no function of the model file": (["run", "--model", "none.py"], ["path.py:factory"]),
    "no data folder": (["run", "--data", "folder", "--data-dir", "nowhere"], ["nowhere"]),
    "data folder not named": (["run", "--data", "folder"], ["--data-dir"]),
    "partition of data with clients": (["run", "--data", "synthetic", "--partition", "iid"], ["'synthetic'", "'iid'"]),
    "seeds": (["compare", "--seeds", "0"], ["--seeds"]),
    "seeds as text": (["compare", "--seeds", "two"], ["--seeds"]),
    "no file to predict on": (["predict", "x"], ["--client"]),
    "new with a bad name": (["new", "1st"], ["'1st'"]),
    "new with a path": (["new", "../x"], ["'../x'"]),
    "new with a word of Python": (["new", "class"], ["'class'"]),
    "resume of nothing": (["resume", "none"], ["none"]),
    "models of nothing": (["models", "none"], ["none"]),
    "a name too long for a file": (["run", "./" + "x" * 300 + ".py"], ["long"]),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(refused, name):
    words, says = WORDS[name]
    refused(*words, says=says)


IN_ONE_PROCESS = """
import json, sys, time
from perfed.cli import main
for words in json.load(sys.stdin):
    sys.argv = ["perfed", *words]
    began = time.process_time()
    try:
        main()
    except SystemExit as end:
        sys.stdout.write(json.dumps([end.code, time.process_time() - began, "torch" in sys.modules]) + "\\n")
"""
NEEDS_TORCH = {"resume of nothing", "models of nothing"}  # a run folder is opened by code that imports torch


def test_without_torch(tmp_path):
    """Mistakes that the words alone show are refused before torch is imported, well within a second."""
    words = [words for name, (words, _) in WORDS.items() if name not in NEEDS_TORCH]
    ended = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=True,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(lines) == len(words) >= 50
    for these, (code, seconds, torch_is_there) in zip(words, lines, strict=True):
        assert (code, torch_is_there) == (2, False), these
        assert seconds < 1, these
    errors = ended.stderr.splitlines()
    assert len(errors) == len(words)
    assert all(line.startswith("perfed: ") for line in errors)
    assert not list(tmp_path.iterdir())


def test_the_command_itself(tmp_path):
    """One call of the installed program, from the start."""
    ended = subprocess.run(
        [Path(sys.executable).parent / "perfed", "run", "fedavgg"], capture_output=True, timeout=30, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert ended.stdout == b""
    assert ended.stderr.startswith(b"perfed: there is no method 'fedavgg'; did you mean 'fedavg'?")


# ---------------------------------------------------------------------- configuration files

FILES = {
    "not TOML": ("rounds === 3", "not valid TOML"),
    "a key twice": ("[run]\nrounds = 3\nrounds = 4\n", "not valid TOML"),
    "a section twice": ("[run]\nrounds = 3\n[run]\nseed = 4\n", "not valid TOML"),
    "brackets without end": ("a = " + "[" * 5000, "not valid TOML"),
    "a number without end": ("[run]\nrounds = " + "1" * 5000, "not valid TOML"),
    "unknown section": ("[runs]\nrounds = 3\n", "did you mean 'run'?"),
    "unknown key": ("[run]\nround = 3\n", "did you mean 'rounds'?"),
    "unknown key of train": ("[train]\nlearning_rate = 3\n", "train.learning_rate"),
    "unknown key of a method": ("methods = ['pgfed']\n[method.pgfed]\nmuu = 3\n", "did you mean 'mu'?"),
    "a method not in the run": ("methods = ['fedavg']\n[method.pgfed]\nmu = 3\n", "not in this run"),
    "text for a number": ("[run]\nrounds = 'many'\n", "run.rounds"),
    "a list for a number": ("[run]\nrounds = [3]\n", "run.rounds"),
    "a table for a number": ("[run.rounds]\nx = 3\n", "run.rounds"),
    "a date for a number": ("[run]\nrounds = 2024-01-01\n", "run.rounds"),
    "true for a number": ("[train]\nlr = true\n", "train.lr"),
    "nan for a number": ("[train]\nlr = nan\n", "train.lr"),
    "a number for text": ("[data]\nname = 3\n", "data.name"),
    "a null character": ('[data]\nname = "a\\u0000"\n', "null"),
    "a value for a section": ("run = 3\n", "'run' must be a table"),
    "a value for a method": ("[method]\npgfed = 3\n", "method.pgfed"),
    "a list of sections": ("[[run]]\nrounds = 3\n", "'run' must be a table"),
    "a number of methods": ("methods = 3\n", "list of method names"),
    "one method as text": ("methods = 'fedavg'\n", "list of method names"),
    "no methods": ("methods = []\n", "list of method names"),
    "numbers as methods": ("methods = [1]\n", "list of method names"),
    "a run too long": ("[run]\nrounds = 1_000_000_000\n", "run.rounds"),
}


@pytest.mark.parametrize("name", FILES)
def test_configuration_files(refused, name):
    text, says = FILES[name]
    Path("c.toml").write_text(text)
    refused("run", "-c", "c.toml", says=says)


def test_configuration_that_is_not_text(refused):
    Path("c.toml").write_bytes(b"\xff\xfe\x00")
    refused("run", "-c", "c.toml", says="not valid TOML")


def test_configuration_that_is_a_folder(refused):
    Path("c.toml").mkdir()
    refused("run", "-c", "c.toml", says="c.toml")


def test_an_option_below_a_value(refused):
    Path("c.toml").write_text("[method]\npgfed = 3\n")
    refused("run", "-c", "c.toml", "--mu", "0.1", says="method.pgfed")


# ---------------------------------------------------------------------- the user's own methods and networks

METHOD = """
from dataclasses import dataclass
from perfed.methods.fedavg import FedAvg
{before}
@dataclass(frozen=True)
class Mine(FedAvg):
    {inside}
"""
METHODS = {
    "syntax": ("def (:\n", "not valid Python in line 1"),
    "not text": (b"\xff\xfe\x00", "not valid Python"),
    "no method": ("class Mine:\n    pass\n", "holds no method"),
    "empty": ("", "holds no method"),
    "an unknown base": ("from perfed.methods.fedsomething import X\nclass Mine(X):\n    pass\n", "fedsomething"),
    "a default that must be computed": (METHOD.format(before="", inside="x: float = 2 * 3"), "plain value"),
    "a default that is a name": (METHOD.format(before="D = 1.0", inside="x: float = D"), "plain value"),
    "raises": (METHOD.format(before="raise OSError('no such luck')", inside="pass"), "no such luck"),
    "leaves": (METHOD.format(before="raise SystemExit(0)", inside="pass"), "cannot be loaded"),
    "imports what is not there": (METHOD.format(before="import not_there", inside="pass"), "not_there"),
    "not a dataclass": ("from perfed import Method\nclass Mine(Method):\n    pass\n", "needs @dataclass(frozen=True)"),
    "functions missing": (
        METHOD.format(before="from perfed import Method", inside="pass").replace("Mine(FedAvg)", "Mine(Method)"),
        "not a whole method",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_method_files(refused, name):
    content, says = METHODS[name]
    Path("mine.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("run", "./mine.py", *TINY, says=("mine.py", says))


def test_method_file_called_local(refused):
    Path("local.py").write_text(METHOD.format(before="", inside="pass"))
    refused("run", "./local.py", *TINY, says="local.py")


def test_the_name_of_a_method_file(refused):
    """Without the dot and the end, it is the name of nothing."""
    Path("mine.py").write_text(METHOD.format(before="", inside="pass"))
    refused("run", "mine", *TINY, says=["there is no method 'mine'", "did you mean './mine.py'?"])


def test_two_methods_of_one_name(refused):
    Path("fedavg.py").write_text(METHOD.format(before="", inside="pass"))
    refused("run", "./fedavg.py", "fedavg", *TINY, says="same name")


def test_new_does_not_overwrite(refused):
    Path("mine.py").write_text("precious\n")
    refused("new", "mine", says="exists already")


NETWORKS = {
    "no such function": ("def made(shape, classes):\n    pass\n", "did you mean 'made'?"),
    "returns something else": ("def make(shape, classes):\n    return 3\n", "returned int"),
    "raises": ("def make(shape, classes):\n    raise KeyError('lost')\n", "raised KeyError"),
    "file raises": ("1 / 0\n", "ZeroDivisionError"),
    "syntax": ("def (:\n", "SyntaxError"),
    "other samples": ("from torch import nn\ndef make(shape, classes):\n    return nn.Linear(3, 4)\n", "(1, 8, 8)"),
    "other classes": (
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n",
        "10 classes",
    ),
    "no parameters": ("from torch import nn\ndef make():\n    return nn.Flatten()\n", "10 classes"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_model_files(refused, name):
    text, says = NETWORKS[name]
    Path("net.py").write_text(text)
    refused("run", "fedavg", *TINY, "--model", "net.py:make", says=("net.py", says))


# ---------------------------------------------------------------------- data


def save(name="data/a.npz", **arrays):
    Path("data").mkdir(exist_ok=True)
    np.savez(name, **arrays)


def good():
    return {"x": np.arange(80.0).reshape(20, 4), "y": np.arange(20) % 2}


def spoil(**changed):
    return lambda: save(**{**good(), **changed})


def infinite():
    x = good()["x"]
    x[7, 1] = np.inf
    save(x=x, y=good()["y"])


def half_a_file():
    save(**good())
    whole = Path("data/a.npz").read_bytes()
    Path("data/a.npz").write_bytes(whole[: len(whole) // 2])


def only_one_sample_each():
    for name in "abc":
        save(f"data/{name}.npz", x=np.zeros((1, 4)), y=np.zeros(1))


def no_test_samples():
    save(x_train=np.zeros((5, 4)), y_train=np.zeros(5), x_test=np.zeros((0, 4)), y_test=np.zeros(0))


def other_shapes():
    save(**good())
    save("data/b.npz", x=np.zeros((20, 5)), y=np.zeros(20))


def text(content, name="data/a.csv"):
    def write():
        Path("data").mkdir()
        Path(name).write_text(content)

    return write


FOLDERS = {
    "empty": (lambda: Path("data").mkdir(), "no .npz and no .csv"),
    "pickle": (text("", "data/a.pkl"), "can run code"),
    "objects": (lambda: save(x=np.array([Bomb()] * 4, dtype=object), y=np.zeros(4)), "pickled"),
    "objects as labels": (lambda: save(x=np.zeros((4, 2)), y=np.array([Bomb()] * 4, dtype=object)), "pickled"),
    "inf": (infinite, "row 7"),
    "lengths": (spoil(y=np.zeros(19)), "(19,)"),
    "negative label": (spoil(y=np.full(20, -1)), "label -1"),
    "label that is a fraction": (spoil(y=np.full(20, 0.5)), "label 0.5"),
    "label too large": (spoil(y=np.full(20, 10**7)), "10000000"),
    "no labels": (lambda: save(x=np.zeros((4, 2))), "no array 'y'"),
    "no samples": (lambda: save(x=np.zeros((0, 2)), y=np.zeros(0)), "no client has a training sample"),
    "text samples": (spoil(x=np.array([["a"]] * 20)), "numbers"),
    "half a file": (half_a_file, "damaged"),
    "other shapes": (other_shapes, "(5,)"),
    "nothing to test on": (only_one_sample_each, "no client has a test sample"),
    "no test samples": (no_test_samples, "no client has a test sample"),
    "table without a client column": (text("label,f\n0,1\n"), "no column 'client'"),
    "table with a word": (text("client,label,f\na,0,1\na,1,one\n"), "line 3"),
    "table with a short line": (text("client,label,f\na,0\n"), "line 2"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_data_folders(refused, name):
    make, says = FOLDERS[name]
    make()
    refused("run", "fedavg", "--data", "folder", "--data-dir", "data", *TINY, says=says)
    assert not Path("canary").exists()


def test_partition_of_a_folder(refused):
    save(**good())
    refused("run", "--data", "folder", "--data-dir", "data", "--partition", "iid", says=("folder", "iid"))


def test_data_dir_that_is_a_file_of_another_kind(refused):
    Path("data.txt").write_text("x")
    refused("run", "--data", "folder", "--data-dir", "data.txt", *TINY, says="data.txt")


IMPOSSIBLE = {
    "more clients than samples": (["--clients", "2000", "--partition", "iid"], "1797"),
    "Dirichlet minimum": (["--clients", "100", "--min-samples", "18"], "lower data.clients or data.min_samples"),
    "Dirichlet too uneven": (["--clients", "60", "--alpha", "0.001"], "raise data.alpha"),
    "k above the classes": (["--partition", "classes", "--classes-per-client", "11"], "only 10 classes"),
    "no clients": (["--clients", "0"], "data.clients"),
    "nobody's samples": (["--partition", "natural"], "digits"),
    "device": (["--device", "gpu"], "run.device"),
    "another kind of device": (["--device", "meta"], "run.device"),
    "head": (["--head", "neck"], "neck"),
    "nesterov without momentum": (["--nesterov"], "momentum"),
    "adam with momentum": (["--optimizer", "adam", "--momentum", "0.9"], "momentum"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_does_not_go_together(refused, name):
    words, says = IMPOSSIBLE[name]
    refused("run", "fedavg", "--rounds", "1", "--epochs", "1", *words, says=says)


def test_scaffold_with_momentum(refused):
    refused("run", "scaffold", "--momentum", "0.5", *TINY, says=("scaffold", "momentum"))


def test_a_part_that_no_model_has(refused):
    refused("run", "fedper", "--personal", "conv*", *TINY, says="conv*")


def test_cuda_without_a_gpu(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("run", "--device", "cuda", *TINY, says="no usable GPU")


def test_workers_on_cuda(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused("run", *TINY[:-2], "--engine", "workers", "--device", "cuda", says="--device cpu")


def test_compare_refuses_as_early_as_run(refused):
    refused("compare", "scaffold", "--momentum", "0.5", *TINY, "--seeds", "2", says="scaffold")


# ---------------------------------------------------------------------- folders


def test_out_that_is_not_empty(refused):
    Path("out").mkdir()
    Path("out/precious").write_text("x")
    refused("run", *TINY, "--out", "out", says=("out", "exists already"))
    refused("compare", *TINY, "--out", "out", says=("out", "exists already"))


@pytest.fixture
def leftover(tmp_path, monkeypatch):
    """What is left of a run with a file of its own that was killed before it had begun."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD.format(before="", inside="pass"))
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_config", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            perfed.run("./mine.py", rounds=1, clients=3, epochs=1, engine="sequential", hidden=4, out="out")
    Path("out/.config.toml.tmp").write_text("methods")
    return Path("out")


def test_out_that_a_killed_run_left_behind(leftover, refused, monkeypatch, capsys):
    """It is no dead end: the same command begins anew, with what is now to be run; but nothing of others is removed."""
    Path("mine.py").write_text(METHOD.format(before="", inside="pass  # now another"))
    for verb in ("resume", "models"):
        refused(verb, "out", says="the run in 'out' was stopped before it had begun: its command, with --out 'out'")
    Path("out/precious").write_text("x")
    refused("run", *TINY, "--out", "out", says=("out", "exists already"))
    Path("out/precious").unlink()
    code, _, err = call(monkeypatch, capsys, "run", "./mine.py", *TINY, "--out", "out", "-q")
    assert (code, err) == (0, "")
    assert [path.name for path in Path("out/files").iterdir()] == ["mine.py"]
    assert Path("out/files/mine.py").read_bytes() == Path("mine.py").read_bytes()
    assert not list(Path("out").glob(".*tmp"))
    refused("run", *TINY, "--out", "out", says="exists already")


def test_a_comparison_that_a_kill_left_behind(monkeypatch, capsys, tmp_path):
    """Before its plan was written, or within the folder of a run of it."""
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for name in (".lock", "compare.toml", ".compare.json.tmp"):
        (Path("out") / name).write_text("")
    words = ["compare", "fedavg", *TINY, "--seeds", "1", "--no-baseline", "--out", "out", "-q"]
    assert call(monkeypatch, capsys, *words)[0] == 0
    (Path("out") / "seed_0" / "config.toml").unlink()
    shutil.rmtree(Path("out") / "seed_0" / "fedavg")
    shutil.rmtree(Path("out") / "seed_0" / "report")
    code, _, err = call(monkeypatch, capsys, "resume", "out", "-q")
    assert (code, err) == (0, "")


def test_links_in_what_was_left_behind_are_not_followed(leftover, monkeypatch, capsys):
    precious = Path("precious")
    precious.mkdir()
    (precious / "file").write_text("x")
    shutil.rmtree(leftover / "files")
    (leftover / "files").symlink_to(precious.resolve())
    (leftover / "clients.json").unlink()
    (leftover / "clients.json").symlink_to((precious / "file").resolve())
    assert call(monkeypatch, capsys, "run", "./mine.py", *TINY, "--out", "out", "-q")[0] == 0
    assert everything("precious") == {"precious/file": b"x"}


def test_out_that_is_a_file(refused):
    Path("out").write_text("x")
    refused("run", *TINY, "--out", "out", says="exists already")
    refused("run", *TINY, "--out", "out/run", says="out/run")


def test_out_with_a_name_too_long(refused):
    refused("run", *TINY, "--out", "x" * 300, says="long")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run, to be looked at."""
    return perfed.run(
        "fedavg", rounds=3, clients=3, epochs=1, checkpoint_every=1, engine="sequential", hidden=4,
        out=tmp_path_factory.mktemp("finished") / "run",
    ).path  # fmt: skip


def stop_at_round_2(folder):
    """Make a finished run look as if fedavg had been killed in its last round."""
    (folder / "fedavg" / "result.json").unlink()
    return sorted((folder / "fedavg" / "checkpoints").iterdir())


@pytest.fixture
def run(finished, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_not_a_run(refused):
    Path("other").mkdir()
    for verb in ("resume", "models"):
        refused(verb, "other", says=("other", "config.toml"))


def test_every_checkpoint_damaged(refused, run):
    for path in stop_at_round_2(run):
        path.write_bytes(path.read_bytes()[:-7])
    Path("x").mkdir()
    err = refused("resume", "run", "-q", says="damaged")
    assert "round_00000001" in err  # the oldest: the others were tried before it


@pytest.mark.parametrize("kind", ["protocol 4", "torch"])
def test_a_pickle_for_a_checkpoint(refused, run, kind):
    for path in stop_at_round_2(run):
        if kind == "torch":
            torch.save(Bomb(), path)
        else:
            path.write_bytes(pickle.dumps(Bomb(), 4))
    refused("resume", "run", "-q", says="damaged")
    assert not Path("canary").exists()
    assert pickle.loads(pickle.dumps(Bomb())) is None  # the bomb does work where pickles are opened
    assert Path("canary").exists()


def test_a_pickle_for_a_model(refused, run):
    torch.save(Bomb(), run / "fedavg" / "clients" / "client_00" / "model.safetensors")
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    refused("predict", "run", "--client", "client_00", "--input", "x.npy", says="model.safetensors")
    assert not Path("canary").exists()


@pytest.mark.parametrize("content", ["nothing", "whole numbers", "other names"])
def test_a_model_file_of_something_else(refused, run, content):
    path = run / "fedavg" / "clients" / "client_00" / "model.safetensors"
    state = {} if content == "nothing" else load_file(path)
    change = {"whole numbers": lambda key, t: (key, t.long()), "other names": lambda key, t: (f"x.{key}", t)}
    save_file(dict(change[content](key, t) for key, t in state.items()), path)
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    refused("predict", "run", "--client", "client_00", "--input", "x.npy", says="model.safetensors")


GARBAGE = {
    "bytes": b"\xff\x00\xfe garbage",
    "text": b"not toml at all",
    "nothing": b"",
    "methods": b"methods = 3\n",
    "sections": b"run = 'fast'\n",
    "another method": b"methods = ['fedsomething']\n",
    "a file that is not there": b"methods = ['files/none.py']\n",
}


@pytest.mark.parametrize("name", [name for name in GARBAGE if name != "nothing"])  # an empty one is all defaults
def test_garbage_for_the_configuration(refused, run, name):
    (run / "config.toml").write_bytes(GARBAGE[name])
    refused("resume", "run")
    refused("models", "run")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_garbage_for_the_clients(refused, run, content):
    (run / "clients.json").write_bytes(content)
    refused("models", "run", says="clients.json")


def test_garbage_for_a_result(refused, run):
    (run / "fedavg" / "result.json").write_bytes(b"{")
    refused("models", "run", says="result.json")


def test_models_of_an_unfinished_run(refused, run):
    stop_at_round_2(run)
    refused("models", "run", says="perfed resume run")
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    refused("predict", "run", "--client", "client_00", "--input", "x.npy", says="perfed resume run")


def test_models_of_a_method_not_in_the_run(refused, run):
    refused("models", "run", "--method", "fedavgg", says="did you mean 'fedavg'?")


def test_a_model_that_is_not_there(refused, run):
    (run / "fedavg" / "clients" / "client_00" / "model.safetensors").unlink()
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    refused("predict", "run", "--client", "client_00", "--input", "x.npy", says="client_00")


@pytest.mark.parametrize("client", ["client_99", "../../x", "", "/etc/passwd", "client_00/../client_01"])
def test_predict_for_an_unknown_client(refused, run, client):
    np.save("x.npy", np.zeros((1, 1, 8, 8)))
    refused("predict", "run", "--client", client, "--input", "x.npy", says=f"no client '{client}'")


def pickled(path):
    Path(path).write_bytes(pickle.dumps(Bomb()))


def shape_bomb(path):
    """A header that claims 10^18 numbers."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": (10**6,) * 3})
    Path(path).write_bytes(out.getvalue())


def zip_of_something(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", "hello")


INPUTS = {
    "missing": ("x.npz", lambda path: None, "no input file"),
    "a folder": ("x.npz", lambda path: Path(path).mkdir(), "no input file"),
    "another kind": ("x.txt", lambda path: Path(path).write_text("1"), ".npz, .npy or .csv"),
    "pickle as npz": ("x.npz", pickled, "x.npz"),
    "pickle as npy": ("x.npy", pickled, "x.npy"),
    "objects": ("x.npy", lambda path: np.save(path, np.array([Bomb()], dtype=object)), "Python objects"),
    "objects in an archive": ("x.npz", lambda path: np.savez(path, x=np.array([Bomb()], dtype=object)), "pickled"),
    "no x": ("x.npz", lambda path: np.savez(path, z=np.zeros(3)), "no array 'x'"),
    "no array": ("x.npz", zip_of_something, "no array 'x'"),
    "half a zip": ("x.npz", lambda path: Path(path).write_bytes(b"PK\x03\x04junk"), "x.npz"),
    "empty npy": ("x.npy", lambda path: Path(path).write_bytes(b""), "x.npy"),
    "empty csv": ("x.csv", lambda path: Path(path).write_bytes(b""), "empty"),
    "a header that asks for too much": ("x.npy", shape_bomb, "x.npy"),
    "wrong shape": ("x.npy", lambda path: np.save(path, np.zeros((2, 7))), "[samples, 1, 8, 8]"),
    "one number": ("x.npy", lambda path: np.save(path, np.zeros(())), "[samples, 1, 8, 8]"),
    "nan": ("x.npy", lambda path: np.save(path, np.full((2, 64), np.nan)), "not finite"),
    "text": ("x.npy", lambda path: np.save(path, np.array(["a"] * 64)), "numbers"),
    "complex": ("x.npy", lambda path: np.save(path, np.zeros((2, 64), complex)), "numbers"),
    "words in a csv": ("x.csv", lambda path: Path(path).write_text("h\n" + ",".join(["word"] * 64) + "\n"), "x.csv"),
    "lines of different lengths": ("x.csv", lambda path: Path(path).write_text("1,2\n1,2,3\n"), "x.csv"),
    "csv that is not text": ("x.csv", lambda path: Path(path).write_bytes(b"\xff\xfe\x00\x01\n"), ""),
}


@pytest.mark.parametrize("name", INPUTS)
def test_predict_on_wrong_input(refused, run, name):
    path, make, says = INPUTS[name]
    make(path)
    refused("predict", "run", "--client", "client_00", "--input", path, says=says)
    assert not Path("canary").exists()
