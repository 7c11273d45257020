"""A run goes on with the settings it was begun with, or says what is not as it was; and it has an end."""

import dataclasses
import json
import os
import re
import shutil

import pytest
import torch
from rich.console import Console
from tiny import QUIET, contents, copied, make

import perfed
from perfed import api
from perfed.contract.toy import norm_net, plain_net, toy_settings
from perfed.core.errors import Problem
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.report.tables import remarks
from perfed.training import catalog, files
from perfed.training.config import SECTIONS
from perfed.training.folder import RunFolder
from perfed.training.observers.checkpoint import _fits


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr("perfed.report.folder.picture", lambda run: b"")  # takes longer than all the rest


@pytest.fixture
def stopped(home, tmp_path):
    return copied(home, "stopped", tmp_path / "run")


@pytest.fixture
def finished(home, tmp_path):
    return copied(home, "finished", tmp_path / "run")


def edit(run, pattern, new):
    path = run / "config.toml"
    text, count = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert count, pattern
    path.write_text(text)


# ---------------------------------------------------------------------- an end


def whole_numbers():
    for section, kind in SECTIONS.items():
        if section != "data":
            for field in dataclasses.fields(kind):
                if field.type in ("int", int):
                    yield f"{section}.{field.name}", field.metadata["bounds"]
    for entry in catalog.methods().values():
        for field in entry.fields.values():
            if field.kind is int:
                yield f"{entry.name}.{field.name}", field.bounds


def test_every_whole_number_has_an_end():
    bounds = dict(whole_numbers())
    assert len(bounds) > 80
    assert [name for name, each in bounds.items() if "at most" not in each] == []
    assert {name: f.metadata["bounds"] for name, f in Method.__dataclass_fields__.items() if name == "epochs"}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_rounds_below_the_checkpoint(stopped, rounds):
    """The checkpoint is of round 3: a run of 1, 2 or 3 rounds can never come to its last one."""
    before = contents(stopped)
    edit(stopped, "^rounds = 4", f"rounds = {rounds}")
    shutil.rmtree(stopped / "local")
    with pytest.raises(Problem, match=rf"trained up to round 3 with other settings: run.rounds 4 -> {rounds};"):
        api.resume(stopped, QUIET)
    with pytest.raises(Problem, match=f"trained up to round 3: run.rounds cannot be {rounds}"):
        api.resume(stopped, QUIET, allow_change=True)
    mine = {name: content for name, content in before.items() if name.startswith("mine/")}
    assert {name: content for name, content in contents(stopped).items() if name.startswith("mine/")} == mine


def forge(run, **more):
    """Write a checkpoint whose checksum is right."""
    folder = run / "mine" / "checkpoints"
    tree = files.load_tree(folder / "round_00000003.safetensors") | more
    for path in folder.iterdir():
        path.unlink()
    files.save_tree(folder / f"round_{tree['round']:08d}.safetensors", tree)


def test_a_checkpoint_of_a_round_that_will_never_be(stopped):
    forge(stopped, round=10**9)
    with pytest.raises(Problem, match=r"up to round 1000000000: run.rounds cannot be 4"):
        api.resume(stopped, QUIET)


# ---------------------------------------------------------------------- other settings

