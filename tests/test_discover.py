"""Members of a room are found by reading its files as text."""

import pytest

from perfed.core.errors import Problem
from perfed.discover import constants, load_file, members, parse


@pytest.fixture
def room(tmp_path):
    """`room(name, text)`: write a file."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_a_member_defines_what_its_room_asks_for(room):
    room("__init__.py", '"""Tools of the room."""\n')
    room("helper.py", '"""Helper: no member."""\ndef tool():\n    pass\n')
    room("two_words.py", '"""Two words: a function.\n\nMore of it.\n"""\ndef make():\n    pass\n')
    room("bound.py", '"""Bound: a name, which needs: no function."""\nmake = dict().get\n')
    room("child.py", '"""Without a title."""\nclass Child(Parent):\n    pass\n')
    folder = room("bare.py", "raise SystemExit\n\ndef make():\n    pass\n")
    described = {"bare": "", "bound": "a name, which needs: no function", "child": "Without a title"}
    described["two-words"] = "a function"
    assert members(folder, "make", "Parent") == described
    assert list(members(folder, "make", "Parent")) == sorted(described)
    assert members(folder, "tool") == {"helper": "no member"}


def test_constants_are_plain_values(room):
    path = room("file.py", "A = 1\nB = ('x', 2)\nC = f(A)\nD = {[]: 1}\nE: int = 3\n") / "file.py"
    assert constants(parse(path).body) == {"A": 1, "B": ("x", 2)}


@pytest.mark.parametrize(("content", "where"), [(b"def (:\n", " in line 1"), (b"\xff\xfe", ""), (b"\0", "")])
def test_what_is_not_python(tmp_path, content, where):
    (tmp_path / "x.py").write_bytes(content)
    with pytest.raises(Problem, match=f"x.py' is not valid Python{where}"):
        parse(tmp_path / "x.py")


def test_a_file_of_ones_own_is_run_anew(room):
    path = room("own.py", "value = 1\n") / "own.py"
    assert load_file(path).value == 1
    room("own.py", "value = 2000\n")
    assert load_file(path).value == 2000


def test_a_member_may_write_its_base_as_it_likes(room):
    """With the module's name in front, under another name, or as a class that derives from another member's."""
    room("a.py", '"""A: plain."""\nclass A(Parent):\n    pass\n')
    room("b.py", '"""B: dotted."""\nfrom room import base\nclass B(base.Parent):\n    pass\n')
    room("c.py", '"""C: renamed."""\nfrom room.base import Parent as P\nclass C(P):\n    pass\n')
    room("d.py", '"""D: of another."""\nfrom room.e import E\nclass D(E):\n    pass\n')
    room("e.py", '"""E: of a renamed one."""\nfrom room.c import C as Other\nclass E(Other):\n    pass\n')
    folder = room("f.py", '"""F: none."""\nclass F(dict):\n    pass\n')
    assert list(members(folder, "Parent")) == ["a", "b", "c", "d", "e"]
