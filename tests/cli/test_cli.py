"""The command: every verb, its JSON, and where settings come from."""

import dataclasses
import io
import json
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import perfed
from perfed import data, engines, models, wire
from perfed.data.catalog import datasets, partitions
from perfed.data.config import DataConfig
from perfed.report.terminal import Terminal
from perfed.training import catalog
from perfed.training.config import SECTIONS, Config, RunConfig, flags, from_dict, read_toml, to_toml
from perfed.training.observers.progress import ProgressLine

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer's, about names that click will rename
    from perfed.cli import app
    from perfed.cli.lists import KINDS
    from perfed.cli.options import Typed
    from perfed.cli.output import typed_command

TINY = ["--rounds", "2", "--clients", "4", "--epochs", "1", "--batch-size", "50", "--engine", "sequential"]
VERBS = ["run", "resume", "compare", "table", "tune", "list", "models", "predict", "new", "check", "doctor", "bench"]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """`call(*words)`: (exit code, standard output, standard error) of `perfed WORDS` in a new folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def answer(call):
    """`answer(*words)`: the JSON object that `perfed WORDS --json` prints, which is all it prints."""

    def ask(*words):
        code, out, err = call(*words, "--json")
        assert code == 0, err
        assert "Traceback" not in err
        assert out.endswith("\n")
        assert out.count("\n") == 1
        result = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
        assert isinstance(result, dict)
        return result

    return ask


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run."""
    settings = dict(rounds=2, clients=4, epochs=1, batch_size=50, engine="sequential")
    return perfed.run("fedavg", out=tmp_path_factory.mktemp("finished") / "run", **settings).path


# ---------------------------------------------------------------------- help


def test_version(call):
    assert call("--version") == (0, f"perfed {perfed.__version__}\n", "")


