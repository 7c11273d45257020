"""The page on architecture: every module is on it, and its ways are those that a run takes."""

import re
import sys
from pathlib import Path

import pytest

import perfed
from perfed.cli import main

SOURCE = Path(perfed.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
WORDS = "run fedavg --rounds 1 --clients 2 --epochs 1 --batch-size 50 --hidden 4 --engine sequential --no-baseline -q"


def test_every_module_is_on_the_page():
    rows = {}
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            cells = line.split("|")
            rows |= {room: set(re.findall(r"`([\w/]+)`", cells[3])) for room in re.findall(r"`(\w+)`", cells[1])}
    missing, listed = [], set()
    for path in SOURCE.rglob("*.py"):
        room, *rest = path.relative_to(SOURCE).with_suffix("").parts
        if not rest or rest[-1] == "__init__":
            continue
        listed |= {(room, "/".join(rest)), (room, rest[-1])}
        if not {"/".join(rest), rest[-1]} & rows.get(room, set()):
            missing.append("/".join((room, *rest)))
    assert missing == [], "docs/architecture.md: add these files to the table of rooms"
    gone = [(room, name) for room, names in rows.items() for name in names if (room, name) not in listed]
    assert [pair for pair in gone if pair[0] not in ("api", "cli") and not pair[1].endswith("/")] == []


def ways():
    """Every list of calls below a mark, as qualified names."""
    parts = PAGE.split("<!-- way -->")[1:]
    return [
        re.findall(r"^\d+\. `([\w.]+)`", part.partition("\n\n**")[0].partition("\n\n##")[0], re.M) for part in parts
    ]


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """The order in which functions of perfed are called for the first time."""
    order = {}

    def look(frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("perfed."):
            order.setdefault(f"{module.removeprefix('perfed.')}.{frame.f_code.co_qualname}", len(order))

    out = str(tmp_path_factory.mktemp("way") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["perfed", *WORDS.split(), "--lr", "0.1", "--out", out])
        sys.setprofile(look)
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            sys.setprofile(None)
    assert not end.value.code
    return order


@pytest.mark.parametrize("way", ways(), ids=["sample", "gradient", "flag"])
def test_a_way_is_the_one_that_a_run_takes(way, called):
    assert 5 <= len(way) <= 15
    assert [name for name in way if name not in called] == []
    assert sorted(way, key=called.__getitem__) == way
