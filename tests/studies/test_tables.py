"""The papers' tables: their files, their arithmetic, and one small table from end to end."""

import dataclasses
import errno
import json
import re
import tarfile

import numpy as np
import pytest
from reference import state_of
from rich.console import Console

from perfed.core.errors import Problem
from perfed.models import make_network
from perfed.studies import measures, method_costs, tune
from perfed.studies.machine import Machine
from perfed.studies.measures import Curves
from perfed.studies.papers import cell_scores, cells, protocol, rank_agreement, result
from perfed.studies.papers.carry_out import carry_out
from perfed.studies.papers.cells import find_cell, missing_cells
from perfed.training import catalog, files
from perfed.training.config import RunConfig
from perfed.training.prepare import make_method
from perfed.training.statistics import gain_over, spread

QUIET = Console(quiet=True)
SEQUENTIAL = Machine("sequential", "cpu")
SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "mnist": ((1, 28, 28), 10),
    "synthetic": ((60,), 10),
    "digits": ((1, 8, 8), 10),
}


@pytest.mark.parametrize("name", protocol.names())
@pytest.mark.parametrize("quick", [False, True])
def test_every_cell_of_a_file_is_a_valid_run(name, quick):
    """Configurations are built and checked; nothing is trained."""
    made = protocol.reduced(protocol.find(name), [], quick)
    assert bool(made.label) == quick
    seen = set()
    for column in made.columns:
        for row in made.rows:
            config = made.config(column, row, 0)
            assert config.run.baseline is False
            kind = (config.model.name, config.methods, str(sorted(config.method.items())))
            if kind not in seen and not made.source:  # a derived table has the cells of another
                seen.add(kind)
                network = make_network(config.model, *SHAPES[config.data.name])
                make_method(config, config.entries()[0], network, config.data.clients)
    for row in made.rows.values():
        for key, values in row.grid.items():
            for value in values:
                catalog.find(row.method).check({key: value})


def test_rows_share_what_the_file_says_once(tmp_path, monkeypatch):
    made = protocol.find("pfedmb-fig5")
    assert {row.method for row in made.rows.values()} == {"pfedmb"}
    assert made.config("classes-50", "b2", 0).method["pfedmb"]["lr"] == 0.15
    assert made.config("classes-50", "b20", 0).method["pfedmb"]["branches"] == 20
    text = (protocol.folder() / "pfedmb-fig5.toml").read_text()
    (tmp_path / "wrong.toml").write_text(text.replace("[all.row]", "[all.rows]"))
    monkeypatch.setattr(protocol, "folder", lambda: tmp_path)
    with pytest.raises(Problem, match=r"wrong.toml: all has no setting 'rows'; did you mean 'row'"):
        protocol.find("wrong")


def test_published_numbers_are_where_they_belong():
    table = protocol.find("pgfed-1")
    assert table.number("pgfed", "c10-25") == (81.02, 0.41)
    assert table.number("pgfedmo", "c100-100") == (35.76, 0.65)
    assert table.number("pgfed-frozen", "c10-25") == (None, None)
    assert protocol.find("pgfed-2").number("perfedavg", "c10-100") == (63, None)
    assert protocol.find("pgfed-3").number("pgfed", "c100-25") == (9.34, 1.71)
    assert protocol.find("pfedmb-2").number("pfedmb", "classes-50") == (86.73, None)
    assert protocol.find("pfedmt-1").number("fedavg", "synthetic-mlr-100") == (None, None)  # a copying error there
    assert protocol.find("pfedmt-1").number("pfedmt-pm", "synthetic-dnn-100") == (92.196, 1.59)


def test_derived_tables_read_the_runs_of_another():
    made = protocol.find("pgfed-2")
    assert made.cells == "pgfed-1"
    assert made.config("c10-25", "pgfed", 3) == protocol.find("pgfed-1").config("c10-25", "pgfed", 3)


def test_settings_by_column():
    made = protocol.find("pfedmt-1")
    rate = lambda column: made.config(column, "pfedmt-gm", 0).method["pfedmt"]
    assert (rate("mnist-mlr-600")["lam"], rate("mnist-mlr-600")["gamma"]) == (15.0, 0.1)
    assert (rate("mnist-cnn-100")["lam"], rate("mnist-cnn-100")["gamma"]) == (3.0, 1.0)
    assert made.config("mnist-mlr-100", "local", 0).run.rounds == 100


def test_wrong_names_are_refused():
    with pytest.raises(Problem, match=r"no table 'pgfed1'.*pgfed-1"):
        protocol.find("pgfed1")
    with pytest.raises(Problem, match="no column 'c10'"):
        protocol.chosen(protocol.find("pgfed-1"), ["c10"], [], None)
    with pytest.raises(Problem, match="no row 'pgfe'"):
        protocol.chosen(protocol.find("pgfed-1"), [], ["pgfe"], None)
    with pytest.raises(Problem, match="no setting 'rounds'"):
        protocol.reduced(protocol.find("pgfed-1"), ["rounds=3"], False)


def test_a_wrong_file_is_refused(tmp_path):
    text = (protocol.folder() / "pfedmb-1.toml").read_text()
    for old, new, says in (
        ("paper = [87.26]", "paper = [87.26, 1.0]", "one number for each of 1 columns"),
        ('rule = "val"', 'rule = "best"', "must be one of max, val"),
        ('own = "pfedmb"', 'own = "pfedbm"', "not one of its rows"),
        ("watch = true", "watched = true", "no setting 'watched'"),
        ("[rows.local]", "[rows.local]\nwatch = true", "row 'local': watch is for pfedmb"),
        ("watch = true", "times = 0", "times must be a whole number of at least 1, not 0"),
    ):
        assert old in text
        (tmp_path / "mine.toml").write_text(text.replace(old, new))
        with pytest.raises(Problem, match=says):
            protocol.find(str(tmp_path / "mine.toml"))


def test_settings_that_no_result_depends_on_are_not_a_reduction():
    """The table and its cells keep their names; everything that could change a number is said."""
    whole = protocol.find("pgfed-1")
    for key, value in (
        ("checkpoint_every", 7),
        ("save_models", "all"),
        ("state_memory", 9),
        ("block", 5),
        ("fast", False),
    ):
        made = protocol.reduced(whole, [f"run.{key}={str(value).lower()}"], False)
        assert (made.label, made.cells, made.columns["c10-25"].title) == ("", "pgfed-1", "CIFAR10, 25 clients")
        assert getattr(made.config("c10-25", "pgfed", 0).run, key) == value
    assert {f"run.{key}" for key in protocol.NEUTRAL} <= {f"run.{f.name}" for f in dataclasses.fields(RunConfig)}
    for text in ("run.eval_every=2", "run.tf32=false", "run.precision=float64", "run.rounds=3", "data.alpha=1", "lr=1"):
        made = protocol.reduced(whole, ["run.block=5", text], False)
        assert made.cells == "pgfed-1-reduced"
        assert made.label.count("=") == 1
    assert "checkpoint_every" not in protocol.reduced(whole, [], True).label