def test_no_words_is_help(call):
    code, out, err = call()
    assert (code, err) == (0, "")
    assert out.startswith("Usage: perfed")
    assert all(re.search(rf"^  {verb} ", out, re.MULTILINE) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb(call, verb):
    code, out, err = call(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: perfed {verb}")
    assert "--json" in out


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_help_names_every_setting(call, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "200")
    out = call(verb, "--help")[1]
    words = set(re.findall(r"--[a-z0-9_-]+", out))
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            name = {"name": section, "dir": "data_dir"}.get(field.name, field.name)
            assert f"--{name.replace('_', '-')}" in words, name
            assert field.metadata["meaning"].split()[0] in out
    assert {f"--{name.replace('_', '-')}" for name in catalog.common()} <= words
    assert "[default: 25]" in out  # rounds


def test_help_needs_no_torch():
    """In a fresh process, as the installed program starts."""
    text = "import sys; sys.argv = ['perfed', 'run', '--help']\nfrom perfed.cli import main\n"
    text += "try:\n    main()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60, capture_output=True)


@pytest.mark.parametrize("verb", [*VERBS, "personalise", "partition show"])
def test_a_group_of_a_help_fits_a_page(call, monkeypatch, verb):
    """50 lines of 100 characters; and nothing in it is escaped for somebody else."""
    monkeypatch.setenv("COLUMNS", "100")
    out = call(*verb.split(), "--help")[1]
    assert "\\" not in out
    assert "--debug" in out
    assert max(map(len, out.splitlines())) <= 100
    groups = re.split(r"^\w[\w ]*:$", out, flags=re.MULTILINE)
    assert max(group.strip("\n").count("\n") for group in groups) <= 50
    if verb in ("run", "compare", "tune"):
        titles = ["Arguments", "Options", "Data", "Partition", "Network", "Run", "System", "Optimisation", "Engine"]
        titles += ["Training"]
        assert [line[:-1] for line in re.findall(r"^\w[\w ]*:$", out, re.MULTILINE)] == titles


def test_help_for_a_method(call, monkeypatch, tmp_path):
    """Its own settings stand first; its file is read, not run. Words that are no methods change nothing."""
    monkeypatch.setenv("COLUMNS", "100")
    assert "--debug" in call("--help")[1]
    usual = call("run", "--help")[1]
    out = call("run", "ditto,fedavg", "--data", "digits", "--help")[1]
    assert "Settings of ditto alone:\n  --lam X  pull of the personal model towards the global one" in out
    assert "Settings of fedavg alone:\n  none" in out
    assert re.sub(r"Settings of (.|\n)*?\n\n", "", out) == usual
    assert call("run", "dito", "./none.py", "-q", "--help")[1] == usual
    assert "alone" not in call("check", "ditto", "--help")[1]
    assert "[theta | alpha; default: theta]" in " ".join(call("tune", "pgfed", "--help")[1].split())
    (tmp_path / "mine.py").write_text(
        "from perfed.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    x: float = 1.0\n1 / 0\n"
    )
    assert "Settings of mine alone:\n  --x X  " in call("run", "./mine.py", "--help")[1]


# ---------------------------------------------------------------------- list, doctor


def test_list_methods(answer):
    listed = {method["name"]: method for method in answer("list")["methods"]}
    assert list(listed) == list(catalog.methods())
    assert set(listed["pgfed"]) >= {"name", "title", "summary", "paper", "evaluates", "hyperparameters"}
    mu = next(setting for setting in listed["pgfed"]["hyperparameters"] if setting["name"] == "mu")
    assert (mu["type"], mu["default"], mu["range"]) == ("float", 0.1, "at least 0")
    assert all(method["summary"] and method["title"] for method in listed.values())
    assert "arxiv.org" in listed["fedavg"]["paper"]
    assert not {"seed", "cohort", "model"} & {setting["name"] for setting in listed["pgfed"]["hyperparameters"]}
    assert listed["fedavg"]["described"] is False


def test_a_list_says_which_methods_are_made_after_descriptions(call, monkeypatch):
    entry = catalog.find("fedprox")
    known = dataclasses.replace(entry, doc="FedProx: a pull.\n\nAfter the description of A: B. https://arxiv.org/abs/1")
    monkeypatch.setattr(catalog, "methods", lambda: {"local": catalog.find("local"), "fedprox": known})
    code, out, err = call("list")
    assert (code, err) == (0, "")
    assert [line.endswith(" (after its description)") for line in out.splitlines()] == [False, True]
    assert out.splitlines()[1].split(maxsplit=1) == ["fedprox", "a pull (after its description)"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "methods"])
def test_list_the_rest(answer, call, kind):
    known = KINDS[kind]()
    assert answer("list", kind) == {kind: known}
    code, out, err = call("list", kind)
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [[name, *known[name].split()] for name in known]
    assert all(known.values())


def test_what_is_listed_can_be_chosen():
    """Every listed name passes the check of settings, and every choice of the settings is listed."""
    for name in datasets():
        if name != "folder":
            data.check(DataConfig(name=name))
    for name in partitions():
        data.check(DataConfig(partition=name))
    for name in models.networks():
        models.check_name(name)
    for name in engines.engines():
        assert RunConfig(engine=name).engine == name
    for name in KINDS["wire"]():
        wire.check(name)


def test_doctor(answer, call):
    facts = answer("doctor")
    assert facts["perfed"] == perfed.__version__
    assert {"python", "torch", "cores", "gpu", "engine", "disk", "data"} <= set(facts)
    assert facts["cores"] >= 1
    assert "torch" in call("doctor")[1]


# ---------------------------------------------------------------------- run, models, predict, compare


def test_run(call, tmp_path, pictures):
    code, out, err = call("run", "fedavg", *TINY, "--out", "run")
    assert (code, err) == (0, "")
    assert "FedAvg     2/2" in out
    assert "better" in out
    assert "\x1b" not in out  # no colours in a pipe
    assert (tmp_path / "run" / "report" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "| FedAvg |" in (tmp_path / "run" / "report" / "summary.md").read_text()
    load = re.search(r"python -c \"(.*)\"", out)
    assert load
    namespace = {}
    exec(load[1].replace("print(", "found = ("), namespace)  # what it tells people to type works
    assert isinstance(namespace["found"], perfed.Run.network(perfed.load("run")).__class__)


def test_quiet(call):
    code, out, err = call("run", "local", *TINY, "--out", "run", "-q")
    assert (code, err) == (0, "")
    assert "2/2" not in out


def test_methods_with_commas(answer):
    result = answer("run", "fedavg,fedprox", *TINY, "--mu", "0.5", "--out", "run", "--no-baseline")
    assert [method["method"] for method in result["methods"]] == ["fedavg", "fedprox"]
    assert read_toml(Path("run/config.toml"))["method"]["fedprox"]["mu"] == 0.5


def test_models(answer, call, finished):
    result = answer("models", finished)
    assert result["method"] == "fedavg"
    assert [model["client"] for model in result["models"]] == [f"client_{id:02d}" for id in range(4)]
    assert all(Path(model["path"]).is_file() and 0 <= model["accuracy"] <= 1 for model in result["models"])
    assert answer("models", finished, "--method", "local")["method"] == "local"
    assert call("models", finished)[1].count("\n") == 4


def test_predict(answer, call, finished):
    """Samples from every kind of file, flat or in their shape, give the same classes."""
    x = np.random.default_rng(0).random((5, 1, 8, 8)).astype(np.float32)
    flat = x.reshape(5, 64)
    np.savez("a.npz", x=x)
    np.savez("b.npz", x=flat)
    np.save("c.npy", x)
    np.save("d.npy", flat.astype(">f8"))
    np.savetxt("e.csv", flat, delimiter=",")
    np.savetxt("f.csv", flat, delimiter=",", header=",".join(f"p{i}" for i in range(64)), comments="")
    expected = perfed.load(finished).client("client_01").predict(x).tolist()
    assert len(set(expected)) >= 1
    for name in ("a.npz", "b.npz", "c.npy", "d.npy", "e.csv", "f.csv"):
        result = answer("predict", finished, "--client", "client_01", "--input", name)
        names = [str(number) for number in expected]  # digits have no other names
        assert result == {"client": "client_01", "method": "fedavg", "predictions": expected, "labels": names}, name
    code, out, err = call("predict", finished, "--client", "client_01", "--input", "a.npz", "--method", "local")
    assert (code, err) == (0, "")
    assert [int(line) for line in out.split()] == perfed.load(finished).client("client_01", "local").predict(x).tolist()
    np.save("one.npy", x[0])
    assert answer("predict", finished, "--client", "client_01", "--input", "one.npy")["predictions"] == expected[:1]


def test_compare(answer, tmp_path):
    result = answer("compare", "fedavg", *TINY, "--seeds", "2", "--seed", "3", "--out", "both")
    assert result["seeds"] == 2
    assert [method["method"] for method in result["methods"]] == ["local", "fedavg"]
    assert result["methods"][0]["gain"] is None
    each = [perfed.load(tmp_path / "both" / f"seed_{seed}") for seed in (3, 4)]
    assert [run.config.run.seed for run in each] == [3, 4]
    means = [run.summary()[1]["accuracy"]["mean"] for run in each]
    method = result["methods"][1]
    assert method["accuracy"]["mean"]["mean"] == pytest.approx(sum(means) / 2)
    assert method["accuracy"]["mean"]["std"] == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    gains = np.concatenate([run.accuracies("fedavg") - run.accuracies("local") for run in each])
    assert method["gain"]["mean"] == pytest.approx(gains.mean())
    assert method["gain"]["better"] + method["gain"]["worse"] <= 8
    assert json.loads((tmp_path / "both" / "result.json").read_text()) == result
    assert "| FedAvg |" in (tmp_path / "both" / "compare.md").read_text()


# ---------------------------------------------------------------------- what is shown is not obeyed

ODD = """r'''[/red]$\\bad$: FedAvg :smile: \x1b[31m\u202e.'''
from dataclasses import dataclass
from perfed.methods.fedavg import FedAvg
@dataclass(frozen=True)
class Odd(FedAvg):
    pass
"""
NAMES = ["[/red]", "$\\frac$", "a\x1b]0;evil\x07b", "x\u202ey", ":boom:", "[bold]"]


def test_what_is_shown_is_not_obeyed(call, tmp_path, monkeypatch, pictures):
    """Brackets, colons, dollars and escapes in names of folders, methods and clients, also in reports and pictures."""
    draw = np.random.default_rng(0)
    rows = [f'"{name}",{draw.normal():.3f},{draw.normal():.3f},{i % 2}' for name in NAMES for i in range(20)]
    Path("t.csv").write_text("client,a,b,label\n" + "\n".join(rows) + "\n")
    Path("odd.py").write_text(ODD)
    words = ["--data", "folder", "--data-dir", "t.csv", "--rounds", "1", "--epochs", "1", "--engine", "sequential"]
    for folder, shown in (("b[/b]", "b[/b]"), ("c[red]\x1b[2J", "c[red]\\x1b[2J")):
        code, out, err = call("run", "./odd.py", *words, "--no-baseline", "--out", folder)
        assert (code, err) == (0, "")
        assert shown in out
        assert "[/red]$\\bad$" in out
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
        report = (tmp_path / folder / "report" / "summary.md").read_text()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", report)
    code, out, err = call("models", folder)
    assert (code, err) == (0, "")
    assert all(name in out for name in ("[/red]", "$\\frac$", "a\\x1b]0;evil\\x07b", "x\\u202ey", ":boom:", "[bold]"))
    code, out, err = call("partition", "show", "--data", "folder", "--data-dir", "t.csv", "--out", "p.png")
    assert (code, err) == (0, "")
    assert "[/red]" in out
    assert "\x1b" not in out
    ElementTree.parse("p.svg")
    code, out, err = call("run", "\x1b[31mfedavg")
    assert (code, err.count("\x1b"), "\\x1b[31mfedavg" in err) == (2, 0, True)


def test_a_bar_shows_titles_as_they_are():
    """On a terminal, where rich draws a bar."""
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=True, width=120)
    with ProgressLine(console, "[/red]\x1b[2J :boom:", 3):
        pass
    assert "[/red]\\x1b[2J :boom:" in file.getvalue()


# ---------------------------------------------------------------------- a method of one's own


@pytest.mark.slow
def test_new_check_run(answer, call, tmp_path):
    """Write a method, change three lines, check it, run it; the guide to methods does so unchanged."""
    assert answer("new", "fed_mine") == {"file": "fed_mine.py"}
    path = tmp_path / "fed_mine.py"
    text = path.read_text()
    changes = {
        "FedMine: FedAvg whose clients keep a share of their own last model.": "FedMine: a pull towards the server.",
        "share: float = hyper(0.5,": "share: float = hyper(0.9,",
        "return theta, Up(mean=theta - w)": "return 0.5 * client + 0.5 * theta, Up(mean=theta - w)",
    }
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text)
    result = answer("check", "./fed_mine.py")
    assert result["method"] == "fed_mine"
    assert result["failed"] == 0
    assert len(result["checks"]) >= 10
    assert all(each["ok"] and each["error"] is None for each in result["checks"])
    ran = answer("run", "./fed_mine.py", *TINY, "--share", "0.25", "--out", "run")
    assert [each["title"] for each in ran["methods"]] == ["Local", "FedMine"]
    assert perfed.load("run").config.method["fed_mine"]["share"] == 0.25


