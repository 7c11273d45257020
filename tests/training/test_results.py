"""The results that come with perfed: the kept runs give the kept tables again."""

import tarfile
from pathlib import Path

import pytest

from perfed.cli import main
from perfed.studies.papers import protocol, result
from perfed.studies.papers.cells import find_cell
from perfed.studies.papers.kept import without_run

KEPT = Path(__file__).parents[2] / "bench" / "results"
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("pfedmb-2", "pfedmt-1", "pgfed-1", "pgfed-3")]
TABLES = ("pfedmb-1", "pfedmb-fig5", "pgfed-2", "pgfed-fig4", *LONG)
AHEAD = ("ahead", "ahead_low", "ahead_high")
RULES = ("seeds", "value", "value_std", *protocol.RULES, *AHEAD, "diverged", "clients_std", "bytes")


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
    lost = without_run(whole)  # nothing but their lines is kept
    for column in dict.fromkeys(column for column, _ in table):
        rows = [row for where, row in table if where == column and table[column, row]["seeds"]]
        if not rows:
            continue
        made = protocol.chosen(whole, [column], [*rows, *["local"] * (whole.kind == "gain")], None)
        for line in result.lines(made, runs):
            expected = table.pop((column, line["row"]))
            gone = lost.get(column, {}).get(line["row"], [])
            assert not any(find_cell(whole, runs, column, line["row"], seed).done for seed in gone), line["row"]
            ended = [one["seeds"] + one["diverged"] for one in (line, expected)]
            if gone:
                assert whole.kind == "gain" or ended[0] + len(gone) == ended[1], line["row"]
                continue
            assert ended[0] == ended[1], line["row"]
            fewer = line["ahead_seeds"] < expected["ahead_seeds"] and whole.own in lost.get(column, {})
            for key in RULES:
                if key not in AHEAD or (whole.own in rows and not fewer):
                    assert line[key] == pytest.approx(expected[key], abs=1e-9), (line["row"], key)
            for key in (key for key in line if key.startswith(("ahead_", "server_", "client_state"))):
                if expected[key] is not None and not fewer:
                    assert line[key] == pytest.approx(expected[key], abs=1e-9), (line["row"], key)
    assert all(not line["seeds"] for line in table.values()), "rows that no run is kept for"


def test_kept_runs_name_no_folder_of_the_machine_they_ran_on(runs):
    texts = [path.read_text() for kind in ("config.toml", "seed_*.json") for path in runs.rglob(kind)]
    assert len(texts) > 100
    assert not any(word in text for text in texts for word in ('"/tmp', '"/work', '"/home'))


@pytest.mark.slow
@pytest.mark.timeout(600)  # ten minutes on two cores
@pytest.mark.parametrize("name", sorted(name for name in protocol.names() if not protocol.find(name).source))
def test_reduced_version_runs_from_end_to_end(name, tmp_path, monkeypatch, capsys):
    """The command as it is typed; what comes out is near what is kept, where that is."""
    monkeypatch.setattr("sys.argv", ["perfed", "table", name, "--quick", "--out", str(tmp_path), "--quiet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, capsys.readouterr().err
    made = protocol.reduced(protocol.find(name), [], True)
    table = result.from_csv(tmp_path / f"{name}-reduced.csv")
    assert len(table) == len(made.columns) * len(made.rows)
    assert all(line["seeds"] == made.seeds and line["label"].startswith("REDUCED") for line in table)
    kept = KEPT / f"{name}-reduced.csv"
    known = {(line["column"], line["row"]): line["value"] for line in result.from_csv(kept)} if kept.is_file() else {}
    for line in table:
        assert line["value"] == pytest.approx(known.get((line["column"], line["row"]), line["value"]), abs=3)