def test_what_was_chosen_for_a_column_does_not_count_where_other_settings_are_asked_for() -> None:
    pairs, column = protocol.find("pfedmb-1"), "pairs"
    assert "lr" in pairs.rows["pfedmb"].by_column[column]

    def rate(made: protocol.Protocol) -> float:
        config = made.config(column, "pfedmb", 0)
        return (config.train | config.method["pfedmb"])["lr"]

    assert rate(protocol.reduced(pairs, [], True)) == pairs.quick["train"]["lr"] != rate(pairs)
    assert rate(protocol.reduced(pairs, ["train.lr=0.7"], False)) == 0.7
    assert rate(protocol.reduced(pairs, ["run.rounds=7"], False)) == rate(pairs)
    many = protocol.find("pfedmt-1")
    deep = protocol.reduced(many, [], True).config("synthetic-dnn-600", "pfedmt-pm", 0)
    assert deep.method["pfedmt"]["gamma"] == 1.0  # the paper's own setting for this column, not one from a grid
    local = protocol.reduced(many, ["train.epochs=3"], False).config("synthetic-mlr-600", "local", 0)
    assert local.method["local"]["epochs"] == 13  # the row's own: as much work as pFedMT's
    typed = protocol.reduced(protocol.find("pfedmb-2"), ["lr=0.7"], True)
    assert typed.config("dirichlet-15", "pfedmb", 0).method["pfedmb"].get("lr", 0.7) == 0.7
    assert "pfedmb.lr" not in typed.label


def test_rows_that_read_other_rows_bring_them_along():
    made = protocol.chosen(protocol.find("pfedmt-1"), ["mnist-mlr-600"], ["pfedme-gm"], 2)
    assert list(made.rows) == ["pfedme-pm", "pfedme-gm"]
    assert (made.seeds, made.own) == (2, "")


def test_a_row_may_take_more_rounds_for_each_of_the_columns(tmp_path):
    """20 local steps in 30 rounds are the work of one round of 600: both rows are read at the same amount of work."""
    from perfed.report.table_figures import _curves

    made = protocol.find("pfedmt-1")
    long, short = (made.config(column, "fedavg-rounds", 0).run for column in ("mnist-mlr-600", "mnist-mlr-100"))
    assert [(one.rounds, one.eval_every) for one in (long, short)] == [(18_000, 300), (3000, 300)]
    text = """
        title = "t"
        paper = "p"
        rule = "last"
        seeds = 1
        figures = ["rounds"]
        [all]
        data = { clients = 4 }
        model = { name = "mlr" }
        train = { epochs = 1 }
        run = { rounds = 2, engine = "sequential" }
        [columns.long]
        title = "long"
        [columns.short]
        title = "short"
        same = "long"
        until = 1
        run = { rounds = 1 }
        [rows.fedavg]
        [rows.three]
        method = "fedavg"
        times = 3
        """
    (tmp_path / "mine.toml").write_text(text)
    made = protocol.find(str(tmp_path / "mine.toml"))
    carry_out(made, tmp_path, QUIET, Machine())
    rounds = {(c, r): result.seed_scores(made, tmp_path, c, r)[0]["rounds"] for c in made.columns for r in made.rows}
    assert rounds == {
        ("long", "fedavg"): [1, 2], ("long", "three"): [3, 6], ("short", "fedavg"): [1], ("short", "three"): [3],
    }  # fmt: skip
    curves = _curves(made, tmp_path, "long", "mean", "rounds")
    assert [curves[row][0].tolist() for row in made.rows] == [[1, 2], [1, 2]]
    # A longer run whose log is gone serves where its scores were kept, and nowhere else.
    (tmp_path / "mine/long/fedavg/seed_0/fedavg/metrics.jsonl").unlink()
    assert find_cell(made, tmp_path, "short", "fedavg", 0).column == "long"
    (tmp_path / "mine/long/fedavg/seed_0/scores_personal_1.json").unlink()
    assert find_cell(made, tmp_path, "short", "fedavg", 0).column == "short"


# ------------------------------------------------------------------ arithmetic


def curve():
    """Three clients, of which the last has no test samples; four evaluations, the last two within ten rounds."""
    test = np.array([[0.2, 0.4, np.nan], [0.9, 0.7, np.nan], [0.5, 0.5, np.nan], [0.6, 0.8, np.nan]])
    val = np.array([[0.1, 0.1, 0.1], [0.2, 0.3, 0.1], [0.9, 0.8, 0.7], [0.5, 0.5, 0.5]])
    return Curves(np.array([5, 10, 15, 20]), test, val, 1 - test, np.array([10, 30, 0]))


def test_rules():
    assert cell_scores.pick_round(curve(), "max")[0] == 10
    np.testing.assert_allclose(cell_scores.pick_round(curve(), "max")[1], [0.9, 0.7, np.nan])
    at, each = cell_scores.pick_round(curve(), "val")
    assert at == 15
    np.testing.assert_allclose(each, [0.5, 0.5, np.nan])
    np.testing.assert_allclose(cell_scores.pick_round(curve(), "last10")[1], [0.55, 0.65, np.nan])  # rounds 15 and 20
    assert cell_scores.pick_round(curve(), "last")[0] == 20
    without = dataclasses.replace(curve(), val=np.full((4, 3), np.nan))
    assert cell_scores.pick_round(without, "val")[0] is None


def test_measures():
    found = spread(np.array([0.5, 1.0, np.nan]), np.array([30, 10, 0]))
    expected = {
        "mean": 0.75,
        "pooled": 0.625,
        "std": 0.25,
        "variance": 0.0625,
        "p10": 0.55,
        "worst10": 0.5,
        "jain": 0.9,
    }
    assert found == pytest.approx(expected)
    gained = gain_over(np.array([0.5, 0.5, 0.1]), np.array([0.6, 0.5, np.nan]))
    assert gained == pytest.approx({"mean": 0.05, "std": 0.05, "positive": 0.5})
    assert measures.first_round(curve().rounds, curve().mean, 0.6) == 10
    assert measures.first_round(curve().rounds, curve().mean, 0.81) is None
    assert measures.area(np.array([1, 2, 4]), np.array([0.0, 1.0, 1.0])) == pytest.approx(2.5 / 3)