def test_new_says_what_comes_next(call):
    code, out, err = call("new", "mine.py")
    assert (code, err) == (0, "")
    assert "perfed check mine.py" in out
    assert "perfed run ./mine.py" in out


def test_check_finds_what_is_wrong(call, monkeypatch):
    """A method that breaks the contract: exit code 1, the failed checks named, the JSON still whole."""
    Path("bad.py").write_text(
        '"""Bad: changes its input."""\nfrom dataclasses import dataclass\nfrom perfed.methods.fedavg import FedAvg\n\n'
        "@dataclass(frozen=True)\nclass Bad(FedAvg):\n    def aggregate(self, server, cohort):\n"
        "        return server.add_(cohort.mean)\n"
    )
    from perfed.contract import runner

    few = ("it trains and predicts", "states keep their form", "nothing is changed in place")
    monkeypatch.setattr(runner, "RULES", [check for check in runner.RULES if check.title in few])
    monkeypatch.setattr(runner, "ENGINES", ())
    monkeypatch.setattr(runner, "BATCHED", ())
    code, out, err = call("check", "./bad.py", "--json")
    assert code == 1
    result = json.loads(out)
    assert result["failed"] == 1
    found = {each["check"]: each["ok"] for each in result["checks"]}
    assert [found[title] for title in few] == [True, True, False]
    waiting = [title for title, ok in found.items() if ok is None]
    assert waiting == [check.title for check in runner.FOLLOWS]
    assert err.splitlines()[-1] == "perfed: bad fails 1 of 6 checks"
    code, out, err = call("check", "./bad.py")
    assert code == 1
    failed = "FAILED nothing is changed in place: broadcast or aggregate writes into the server's state: make a new one"
    assert failed in out.replace("\n", " ")
    waiting = "not tried, since they build on what failed: state"
    assert waiting in out.replace("\n", " ")