NEW = ("settings", "sha256", "seal")  # in results, since version 0.2
CHANGES = {
    "run.rounds 4 -> 9": ("^rounds = 4", "rounds = 9"),
    "mine.lr 0.01 -> 0.5": ("^lr = 0.01", "lr = 0.5"),
    "mine.epochs 1 -> 3": ("^epochs = 1", "epochs = 3"),
    "mine.batch_size 10 -> 4": ("^batch_size = 10", "batch_size = 4"),
    "run.participation 1.0 -> 0.5": ("^participation = 1.0", "participation = 0.5"),
}
NEVER = {
    "run.precision 'float32' -> 'float64'": ('^precision = "float32"', 'precision = "float64"'),
    "model.hidden 64 -> 8": ("^hidden = 64", "hidden = 8"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_are_named_and_refused(stopped, change):
    edit(stopped, *CHANGES[change])
    shutil.rmtree(stopped / "local")
    before = contents(stopped / "mine")
    with pytest.raises(Problem, match=f"trained up to round 3 with other settings: {change}; put them back"):
        api.resume(stopped, QUIET)
    assert contents(stopped / "mine") == before


@pytest.mark.parametrize("change", CHANGES)
def test_other_settings_beside_a_method_that_has_ended(stopped, change):
    """Nothing has been trained of the second method: but the first is what it will be compared with."""
    edit(stopped, *CHANGES[change])
    shutil.rmtree(stopped / "mine")
    with pytest.raises(Problem, match=f"local in .* has ended with other settings: {change.replace('mine', 'local')};"):
        api.resume(stopped, QUIET)


@pytest.mark.parametrize("change", NEVER)
def test_what_cannot_change_on_the_way(stopped, change):
    edit(stopped, *NEVER[change])
    shutil.rmtree(stopped / "local")
    for allow in (False, True):
        with pytest.raises(Problem, match=f"which cannot change on the way: {change}"):
            api.resume(stopped, QUIET, allow_change=allow)


@pytest.mark.parametrize("kind", ["mine", "net"])
def test_a_file_of_the_users_that_changed(stopped, kind):
    with (stopped / "files" / f"{kind}.py").open("a") as file:
        file.write("# another line\n")
    shutil.rmtree(stopped / "local")
    with pytest.raises(
        Problem, match=f"{'mine' if kind == 'mine' else 'model'}.py '[0-9a-f]{{12}}' -> '[0-9a-f]{{12}}'"
    ):
        api.resume(stopped, QUIET)


def test_what_changes_no_result_may_change(stopped, home):
    edit(stopped, "^checkpoint_every = 1", "checkpoint_every = 2")
    edit(stopped, "^state_memory = 4096", "state_memory = 1")
    run = api.resume(stopped, QUIET)
    assert run.result("mine") == perfed.load(home / "finished").result("mine")
    assert run.summary()[1]["changes"] == []


def test_a_change_that_is_allowed_is_written_down(stopped, capsys):
    edit(stopped, "^rounds = 4", "rounds = 6")
    run = api.resume(stopped, Console(width=1000), allow_change=True)
    said = capsys.readouterr().out
    assert "local has ended with other settings, and stays as it is: run.rounds 4 -> 6" in said
    assert "mine: goes on after round 3 with other settings: run.rounds 4 -> 6" in said
    assert (run.result("local")["rounds"], run.result("mine")["rounds"]) == (4, 6)
    assert run.result("mine")["changes"] == [{"round": 3, "settings": {"run.rounds": [4, 6]}}]
    assert "changes" not in run.result("local")
    lines = remarks(run.summary())
    assert "Local: settings changed after its end: run.rounds 4 -> 6" in lines
    assert "Mine: settings changed after round 3: run.rounds 4 -> 6" in lines
    report = (stopped / "report" / "summary.md").read_text()
    assert all(line in report for line in lines)
    with pytest.raises(Problem, match=r"local in .* has ended with other settings"):
        api.resume(stopped, QUIET)


def test_changes_come_one_after_another(stopped, monkeypatch):
    """What was allowed once is in the checkpoints, and need not be allowed again."""
    shutil.rmtree(stopped / "local")
    edit(stopped, "^rounds = 4", "rounds = 6")
    from perfed.training.observers.checkpoint import Checkpoints

    write = Checkpoints.write

    def stop(self, federation):
        write(self, federation)
        if federation.round == 5 and "Mine" in type(federation.method).__name__:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        api.resume(stopped, QUIET, allow_change=True)
    monkeypatch.undo()
    run = api.resume(stopped, QUIET)
    assert run.result("mine")["changes"] == [{"round": 3, "settings": {"run.rounds": [4, 6]}}]


def test_a_run_of_an_older_perfed_says_how_many_rounds_it_had(finished):
    for name in ("local", "mine"):
        path = finished / name / "result.json"
        result = {key: value for key, value in json.loads(path.read_text()).items() if key not in NEW}
        path.write_text(json.dumps(result))
    api.resume(finished, QUIET)
    edit(finished, "^rounds = 4", "rounds = 5")
    with pytest.raises(Problem, match=r"has ended with other settings: run.rounds 4 -> 5"):
        api.resume(finished, QUIET)


# ---------------------------------------------------------------------- damage


def test_a_result_without_its_checksum(finished):
    """What has checksums of files has one of its own."""
    path = finished / "mine" / "result.json"
    result = json.loads(path.read_text())
    del result["seal"]
    path.write_text(json.dumps(result))
    with pytest.raises(Problem, match=r"mine/result.json' is damaged: its checksum does not fit"):
        perfed.load(finished).clients("mine")


def test_a_line_without_end(stopped):
    log = stopped / "local" / "times.jsonl"
    os.truncate(log, 2**27)
    with pytest.raises(Problem, match=r"local/times.jsonl', line 5, is damaged: it is longer than 67,108,864 bytes"):
        RunFolder(stopped).method("local").seconds()
    assert RunFolder(stopped).files.size(log) == 2**27


LATER = "mine/clients/a/model.safetensors"
CHECKED = (LATER, "local/clients/b/model.safetensors", "mine/server.safetensors", "mine/metrics.jsonl", "clients.json")
CHECKED += ("mine/rounds.jsonl", "mine/result.json", "files/net.py")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 2
    path.write_bytes(content)


DAMAGE = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_finished_is_checked(finished, name, damage):
    assert perfed.load(finished).check() == 2 * (3 + 1 + 2) + 3
    DAMAGE[damage](finished / name)
    if (name, damage) in (("mine/result.json", "gone"), ("mine/result.json", "longer")):
        return  # then it is not finished; white space at the end changes nothing
    for do in (lambda: api.resume(finished, QUIET), lambda: perfed.load(finished).check()):
        with pytest.raises(
            Problem, match=rf"{name}.*(damaged|missing|net)|no file .*{name}|not one of|net.py|data of"
        ) as caught:
            do()
        assert "bug" not in str(caught.value)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_model_is_checked_when_it_is_read(finished, damage):
    DAMAGE[damage](finished / LATER)
    run = perfed.load(finished)
    with pytest.raises(Problem, match=r"mine/clients/a/model.safetensors' is (damaged|missing)"):
        run.client("a", "mine").model()
    assert run.client("b", "mine").model() is not None


def test_a_model_in_another_network(finished):
    edit(finished, '^norm = "group"', 'norm = "batch"')
    with pytest.raises(Problem, match=r"names another network than mine's: model.norm 'group' -> 'batch'"):
        perfed.load(finished).client("a").model()


STOPPED = ("mine/metrics.jsonl", "mine/rounds.jsonl", "mine/times.jsonl", "env.json", "clients.json")


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("damage", ["[]", "{", '{"round": "x"}', "null", "\udcff", "9" * 5000, "[" * 100_000, ""])
def test_damaged_logs(stopped, home, name, damage):
    """One sentence, or the same result from the checkpoint before."""
    path = stopped / name
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 3] + damage.encode(errors="surrogateescape"))
    with pytest.raises(Problem) as caught:
        api.resume(stopped, QUIET)
    assert re.search("damaged|lines are missing|no longer", str(caught.value))
    assert len(str(caught.value)) < 400