def test_ranks_against_scipy_and_by_hand():
    from scipy.stats import kendalltau, spearmanr

    a, b = np.array([1.0, 2.0, 2.0, 4.0, 7.0]), np.array([2.0, 1.0, 3.0, 3.0, 9.0])
    assert rank_agreement.ranks(a).tolist() == [1, 2.5, 2.5, 4, 5]
    assert rank_agreement.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_agreement.kendall(a, b) == pytest.approx(kendalltau(a, b).statistic)
    assert rank_agreement.kendall(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(1 / 3)
    assert rank_agreement.same_order(a, b) == (7, 9)  # (0,1) is the other way round, (2,3) is level in b
    assert rank_agreement.spearman(a, np.ones(5)) is None


def test_intervals_by_hand():
    """Constant differences have no width; two clients that differ give the range of their resampled means."""
    assert rank_agreement.interval(np.full((3, 4), 1.5), crossed=True) == (1.5, 1.5)
    assert rank_agreement.interval(np.array([[0.0, 1.0]]), crossed=True) == (0.0, 1.0)  # each with probability 1 / 4
    assert rank_agreement.interval(np.array([[2.0, np.nan]]), crossed=False)[1] == 2.0
    wide = rank_agreement.interval(
        np.array([[0.0, 1.0]] * 8), crossed=True
    )  # the same clients under every seed: no narrower
    narrow = rank_agreement.interval(np.array([[0.0, 1.0]] * 8), crossed=False)
    assert wide == (0.0, 1.0)
    assert 0.0 < narrow[0] < 0.5 < narrow[1] < 1.0


def test_passes_are_counted():
    """[gradients, forwards] per training sample, per validation sample, and regardless of both."""
    count = lambda name, **settings: [x.tolist() for x in method_costs.passes(name, tuple(settings.items()))]
    assert count("fedavg", epochs=3) == [[3, 0], [0, 0], [0, 0]]
    assert count("pgfed", epochs=3) == [[4, 0], [0, 0], [0, 0]]  # one more for the gradient that is sent
    assert count("pfedmb", epochs=3) == [[6, 0], [0, 0], [0, 0]]
    assert count("ifca", epochs=3, clusters=2) == [[3, 2], [0, 0], [0, 0]]
    assert count("pfedmt", K=3, L=4, batch_size=5) == [[0, 0], [0, 0], [60, 0]]
    assert count("fedfomo", epochs=1, downloads=2) == [[1, 4], [0, 4], [0, 0]]
    assert count("fedcurv", epochs=3) == [[4, 0], [0, 0], [0, 0]]  # those of single samples
    assert count("fedmd", epochs=3, digest_epochs=2) == [[3, 0], [0, 0], [40, 20]]  # 20 public samples; no preparation
    assert count("zhao", epochs=3, share=0.0, warmup=50) == [[3, 0], [0, 0], [0, 0]]  # the server's is not in it


# ------------------------------------------------------------------ from end to end

TINY = ["--set", "run.rounds=2", "--set", "data.clients=4", "--set", "train.epochs=1", "--engine", "sequential"]


@pytest.mark.slow
def test_a_small_table_is_run_once_and_read_back(tmp_path, monkeypatch, capsys):
    from perfed.cli import app

    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr("sys.argv", ["perfed", "table", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        assert end.value.code == 0, capsys.readouterr().err
        return capsys.readouterr()

    words = ["pgfed-1", "--quick", "--methods", "local,fedavg,pgfed", "--seeds", "1", *TINY]
    out = json.loads(call(*words, "--json").out)
    assert "REDUCED" in out["label"]
    lines = {line["row"]: line for line in out["lines"]}
    assert lines["pgfed"]["seeds"] == 1
    assert lines["pgfed"]["difference"] is None  # other settings than the paper's
    assert lines["pgfed"]["flops"] > lines["fedavg"]["flops"] > 0
    assert 0 < lines["fedavg"]["macro_f1"] < lines["fedavg"]["auc"] < 1
    assert lines["local"]["gain"] == 0
    for kind in ("csv", "md", "json"):
        assert "REDUCED" in (tmp_path / f"runs/tables/pgfed-1-reduced.{kind}").read_text()
    read = result.from_csv(tmp_path / "runs/tables/pgfed-1-reduced.csv")
    assert [{k: v for k, v in line.items() if k != "plain"} for line in read] == [
        {k: v for k, v in line.items() if k != "plain"} for line in out["lines"]
    ]

    monkeypatch.setattr(
        "perfed.studies.papers.carry_out.train", lambda *_, **__: pytest.fail("a finished cell was run again")
    )
    again = json.loads(call(*words, "--json").out)
    assert [line["value"] for line in again["lines"]] == [line["value"] for line in out["lines"]]
    shown = call("pgfed-1", "--quick", "--methods", "local,pgfed,apfl", "--seeds", "1", "--only-report", *TINY).out
    assert "not run" in shown  # APFL
    gains = json.loads(call("pgfed-3", "--quick", "--seeds", "1", "--only-report", "--json", *TINY).out)["lines"]
    assert {line["row"]: line["value"] for line in gains}["pgfed"] == pytest.approx(lines["pgfed"]["gain"])


def test_a_packed_table_is_the_same_elsewhere(tmp_path, monkeypatch, capsys):
    """Settings and scores alone; the same runs give the same archive."""
    from perfed.cli import app
    from perfed.report.table_figures import matrix

    def call(*words, code=0):
        monkeypatch.setattr("sys.argv", ["perfed", "table", "pgfed-1", "--quick", "--seeds", "1", *TINY, *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        assert end.value.code == code
        return capsys.readouterr()

    here, there, rows = tmp_path / "here", tmp_path / "there", ["--methods", "local,pgfed"]
    (tmp_path / "data").mkdir()
    place = ["--data-dir", str(tmp_path / "data"), "--out", str(here), "--pack"]
    for name, says in (("a.zip", "--pack writes a .tar.xz archive"), ("no/a.tar.xz", "there is no folder")):
        assert says in call(*rows, *place, str(tmp_path / name), code=2).err
    nothing = call(*rows, *place, str(tmp_path / "a.tar.xz"), "--only-report", code=2).err
    assert "there is nothing to pack" in nothing
    call(*rows, *place, str(tmp_path / "a.tar.xz"))
    assert "exists already" in call(*rows, *place, str(tmp_path / "a.tar.xz"), code=2).err
    call(*rows, *place, str(tmp_path / "b.tar.xz"))
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()
    with tarfile.open(tmp_path / "a.tar.xz") as archive:
        archive.extractall(there, filter="data")
    files = [path for path in there.rglob("*") if path.is_file()]
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
    assert {path.suffix for path in files} == {".json", ".jsonl", ".toml", ".safetensors"}
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), TINY[1:6:2], True), [], ["local", "pgfed"], 1)
    assert result.lines(made, there) == result.lines(made, here)
    (column,) = made.columns
    assert matrix(made, there, column) is not None


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    sets = ["run.rounds=1", "data.clients=4", "train.epochs=1"]
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), sets, True), [], ["local"], 1)
    carry_out(made, tmp_path, QUIET, SEQUENTIAL)
    (line,) = result.lines(made, tmp_path)
    assert line["seeds"] == 1
    other = protocol.reduced(protocol.find("pgfed-1"), ["run.rounds=2", "data.clients=4", "train.epochs=1"], True)
    other = protocol.chosen(other, [], ["local"], 1)
    with pytest.raises(Problem, match="was run with other settings"):
        result.lines(other, tmp_path)
    same = protocol.reduced(protocol.find("pgfed-1"), [*sets, "run.checkpoint_every=2"], True)
    assert result.lines(protocol.chosen(same, [], ["local"], 1), tmp_path) == [line]
    (result_file,) = tmp_path.rglob("result.json")
    result_file.unlink()
    with pytest.raises(Problem, match="was run with other settings"):
        carry_out(other, tmp_path, QUIET, SEQUENTIAL)


