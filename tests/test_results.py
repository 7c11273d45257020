"""The results that come with perfed: the kept runs give the kept tables again."""

import tarfile
from pathlib import Path

import pytest

from perfed.tables import protocol, result

KEPT = Path(__file__).parents[1] / "bench" / "results"
LONG = pytest.param("pfedmt-1", marks=pytest.mark.slow)
TABLES = ("pfedmb-1", "pfedmb-2", "pfedmb-fig5", LONG, "pgfed-1", "pgfed-2", "pgfed-3", "pgfed-fig4")
RULES = ("value", "value_std", *protocol.RULES, "ahead", "ahead_low", "ahead_high", "diverged", "clients_std", "bytes")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All archives, unpacked into one folder, as a reader would."""
    out = tmp_path_factory.mktemp("runs")
    for archive in KEPT.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(out, filter="data")
    return out


@pytest.mark.parametrize("name", TABLES)
def test_kept_runs_give_the_kept_table(name, runs):
    table = {(line["column"], line["row"]): line for line in result.from_csv(KEPT / f"{name}.csv")}
    whole = protocol.find(name)
    for column in dict.fromkeys(column for column, _ in table):
        rows = [row for where, row in table if where == column and table[column, row]["seeds"]]
        if not rows:
            continue
        made = protocol.chosen(whole, [column], [*rows, *["local"] * (whole.kind == "gain")], None)
        for line in result.lines(made, runs):
            expected = table.pop((column, line["row"]))
            assert line["seeds"] == expected["seeds"], line["row"]
            for key in RULES:
                if whole.own in rows or not key.startswith("ahead"):
                    assert line[key] == pytest.approx(expected[key], abs=1e-9), (line["row"], key)
    assert all(not line["seeds"] for line in table.values()), "rows that no run is kept for"


def test_kept_runs_name_no_folder_of_the_machine_they_ran_on(runs):
    texts = [path.read_text() for kind in ("config.toml", "seed_*.json") for path in runs.rglob(kind)]
    assert len(texts) > 100
    assert not any(word in text for text in texts for word in ('"/tmp', '"/work', '"/home'))