# ---------------------------------------------------------------------- where settings come from

LAYERS = """
methods = ["fedavg", "pgfed"]
[run]
rounds = 3
seed = 11
participation = 0.5
[train]
lr = 0.3
epochs = 1
[method.pgfed]
mu = 0.7
lr = 0.4
"""


def made(*words):
    """The configuration that the words of `perfed run` make."""
    settings = {}
    sets, config, rest = [], None, []
    words = iter(words)
    for word in words:
        if word == "--set":
            sets.append(next(words))
        elif word == "-c":
            config = Path(next(words))
        elif word.startswith("--") and word[2:].replace("-", "_") in {*flags(), *catalog.common()}:
            settings[word[2:].replace("-", "_")] = next(words)
        else:
            rest.append(word)
    return Typed(rest, config, sets, settings).config()


def test_file_then_set_then_options(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(LAYERS)
    config = made("-c", str(path))
    assert (config.run.rounds, config.run.seed, config.train["lr"]) == (3, 11, 0.3)
    config = made("-c", str(path), "--set", "run.rounds=4", "--set", "lr=0.5", "--set", "pgfed.mu=0.8")
    assert (config.run.rounds, config.run.seed, config.train["lr"]) == (4, 11, 0.5)
    assert config.method["pgfed"] == {"mu": 0.8, "lr": 0.4}
    config = made("-c", str(path), "--set", "run.rounds=4", "--set", "pgfed.mu=0.8", "--rounds", "5", "--mu", "0.9")
    assert (config.run.rounds, config.method["pgfed"]["mu"]) == (5, 0.9)
    assert config.methods == ("fedavg", "pgfed")
    assert made("-c", str(path), "--set", "methods=pgfed").methods == ("pgfed",)
    assert made("-c", str(path), "--set", "methods=fedavg,pgfed", "pgfed", "ditto").methods == ("pgfed", "ditto")


def test_a_methods_own_setting_goes_before_that_of_all(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(LAYERS)
    config = made("-c", str(path))
    by_name = {entry.name: config.settings(entry) for entry in config.entries()}
    assert by_name["fedavg"] == {"lr": 0.3, "epochs": 1}
    assert by_name["pgfed"] == {"lr": 0.4, "epochs": 1, "mu": 0.7}


def test_the_layers_reach_the_run(call, tmp_path):
    """The resolved configuration of a run shows all three layers."""
    (tmp_path / "c.toml").write_text(LAYERS)
    words = ["--set", "run.rounds=4", "--set", "train.epochs=2", "--rounds", "2", "--clients", "4", "--mu", "0.25"]
    code, _, err = call("run", "-c", "c.toml", *words, "--engine", "sequential", "--out", "run", "-q")
    assert code == 0, err
    config = perfed.load("run").config
    assert (config.run.rounds, config.run.seed, config.run.participation) == (2, 11, 0.5)
    assert config.methods == ("local", "fedavg", "pgfed")
    assert {name: (table["lr"], table["epochs"]) for name, table in config.method.items()} == {
        "local": (0.3, 2),
        "fedavg": (0.3, 2),
        "pgfed": (0.4, 2),
    }
    assert config.method["pgfed"]["mu"] == 0.25


def test_the_resolved_file_is_the_configuration(finished):
    text = (finished / "config.toml").read_text()
    raw = tomllib.loads(text)
    config = from_dict(raw)
    assert to_toml(config) == text
    assert config == perfed.load(finished).config
    for section, kind in SECTIONS.items():
        known = {field.name for field in dataclasses.fields(kind)}
        absent = {name for name in known - set(raw[section]) if getattr(getattr(config, section), name) is not None}
        assert not absent


@pytest.mark.parametrize(
    "text", ["plain", 'quote " back \\ slash', "new\nline", "tab\t", "ünï 😀", "del\x7f", "\x01", "# = []"]
)
def test_any_text_survives_the_file(text):
    config = Config(data=DataConfig(client_column=text, dir=text), method={"pgfed": {"mu": 1e-7}})
    again = from_dict(tomllib.loads(to_toml(config)))
    assert again.data == config.data
    assert again.method == config.method


def test_a_kept_command_has_no_folders_and_no_ways_of_printing(monkeypatch):
    typed = "table pgfed-1 -q --out /tmp/a --column c10-25 --data-dir=/b --json --quick --set data.dir=c --only-report"
    monkeypatch.setattr("sys.argv", ["/somewhere/perfed", *typed.split()])
    assert typed_command() == "perfed table pgfed-1 --column c10-25 --quick --set data.dir=c"