def test_no_link_leads_from_a_table_to_its_cells(tmp_path):
    """Whoever makes a table names its folder, which may be reached by a link, and nothing below it."""
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), [], True), [], ["local"], 1)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (real := tmp_path / "real").mkdir()
    (out := tmp_path / "out").symlink_to(real)
    cell = find_cell(made, out, next(iter(made.columns)), "local", 0).folder
    for link in (*list(cell.parents)[2::-1], cell):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(elsewhere)
        for use in (lambda: carry_out(made, out, QUIET, SEQUENTIAL), lambda: result.lines(made, out)):
            with pytest.raises(Problem, match=rf"{link}' is a link, and nothing in a run folder is followed"):
                use()
        link.unlink()
    assert not list(elsewhere.iterdir())


def test_a_cell_with_the_tables_own_network_is_known_on_another_machine(tmp_path, monkeypatch):
    digits = ["data.name=digits", "data.partition=iid", "data.normalise=channel", "data.clients=3"]
    small = [*digits, "run.rounds=1", "epochs=1"]

    def table():
        made = protocol.reduced(protocol.find("pfedmt-1"), small, False)
        return protocol.chosen(made, ["mnist-cnn-600"], ["local"], 1)

    out, here, there = tmp_path / "runs", protocol.folder(), tmp_path / "elsewhere"
    carry_out(table(), out, QUIET, SEQUENTIAL)
    lines = result.lines(table(), out)
    assert lines[0]["seeds"] == 1
    (record,) = out.rglob("seed_0.json")
    assert 'name = "networks.py:pfedmt"' in json.loads(record.read_text())["config"]
    there.mkdir()
    for name in ("pfedmt-1.toml", "networks.py"):
        (there / name).write_bytes((here / name).read_bytes())
    monkeypatch.setattr(protocol, "folder", lambda: there)
    assert table().config("mnist-cnn-600", "local", 0).model.name == f"{there}/networks.py:pfedmt"
    assert result.lines(table(), out) == lines


def smallest(table, rows, seeds=1):
    """Some rows of a reduced table, of one round."""
    sets = ["run.rounds=1", "data.clients=4", "train.epochs=1"]
    return protocol.chosen(protocol.reduced(protocol.find(table), sets, True), [], rows, seeds)


def ran(made, out):
    """The same table, with its cells run."""
    carry_out(made, out, QUIET, SEQUENTIAL)
    return made


def test_what_is_unusual_about_the_data_stands_beside_the_numbers(tmp_path):
    from perfed.report.table_files import write_table
    from perfed.report.table_text import body

    made = ran(smallest("pgfed-1", ["local"]), tmp_path)
    (place,) = tmp_path.rglob("clients.json")
    about = json.loads(place.read_text())
    assert "note" not in about["partition"]
    about["partition"]["note"] = "pixels rounded to 6 bits"
    place.write_text(json.dumps(about))
    table = result.lines(made, tmp_path)
    assert "CIFAR10, 25 clients (pixels rounded to 6 bits)**" in body(made, table)
    (tmp_path / "kept.csv").write_text(result.to_csv(table))
    assert "CIFAR10, 25 clients (pixels rounded to 6 bits)**" in body(made, result.from_csv(tmp_path / "kept.csv"))
    drawn = [one.with_suffix(".svg").read_text() for one in write_table(made, tmp_path, table) if one.suffix == ".png"]
    assert drawn
    assert all("CIFAR10, 25 clients (pixels rounded to 6 bits) -->" in one for one in drawn)


def test_how_many_seeds_a_difference_has(tmp_path):
    from perfed.report.table_text import cells

    ran(smallest("pgfed-1", ["local", "pgfed"]), tmp_path)
    ran(smallest("pgfed-1", ["fedavg"], seeds=2), tmp_path)
    for table, known in (("pgfed-1", 2), ("pgfed-3", 1)):  # a gain needs Local's run of the same seed
        made = smallest(table, ["local", "fedavg", "pgfed"], seeds=2)
        lines = {line["row"]: line for line in result.lines(made, tmp_path)}
        assert (lines["fedavg"]["seeds"], lines["fedavg"]["ahead_seeds"]) == (known, 1)
        text = next(row for row in cells(made, list(lines.values()), "c10-25") if row[0] == "FedAvg")
        assert ("(1 of 2 seeds)" in text[-2]) == (known == 2)


def test_a_table_does_without_the_pictures_of_files_that_are_gone(tmp_path):
    from perfed.report.table_figures import draw

    made = ran(smallest("pgfed-1", ["pgfed"]), tmp_path)
    kinds = lambda: [path.name for path in draw(made, tmp_path) if "matrix" in path.name]
    assert kinds() == ["pgfed-1-reduced-matrix-c10-25.png"]
    (server,) = tmp_path.rglob("server.safetensors")
    server.unlink()
    assert kinds() == []


# ------------------------------------------------------------------ tuning


def test_the_whole_grid_is_tried_on_validation_samples(tmp_path):
    from perfed.training.config import from_dict

    raw = {"data": {"clients": 3}, "run": {"rounds": 1, "engine": "sequential"}, "train": {"epochs": 1}}
    base = from_dict({"methods": ["fedavg"], **raw})
    task = tune.for_run(base, tune.read_grid(["lr=0.05,0.0001"]), tmp_path)
    found = tune.tune(task, QUIET, command="perfed tune")
    assert found["best"]["settings"] == {"lr": 0.05}
    assert [one["settings"]["lr"] for one in found["tried"]] == [0.05, 0.0001]
    kept = json.loads((tmp_path / "tune.json").read_text())
    assert {key: found[key] for key in kept} == kept
    assert (kept["rounds"], kept["seeds"], kept["command"]) == (1, [0], "perfed tune")
    assert (tmp_path / "tune.csv").read_text().splitlines()[0] == "lr,validation,round,problem"
    (run,) = tmp_path.glob("*0_05*/seed_0/fedavg/metrics.jsonl")  # the score is the validation accuracy of its logs
    values = [json.loads(line)["personal"]["val"]["accuracy"] for line in run.read_text().splitlines()]
    assert found["best"]["validation"] == pytest.approx(np.mean([v for v in values if v is not None]))
    assert found["use"] == "perfed run fedavg --lr 0.05"
    row = dataclasses.replace(task, name="pgfed", table=protocol.find("pgfed-1"), column="c10-25")
    used = tune.line_to_use(row, {"lr": 0.1, "order": "alpha"})
    assert used == 'pgfed-1.toml, under [rows.pgfed.at]: c10-25 = { lr = 0.1, order = "alpha" }'
    other = dataclasses.replace(base, run=dataclasses.replace(base.run, rounds=2))
    with pytest.raises(Problem, match="was run with other settings"):  # not taken for what is asked now
        tune.tune(tune.for_run(other, {"lr": [0.05]}, tmp_path), QUIET)


