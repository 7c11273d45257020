"""Files: whole or not there, checked when read, never a pickle; names from outside never become paths."""

import errno
import os
import pickle
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perfed.core.errors import Problem
from perfed.core.tree import leaves
from perfed.training import files

SOURCE = Path(files.__file__).parent


# ---------------------------------------------------------------------- atomic writes


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["os.fsync", "os.replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "a.json"
    files.write(path, "old")
    monkeypatch.setattr(where, full)
    with pytest.raises(Problem, match=r"cannot write .*a\.json.*No space left"):
        files.write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    files.write(path, "new")
    assert path.read_text() == "new"


def test_a_full_disk_while_writing(tmp_path):
    """The same with a real limit: the process may not write more than 1,000 bytes into a file."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "a"
    files.write(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(Problem, match="cannot write"):
            files.write(path, "x" * 100_000)
        with pytest.raises(Problem, match="cannot write"):
            files.save_tree(path, {"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(Problem, match="cannot write"):
        files.write(tmp_path / "none" / "a", "x")


def test_text_that_has_no_utf8_form(tmp_path):
    files.write(tmp_path / "a", "name \udcff")
    assert (tmp_path / "a").read_text() == "name \\udcff"


def test_json(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"b": [1, None], "a": "ü"})
    assert files.read_json(path) == {"a": "ü", "b": [1, None]}
    path.write_text("{")
    with pytest.raises(Problem, match="damaged"):
        files.read_json(path)
    with pytest.raises(Problem, match="no file"):
        files.read_json(tmp_path / "none")


@pytest.mark.parametrize(("size", "left"), [(0, b""), (3, b"abc"), (6, b"abcdef")])
def test_truncate(tmp_path, size, left):
    path = tmp_path / "log"
    path.write_bytes(b"abcdef")
    files.Folder(tmp_path).truncate(path, size)
    assert path.read_bytes() == left


def test_truncate_refuses_a_log_with_lines_missing(tmp_path):
    (tmp_path / "log").write_bytes(b"abc")
    folder = files.Folder(tmp_path)
    folder.truncate(tmp_path / "none", 0)
    for name in ("log", "none"):
        with pytest.raises(Problem, match="lines are missing"):
            folder.truncate(tmp_path / name, 4)


# ---------------------------------------------------------------------- trees of tensors

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
tensors = st.builds(
    lambda dtype, shape, seed: (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    ).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 99),
)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
trees = st.recursive(
    tensors | plain,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inside, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b):
    """Equal in every bit, form and type."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_round_trip(tmp_path, tree):
    path = tmp_path / "tree"
    files.save_tree(path, tree)
    assert same(files.load_tree(path), tree)


def test_views_are_saved_as_what_they_show(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tree = {"row": whole[1], "turned": whole.T, "again": whole[1], "grad": whole.clone().requires_grad_()}
    files.save_tree(tmp_path / "tree", tree)
    loaded = files.load_tree(tmp_path / "tree")
    assert all(torch.equal(loaded[key], tree[key]) for key in tree)
    assert not any(t.requires_grad for t in leaves(loaded))


@pytest.mark.parametrize("tree", [{1: torch.zeros(2)}, {"a": object()}, [{2}], lambda: 0])
def test_what_a_tree_cannot_hold(tmp_path, tree):
    with pytest.raises(TypeError):
        files.save_tree(tmp_path / "tree", tree)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def saved(tmp_path):
    """A file like a checkpoint."""
    path = tmp_path / "tree.safetensors"
    states = {str(id): torch.randn(7, generator=torch.Generator().manual_seed(id)) for id in range(3)}
    files.save_tree(path, {"round": 4, "server": {"w": torch.arange(9.0)}, "states": states, "traffic": {"up": 12}})
    return path


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_damaged_byte_is_noticed(saved, flip):
    whole = saved.read_bytes()
    places = {round(at * (len(whole) - 1) / 59) for at in range(60)}
    assert len(places) >= 50
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= flip
        saved.write_bytes(damaged)
        with pytest.raises(Problem):
            files.load_tree(saved)
    saved.write_bytes(whole)
    assert files.load_tree(saved)["round"] == 4


def test_every_truncation_is_noticed(saved):
    whole = saved.read_bytes()
    for size in range(0, len(whole), 13):
        saved.write_bytes(whole[:size])
        with pytest.raises(Problem):
            files.load_tree(saved)


@pytest.mark.parametrize("more", [b"\0", b"more"])
def test_bytes_too_many_are_noticed(saved, more):
    saved.write_bytes(saved.read_bytes() + more)
    with pytest.raises(Problem):
        files.load_tree(saved)


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_not_opened(tmp_path, protocol):
    path, canary = tmp_path / "tree.safetensors", tmp_path / "canary"
    path.write_bytes(pickle.dumps(Bomb(canary), protocol))
    with pytest.raises(Problem, match="damaged or not a file of perfed"):
        files.load_tree(path)
    torch.save(Bomb(canary), path)
    with pytest.raises(Problem, match="damaged or not a file of perfed"):
        files.load_tree(path)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary), protocol))
    assert canary.exists()  # the bomb works


def test_a_header_that_asks_for_too_much(tmp_path):
    path = tmp_path / "bomb"
    for size in (2**63, 2**40, 10**8):
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(Problem):
            files.load_tree(path)
    header = b'{"0":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(Problem):
        files.load_tree(path)


def test_no_tree(tmp_path):
    with pytest.raises(Problem, match="no file"):
        files.load_tree(tmp_path / "none")
    with pytest.raises(Problem):
        files.load_tree(tmp_path)


# ---------------------------------------------------------------------- names

HOSTILE = ["../../x", "/etc/x", "a/b", "a\\b", "a\0b", "x" * 300, "CON", "con", "nul", "COM1", "", ".", "..", "_", "~"]
HOSTILE += ["<script>", "=cmd()", "a", "A", "a ", " a", "é", "e\u0301", "😀", "\udcff", "-rf", "client_0", "a\nb"]


def slugs(names):
    taken = set()
    return [files.slug(name, taken) for name in names]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=60) | st.text("aA_./\\", max_size=4) | st.sampled_from(HOSTILE), unique=True))
@example(HOSTILE)
def test_slugs(names):
    found = slugs(names)
    assert found == slugs(names)
    assert len({slug.lower() for slug in found}) == len(names)  # also where a and A are one folder
    for name, slug in zip(names, found, strict=True):
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,60}", slug), name
        assert not re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)", slug)


def test_simple_names_stay_as_they_are():
    assert slugs(["client_00", "Anna", "b-2"]) == ["client_00", "Anna", "b-2"]


def test_two_clients_of_one_name():
    with pytest.raises(Problem, match="two clients"):
        slugs(["a/b", "a/b"])


# ---------------------------------------------------------------------- one process per folder


def hold(folder, ready, fork):
    """Take the folder, perhaps start a process that lives on, and wait to be killed."""
    with files.Folder(folder).only_one():
        worker = os.fork() if fork else 0
        if worker or not fork:
            os.write(ready, f"{worker}\n".encode())
        while True:
            signal.pause()


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a worker that lives on"])
def test_the_lock_goes_with_its_process(tmp_path, fork):
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        holder = os.fork()
    if holder == 0:
        signal.alarm(60)  # whatever happens, these do not stay
        try:
            hold(tmp_path, there, fork)
        finally:
            os._exit(1)
    worker = int(os.read(here, 100))
    try:
        with pytest.raises(Problem, match="another process"), files.Folder(tmp_path).only_one():
            pass
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with files.Folder(tmp_path).only_one():
            pass
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
        os.close(here)
        os.close(there)