def test_a_log_that_changed_sends_resume_to_the_checkpoint_before(stopped, home, capsys):
    """Its last lines are of round 3: those of round 2 are as they were, and round 3 comes again."""
    path = stopped / "mine" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-3] + b"0}\n")
    run = api.resume(stopped, Console(width=1000))
    assert "up to round 3 it is not what was written; going back to the checkpoint before it" in capsys.readouterr().out
    assert run.result("mine") == perfed.load(home / "finished").result("mine")


@pytest.mark.parametrize("name", ["round_abc.safetensors", "round_.safetensors", "round_00000002.txt", "notes.md"])
def test_strangers_among_the_checkpoints(stopped, home, name):
    path = stopped / "mine" / "checkpoints" / name
    path.write_text("mine")
    assert api.resume(stopped, QUIET).result("mine") == perfed.load(home / "finished").result("mine")
    assert path.read_text() == "mine"


WRONG = {
    "no server": lambda tree: tree.pop("server"),
    "another server": lambda tree: tree.update(server={"w": tree["server"]}),
    "a shorter server": lambda tree: tree.update(server=tree["server"][:-1]),
    "a round as text": lambda tree: tree.update(round="3"),
    "another round": lambda tree: tree.update(round=2),
    "no states": lambda tree: tree.pop("states"),
    "strangers": lambda tree: tree["states"].update(clients=tree["states"]["clients"] + 7),
    "clients twice": lambda tree: tree["states"].update(clients=tree["states"]["clients"] * 0),
    "no traffic": lambda tree: tree.update(traffic={}),
    "more traffic": lambda tree: tree["traffic"].update(sideways=1),
    "a log's length as text": lambda tree: tree["logs"].update({"rounds.jsonl": "9"}),
    "a log's length below 0": lambda tree: tree["logs"].update({"rounds.jsonl": -9}),
    "settings as text": lambda tree: tree.update(settings="none"),
    "a tensor among settings": lambda tree: tree["settings"].update({"run.rounds": torch.zeros(3)}),
    "a round without changes": lambda tree: tree.update(changes=[{"round": 1}]),
    "changes as text": lambda tree: tree.update(changes="none"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_that_is_none(stopped, home, wrong):
    path = stopped / "mine" / "checkpoints" / "round_00000003.safetensors"
    tree = files.load_tree(path)
    WRONG[wrong](tree)
    files.save_tree(path, tree)
    assert api.resume(stopped, QUIET).result("mine") == perfed.load(home / "finished").result("mine")


@pytest.mark.parametrize("tree", [[], {}, 3, None, "text", {"round": 3}])
def test_a_tree_that_is_no_checkpoint(stopped, tree):
    for path in (stopped / "mine" / "checkpoints").glob("*.safetensors"):
        files.save_tree(path, tree)
    with pytest.raises(Problem, match=r"checkpoints/round_0000000[23].safetensors' is damaged: it"):
        api.resume(stopped, QUIET)


@pytest.mark.parametrize("wrong", [[], None, 3, {}, {"rounds": "4"}, {"clients": []}, {"clients": [{}]}, {"bytes": {}}])
def test_a_result_of_an_older_perfed_that_is_none(finished, wrong):
    """Nothing vouches for it: what it must look like is known all the same."""
    path = finished / "mine" / "result.json"
    result = json.loads(path.read_text())
    del result["seal"], result["sha256"]
    path.write_text(json.dumps(result | wrong if wrong and isinstance(wrong, dict) else wrong))
    for do in (lambda: api.resume(finished, QUIET), lambda: perfed.load(finished).clients("mine")):
        with pytest.raises(Problem, match=r"mine/result.json' is damaged"):
            do()


@pytest.mark.parametrize(
    "text", ["", "[]", '["local"]', "{", "\0", "methods = 3", 'methods = ["../../x"]', "[data]\nname = 3"]
)
def test_a_configuration_that_is_none(stopped, text):
    (stopped / "config.toml").write_text(text)
    with pytest.raises(Problem):
        api.resume(stopped, QUIET)


def test_folders_of_methods_are_opened_once(finished):
    folder = RunFolder(finished)
    assert folder.method("mine") is folder.method("mine")


@pytest.mark.parametrize("name", [name for name in catalog.names() if name != "fedalign"])  # it needs convolutions
def test_a_server_is_known_by_its_form(name, clients):
    """However the state of a method's server changes, a checkpoint of it is taken for its own."""
    entry = catalog.find(name)
    short = {key: 2 for key in ("warmup", "head_epochs", "personal_epochs") if key in entry.fields}
    net = norm_net if name == "fedbn" else plain_net
    kind = entry.load()
    method = kind(Model(net), epochs=1, lr=0.01, **toy_settings(kind) | short)
    federation = Federation(Sequential(Job(method, clients)))
    start = Federation(Sequential(Job(method, clients)))
    for _ in range(4):
        federation.step()
        assert _fits(start, federation.server)