def tuning(method, grid, out, engine="sequential"):
    """A small search."""
    from perfed.training.config import from_dict

    run = {"rounds": 1, "engine": engine, "fast": False}
    raw = {"data": {"clients": 3}, "model": {"name": "mlr"}, "run": run, "train": {"epochs": 1}}
    return tune.for_run(from_dict({"methods": [method], **raw}), grid, out)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("method", "grid", "problem"),
    [("feddyn", {"lr": [0.05, 1e3]}, "feddyn diverges unless"), ("pfedmt", {"teams": [2, 9]}, "pfedmt cannot make 9")],
)
def test_a_trial_fails_by_its_own_settings(tmp_path, engine, method, grid, problem):
    """And not those of its batch with it, whether it is known before the first round or in it."""
    tried = tune.tune(tuning(method, grid, tmp_path, engine), QUIET)["tried"]
    assert [one["validation"] is None for one in tried] == [False, True]
    assert [one["problem"].startswith(problem) for one in tried] == [False, True]


def test_what_is_not_a_trials_own_failure_ends_the_search(tmp_path, monkeypatch):
    """Another process in its folder, a full disk, a log that is gone: choosing without it would be choosing wrong."""
    task = tuning("fedavg", {"lr": [0.05, 0.0001]}, tmp_path / "a")
    tune.tune(task, QUIET)
    (log,) = tmp_path.glob("a/*0_0001*/seed_0/fedavg/metrics.jsonl")
    log.unlink()
    with pytest.raises(Problem, match=r"fedavg/metrics.jsonl' is missing, and result.json says that it was written"):
        tune.tune(task, QUIET)
    for folder, name, error in (("b", "train", Problem("another process is working in 'x'")),
                                ("c", "reopen", Problem("cannot write 'x': No space left on device")),
                                ("d", "train", OSError(errno.ENOSPC, "No space left on device"))):  # fmt: skip

        def refuse(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setitem(tune.run_cells.__globals__, name, refuse)
            with pytest.raises(type(error), match=r"another process|No space left"):
                tune.tune(tuning("fedavg", {"lr": [0.05, 0.0001]}, tmp_path / folder), QUIET)
        assert not (tmp_path / folder / "tune.csv").exists()


def test_trials_that_differ_in_lr_alone_are_one_batch(tmp_path, monkeypatch):
    """Those of one mu and both seeds at once, as they would be alone; one that diverges is an answer, too."""
    from perfed.training.config import from_dict

    run = {"rounds": 1, "engine": "vectorised", "fast": False}
    raw = {"data": {"clients": 3}, "model": {"name": "mlr"}, "run": run, "train": {"epochs": 1, "weight_decay": 1e9}}
    base, sizes = from_dict({"methods": ["fedprox"], **raw}), []
    together = tune.run_cells
    monkeypatch.setattr(tune, "run_cells", lambda batch, *rest: [sizes.append(len(batch)), together(batch, *rest)][1])
    task = tune.for_run(base, {"lr": [1e-9, 1e-10, 1e15], "mu": [0.1, 0.2]}, tmp_path)
    found = tune.tune(task, QUIET, seeds=2)
    assert sizes == [6, 6]
    assert [one["settings"] for one in found["tried"]] == [
        {"lr": lr, "mu": mu} for mu in (0.1, 0.2) for lr in (1e-9, 1e-10, 1e15)
    ]
    assert [one["problem"].partition(":")[0] for one in found["tried"]] == ["", "", "training diverged"] * 2
    assert "now 1e+15" in found["tried"][2]["problem"]
    plain = dataclasses.replace(base, run=dataclasses.replace(base.run, engine="sequential"))
    alone = tune.for_run(plain, {"lr": [1e-10], "mu": [0.2]}, tmp_path / "alone")
    alone = tune.tune(alone, QUIET, seeds=2)
    assert alone["best"]["validation"] == pytest.approx(found["tried"][4]["validation"])
    again = tune.tune(task, QUIET, seeds=2)
    assert sizes == [6, 6, 2]  # nothing is run again, not even what diverged
    assert again["tried"] == found["tried"]


def test_rows_of_a_table_are_tuned_in_fewer_rounds(tmp_path, monkeypatch, capsys):
    """A plain row and another, in one command; what the table uses of it is said in its output."""
    from perfed.cli import app
    from perfed.studies.papers import tuned

    words = ["pgfed-1", "--column", "c10-25", "--quick", "--set", "data.clients=4", "--set", "train.epochs=1"]
    more = ["--rows", "fedavg-own,local", "--grid", "lr=0.02,0.0001", "--rounds", "1", "--engine", "sequential"]
    monkeypatch.setattr("sys.argv", ["perfed", "tune", "--table", *words, *more, "--out", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as end:
        app.main()
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    rows = json.loads(said.out)["rows"]
    assert list(rows) == ["fedavg-own", "local"]
    kept = json.loads((tmp_path / "tune-pgfed-1-reduced-c10-25.json").read_text())
    assert (kept["table"], kept["column"]) == ("pgfed-1-reduced", "c10-25")
    for one in kept["rows"]:
        assert one["rounds"] == 1  # the table has 30
        assert one["best"]["settings"] == {"lr": 0.02}
        assert len(one["tried"]) == 2
        assert all(one[key] for key in ("command", "commit", "device", "version"))
        assert str(tmp_path) not in one["command"]
    trials = list((tmp_path / "pgfed-1-reduced-c10-25/fedavg-own").glob("lr-*/seed_0/pgfed/result.json"))
    assert len(trials) == 2
    (tmp_path / "results").mkdir()
    (tmp_path / "tune-pgfed-1-reduced-c10-25.json").rename(tmp_path / "results/tune-pgfed-1-reduced-c10-25.json")
    monkeypatch.setattr("perfed.studies.papers.kept.folder", lambda: tmp_path)
    made = protocol.reduced(protocol.find("pgfed-1"), [], True)
    (note,) = tuned.chosen_on(made)
    assert note.startswith("REDUCED to digits, 20 clients: CIFAR10, 25 clients: chosen on validation data, 2 trials")
    assert "2 trials, 1 rounds, seed 0" in note
    assert "seed 0: lr from {0.02, 0.0001}" in note
    assert note.endswith(": FedAvg own, mu = 0, Local.")
    assert tuned.chosen_on(protocol.reduced(protocol.find("pgfed-1"), ["lr=0.5"], True)) == []  # not what was chosen
    assert tuned.chosen_on(protocol.find("pgfed-1")) == []  # not tuned
    first = kept["rows"][0]
    settings = {"mu": 0.1, "lr": 0.3}
    worse = {**first, "rounds": 5, "grid": {"mu": [0.1, 0.5], "lr": [0.3]}, "tried": first["tried"][:1]}
    worse["best"] = {**first["best"], "settings": settings}
    older = {**worse, "commit": "before"}

    def notes(*grids):
        text = json.dumps({**kept, "rows": [*kept["rows"], *grids]})
        (tmp_path / "results/tune-pgfed-1-reduced-c10-25.json").write_text(text)
        return tuned.chosen_on(made)

    of_two, of_one = notes(worse, older)  # other grids of the same row, whose best is not used, are told too
    assert (
        "3 of 6 combinations, 1 to 5 rounds, seed 0: lr from {0.3, 0.02, 0.0001}; mu from {0.5, 0.1}; 1 more" in of_two
    )
    assert of_two.endswith(": FedAvg own, mu = 0.")
    assert of_one.endswith(": Local.")
    row = dataclasses.replace(made.rows["fedavg-own"], by_column={"c10-25": {"lr": 0.02, "mu": 0.9}})
    other = dataclasses.replace(made, rows={**made.rows, "fedavg-own": row})
    (note,) = tuned.chosen_on(other)  # it has the best lr of a grid, and a mu that no grid chose
    assert note == of_one
    from perfed.report.table_text import report

    assert of_two in report(made, result.lines(made, tmp_path))


def test_a_search_asks_and_tells(monkeypatch):
    """With something in optuna's place: what is suggested is scored, failures are told."""
    import types

    told = []
    trial = types.SimpleNamespace(suggest_categorical=lambda _, values: values[0])
    study = types.SimpleNamespace(ask=lambda: trial, tell=lambda *a, **k: told.append((a[1:], k)))
    state = types.SimpleNamespace(TrialState=types.SimpleNamespace(FAIL="fail"))
    samplers = types.SimpleNamespace(TPESampler=lambda seed: seed)
    fake = types.SimpleNamespace(create_study=lambda **_: study, samplers=samplers, trial=state)
    monkeypatch.setattr("importlib.import_module", lambda _: fake)
    answers = iter([{"validation": 0.5, "sign": -1}, {"validation": None}])
    tune._search({"lr": [0.1, 0.2]}, lambda settings: next(answers), 2)
    assert told == [((-0.5,), {}), ((), {"state": "fail"})]


def test_tuning_refuses_what_it_cannot_use(tmp_path):
    entry = catalog.find("pgfed")
    with pytest.raises(Problem, match="nothing to tune"):
        tune.check_grid({}, entry)
    with pytest.raises(Problem, match="no setting 'm'"):
        tune.check_grid({"m": [1]}, entry)
    with pytest.raises(Problem, match="takes setting=value"):
        tune.read_grid(["lr"])
    table, joining, tiers = (protocol.find(name) for name in ("pgfed-1", "pgfed-fig4", "pfedmt-1"))
    task = tune.for_table(table, table, "c10-25", "pgfed-frozen", [], tmp_path)
    assert len(list(tune.combinations(task.grid))) == 20
    made = task.configure({"lr": 0.001, "mu": 0.05}, 1)
    assert made.method["pgfed"] == {"lr": 0.001, "mu": 0.05, "alpha_lr": 0.0}
    assert made.run.seed == 1
    with pytest.raises(Problem, match="row 'pfedme-gm' reads the runs of 'pfedme-pm': tune that one"):
        tune.for_table(tiers, tiers, "mnist-mlr-600", "pfedme-gm", ["lr=0.1"], tmp_path)
    with pytest.raises(Problem, match="clients join later in column 'c10'"):
        tune.for_table(joining, joining, "c10", "local", ["lr=0.1"], tmp_path)


# ------------------------------------------------------------------ clients that join later


def test_some_of_the_clients(clients):
    from perfed.engines.vectorised import part as some

    last = some(clients, 1, len(clients))
    assert last.names == clients.names[1:]
    for split in ("train", "val", "test"):
        whole, part, skipped = clients.split(split), last.split(split), clients.split(split).size[0]
        assert part.size == whole.size[1:]
        assert part.x.equal(whole.x[skipped:])
        assert part.y.equal(whole.y[skipped:])


def test_those_who_join_are_scored_epoch_by_epoch(tmp_path):
    """Four of five train; the fifth tunes their model, and starts from scratch under Local."""
    small = ["run.rounds=3", "data.clients=5", "run.participation=1.0", "train.lr=0.1", "train.epochs=1"]
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-fig4"), small, True), [], ["local", "fedavg"], 1)
    carry_out(made, tmp_path, QUIET, SEQUENTIAL)
    one = find_cell(made, tmp_path, "c10", "fedavg", 0)
    assert one.done
    assert len(json.loads((one.folder / "clients.json").read_text())["clients"]) == 4
    found = json.loads((one.folder / "newcomers.json").read_text())
    assert (len(found["epochs"]), len(found["epochs"][0])) == (20, 1)
    lines = {line["row"]: line for line in result.lines(made, tmp_path)}
    accuracies = [epoch[0]["test"]["accuracy"] for epoch in found["epochs"]]
    assert lines["fedavg"]["max"] == pytest.approx(100 * max(accuracies))
    assert lines["fedavg"]["last"] == pytest.approx(100 * accuracies[-1])
    alone = json.loads((find_cell(made, tmp_path, "c10", "local", 0).folder / "newcomers.json").read_text())
    assert found["epochs"][0][0]["test"]["loss"] < alone["epochs"][0][0]["test"]["loss"]  # a better start


def test_an_interrupted_cell_goes_on(tmp_path, monkeypatch):
    """Stopped after its first checkpoint, it ends with the same logs as one that was not."""
    from perfed.federation.federation import Federation

    small = ["run.rounds=3", "run.checkpoint_every=1", "data.clients=4", "train.epochs=1"]
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), small, True), [], ["fedavg-own"], 1)
    carry_out(made, tmp_path / "whole", QUIET, SEQUENTIAL)
    step, rounds = Federation.begin, []

    def stop(self, *given):
        rounds.append(self.round)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return step(self, *given)

    monkeypatch.setattr(Federation, "begin", stop)
    with pytest.raises(KeyboardInterrupt):
        carry_out(made, tmp_path / "stopped", QUIET, SEQUENTIAL)
    assert not find_cell(made, tmp_path / "stopped", "c10-25", "fedavg-own", 0).done
    carry_out(made, tmp_path / "stopped", QUIET, SEQUENTIAL)
    assert rounds == [0, 1, 1, 2]  # the first round was not run again
    first, second = (result.lines(made, tmp_path / place)[0] for place in ("whole", "stopped"))
    assert [first[rule] for rule in protocol.RULES] == [second[rule] for rule in protocol.RULES]


def test_a_cell_says_where_it_was_run(tmp_path, monkeypatch):
    """With which sources and on what; one that goes on elsewhere names both places."""
    from perfed.training import provenance

    assert re.fullmatch(r"\S+ with \d+ cores", provenance.hardware("cpu"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"a GPU at {device}")
    assert provenance.hardware("cuda:1") == "a GPU at cuda:1"
    assert provenance.together(["one; two", "two", "", "three; one"]) == "one; two; three"
    monkeypatch.setenv("PERFED_COMMIT", "abc1234")
    sets = ["run.rounds=1", "data.clients=4", "train.epochs=1"]
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), sets, True), [], ["local"], 1)
    monkeypatch.setattr(cells, "hardware", lambda device: "a machine")
    carry_out(made, tmp_path, QUIET, SEQUENTIAL)
    (line,) = result.lines(made, tmp_path)
    assert line["commit"] == "abc1234"
    assert line["machine"].startswith("a machine, engine sequential, torch ")
    (place,) = tmp_path.rglob("result.json")
    place.unlink()
    (place.parents[1] / "scores_personal_all.json").unlink()
    monkeypatch.setattr(cells, "hardware", lambda device: "another")
    monkeypatch.setenv("PERFED_COMMIT", "def5678")
    carry_out(made, tmp_path, QUIET, SEQUENTIAL)
    (line,) = result.lines(made, tmp_path)
    assert line["commit"] == "abc1234; def5678"
    assert line["machine"].startswith("a machine; another, engine")


def test_a_diverged_cell_is_a_result(tmp_path):
    from perfed.report.table_text import cells

    # Momentum that goes on for long at a huge rate: weights grow without end, and no ReLU dies on the way.
    small = ["run.rounds=2", "data.clients=4", "model.name=mlr", "train.lr=1e15", "train.weight_decay=1e15"]
    made = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), small, True), [], ["local", "fedavg"], 1)
    carry_out(made, tmp_path, QUIET, SEQUENTIAL)
    assert not missing_cells(made, tmp_path)  # it would diverge again
    lines = result.lines(made, tmp_path)
    assert [(line["seeds"], line["diverged"], line["value"]) for line in lines] == [(0, 1, None)] * 2
    assert [row[2] for row in cells(made, lines, "c10-25")] == ["diverged", "diverged"]
    smaller = [word.replace("train.lr=1e15", "train.lr=0.1") for word in small]  # of which nothing is known
    other = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), smaller, True), [], ["local"], 1)
    for look in (lambda: result.lines(other, tmp_path), lambda: carry_out(other, tmp_path, QUIET, Machine())):
        with pytest.raises(
            Problem, match=r"local.seed_0' was run with other settings \(train\).* and seed_0.json beside"
        ):
            look()
    first = tmp_path / made.cells / "c10-25"
    begun = json.loads((first / "fedavg/seed_0.json").read_text())
    begun.pop("diverged")  # as if it had been interrupted
    (first / "fedavg/seed_0.json").write_text(json.dumps(begun))
    assert not missing_cells(made, tmp_path)  # its own result says so, too
    (first / "fedavg/seed_0/fedavg/result.json").unlink()
    other = protocol.chosen(protocol.reduced(protocol.find("pgfed-1"), smaller, True), [], ["pgfed", "fedavg"], 1)
    assert [line["seeds"] for line in result.lines(other, tmp_path)] == [0, 0]
    with pytest.raises(Problem, match=r"fedavg.seed_0' was run with other settings"):  # before anything is run
        carry_out(other, tmp_path, QUIET, Machine())
    assert not (first / "pgfed").exists()


WATCHED = """
    title = "t"
    paper = "p"
    rule = "last"
    seeds = 2
    figures = ["alpha"]
    [all]
    data = { clients = 4 }
    model = { name = "mlr" }
    train = { epochs = 1, lr = 0.1 }
    run = { rounds = 4, checkpoint_every = 2, participation = 0.5 }
    [columns.only]
    title = "only"
    [rows.pfedmb]
    settings = { branches = 2 }
    watch = true
    """


def watched(place, engine, seeds=2):
    """A small table whose mixtures are kept, and what runs it."""
    place.mkdir()
    (place / "mine.toml").write_text(WATCHED)
    made = protocol.chosen(protocol.find(str(place / "mine.toml")), [], [], seeds)
    return made, lambda: carry_out(made, place, QUIET, Machine(engine, "cpu"))


def alphas(place, seed):
    return next(place.rglob(f"seed_{seed}")) / "alphas.jsonl"


def test_mixtures_are_kept_while_a_cell_is_trained(tmp_path):
    """Every round's, of every seed: those of a federation that nobody looks at."""
    import torch

    from perfed.engines.base import Job
    from perfed.engines.local import Sequential
    from perfed.federation.federation import Federation
    from perfed.report import table_figures
    from perfed.studies.papers.watch import mixtures
    from perfed.training.folder import RunFolder
    from perfed.training.prepare import prepare

    made, run = watched(tmp_path / "table", "sequential")
    run()
    for seed in range(2):
        folder = alphas(tmp_path, seed).parent
        experiment = prepare(RunFolder(folder).config())
        method = experiment.method(catalog.find("pfedmb"))
        federation = Federation(Sequential(Job(method, experiment.clients, seed, method.context.cohort)))
        lines = [json.loads(line) for line in alphas(tmp_path, seed).read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3, 4]
        for line in lines:
            federation.step()
            expected = torch.stack([state_of(federation, id).softmax(0).mean(1) for id in range(4)])
            np.testing.assert_allclose(line["alpha"], expected, atol=1e-4)
    figure = table_figures.alpha(made, tmp_path / "table", "only")
    said = figure.axes[0].get_ylabel()
    shares, used = zip(
        *(table_figures.clusters(mixtures(alphas(tmp_path, seed).parent)[1][-1]) for seed in (0, 1)), strict=True
    )
    assert said == f"pfedmb\n{np.mean(shares):.0%} of pairs on one\nbranch; {used[0]}, {used[1]} in use"
    assert "seed 0;" in figure.get_suptitle()


def test_the_figure_of_mixtures_is_about_all_seeds(tmp_path):
    """Seeds that are not done, or that nobody watched, do not count."""
    from perfed.report.table_figures import alpha

    def cell(seed, name, text, done=True):
        place = tmp_path / f"mine/only/pfedmb/seed_{seed}"
        (place / "pfedmb").mkdir(parents=True)
        (place / name).write_text(text)
        if done:
            (place / "pfedmb/result.json").write_text("{}")

    (tmp_path / "mine.toml").write_text(WATCHED.replace("seeds = 2", "seeds = 5"))
    made = protocol.find(str(tmp_path / "mine.toml"))
    assert alpha(made, tmp_path, "only") is None
    one, other = [0.9, 0.1], [0.2, 0.8]
    lines = [{"alpha": [one] * 4, "round": 3}, {"alpha": [one, one, one, other], "round": 4}]
    cell(0, "nothing", "")
    cell(1, "alphas.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    cell(2, "alphas.jsonl", json.dumps({"alpha": [one] * 4, "round": 3}) + "\n")
    cell(3, "alphas.jsonl", "", done=False)
    figure = alpha(made, tmp_path, "only")
    assert figure.get_suptitle() == "only\nweights of the branches, seed 1; one panel per client"
    assert figure.axes[0].get_ylabel() == "pfedmb\n75% of pairs on one\nbranch; 2, 1 in use"
    assert figure.axes[3].lines[0].get_xydata().tolist() == [[3, 0.9], [4, 0.2]]


def test_mixtures_of_an_interrupted_cell(tmp_path, monkeypatch):
    """Stopped right before a checkpoint, and in the middle of a line: each round is there exactly once."""
    from perfed.federation.federation import Federation
    from perfed.training.observers.checkpoint import Checkpoints

    def stop(*_):
        raise KeyboardInterrupt

    _, whole = watched(tmp_path / "whole", "sequential", seeds=1)
    _, run = watched(tmp_path / "stopped", "sequential", seeds=1)
    whole()
    write, step, rounds = Checkpoints.write, Federation.begin, []
    monkeypatch.setattr(Checkpoints, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        run()
    path = alphas(tmp_path / "stopped", 0)
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2]  # before the checkpoint
    monkeypatch.setattr(Checkpoints, "write", write)
    monkeypatch.setattr(Federation, "begin", lambda self, *rest: stop() if self.round == 3 else step(self))
    with pytest.raises(KeyboardInterrupt):
        run()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    path.write_bytes(b"".join(lines)[: -len(lines[2]) // 2])
    monkeypatch.setattr(Federation, "begin", lambda self, *rest: [rounds.append(self.round), step(self)][1])
    run()
    assert rounds == [2, 3]
    assert path.read_bytes() == alphas(tmp_path / "whole", 0).read_bytes()


def test_mixtures_of_seeds_in_one_batch(tmp_path, monkeypatch):
    """Each seed has its own file, with what it has alone."""
    from perfed.training import train as training

    sizes, train = [], training._train
    monkeypatch.setattr(training, "_train", lambda jobs, *rest: [sizes.append(len(jobs)), train(jobs, *rest)][1])
    for engine in ("vectorised", "sequential"):
        watched(tmp_path / engine, engine)[1]()
    assert sizes == [2, 1, 1]
    batch, alone = (
        [[json.loads(line) for line in alphas(tmp_path / engine, seed).read_text().splitlines()] for seed in (0, 1)]
        for engine in ("vectorised", "sequential")
    )
    for mine, other in zip(batch, alone, strict=True):
        assert [line["round"] for line in mine] == [1, 2, 3, 4]
        np.testing.assert_allclose([x["alpha"] for x in mine], [x["alpha"] for x in other], atol=2e-4)
    assert not np.allclose(batch[0][-1]["alpha"], batch[1][-1]["alpha"], atol=1e-3)


def test_a_run_without_a_log_cannot_be_scored(tmp_path):
    import perfed

    small = {"clients": 3, "epochs": 1, "hidden": 8, "rounds": 2, "eval_every": 2, "baseline": False}
    run = perfed.run("fedavg", out=tmp_path / "run", engine="sequential", **small)
    log = run.path / "fedavg" / "metrics.jsonl"
    with pytest.raises(Problem, match=r"metrics.jsonl' has no scores up to round 1: the first are of round 2$"):
        measures.curves(run, "fedavg", until=1)
    log.write_text("")
    with pytest.raises(Problem, match=r"run/fedavg/metrics.jsonl' is damaged"):
        measures.curves(run, "fedavg")
    log.unlink()
    with pytest.raises(Problem, match=r"run/fedavg/metrics.jsonl' is missing"):
        measures.summary(run, "fedavg")
    result = files.read_json(run.path / "fedavg" / "result.json")  # an older one, which vouches for nothing
    del result["seal"], result["sha256"]
    files.write_json(run.path / "fedavg" / "result.json", result)
    with pytest.raises(Problem, match=r"run/fedavg/metrics.jsonl' has no scores: the run's log is missing or empty$"):
        measures.summary(run, "fedavg")


def test_numbers_of_the_figures():
    from perfed.report.table_figures import clusters, correlations

    train = np.array([1.0, 2.0, 3.0])
    assert correlations(np.tile(train, (3, 1)), train) == (pytest.approx(1.0), None)  # rows are all alike
    assert correlations(-np.tile(train, (3, 1)).T, train) == (None, pytest.approx(-1.0))
    alpha = np.array([[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.1, 0.2, 0.7], [0.0, 0.8, 0.2]])  # two pairs
    assert clusters(alpha) == (0.5, 3)


def test_curves_go_as_far_as_all_seeds_do(tmp_path, monkeypatch):
    """A seed that run.patience stopped has fewer rounds."""
    from perfed.report import table_figures

    seeds = {0: {"rounds": [10, 20, 30], "mean": [0.1, 0.3, 0.5]}, 1: {"rounds": [10, 20], "mean": [0.3, None]}}
    monkeypatch.setattr(table_figures, "seed_scores", lambda *_: seeds)
    made = protocol.chosen(protocol.find("pfedmb-1"), [], ["local"], 2)
    x, mean, _ = table_figures._curves(made, tmp_path, "pairs", "mean", "rounds")["local"]
    assert x.tolist() == [10, 20]
    np.testing.assert_allclose(mean, [0.2, np.nan])


def test_seeds_that_fail_do_not_hide_the_others(tmp_path, monkeypatch):
    """Figure 5: what lies far below is written, not drawn, and so is a mean that it pulls down."""
    from perfed.report import table_figures

    score = lambda percent: {"rules": {"val": {"clients": [percent / 100, percent / 100]}}}
    accuracy = {"b2": [85, 86], "b3": [84, 50], "b20": [50, 52]}
    seeds = lambda _protocol, _out, _column, row: dict(enumerate(map(score, accuracy[row])))
    monkeypatch.setattr(table_figures, "seed_scores", seeds)
    made = protocol.chosen(protocol.find("pfedmb-fig5"), [], list(accuracy), 2)
    (axes,) = table_figures.branches(made, tmp_path, "classes-50").axes
    assert axes.get_ylim()[0] == pytest.approx(np.median([85, 86, 84, 50, 50, 52]) - 6)
    assert [text.get_text() for text in axes.texts] == ["below: 50.0", "below: 50.0, 52.0\nmean: 51.0"]
    accuracy["b3"], accuracy["b20"] = [84, 85], [83, 82]
    (axes,) = table_figures.branches(made, tmp_path, "classes-50").axes
    assert not axes.texts
    assert axes.get_ylim()[0] > 80


def test_pages_say_what_was_not_run(tmp_path, monkeypatch):
    from perfed.report import table_page

    monkeypatch.setattr(table_page, "kept_table", lambda made: tmp_path / f"{made.name}.csv")
    made = protocol.find("pfedmb-2")
    assert "`pfedmb-2`: not run" in table_page._results(made)
    some = protocol.chosen(made, ["classes-15"], [], None)
    (tmp_path / "pfedmb-2.csv").write_text(result.to_csv(result.lines(some, tmp_path)))
    said = table_page._results(made)
    assert "| pFedMB | 90.69 | not run |" in said
    assert "Not run: CIFAR10, 2 classes, 50 clients" in said
    assert "Nothing of this table has been run yet" in said
