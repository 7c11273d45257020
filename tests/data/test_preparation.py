"""Tables as people have them: numbers in natural units, texts, gaps; and what their columns become."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from perfed.core.errors import Problem
from perfed.data import load, normalise
from perfed.data.config import DataConfig
from perfed.data.normalise import resolve
from perfed.data.pool import Pool
from perfed.data.preparation import Preparation, join, sums, words
from perfed.data.records import Records, from_frame, numbers_alone, read_cells


def write(path, rows):
    """A CSV file of rows, which are dicts."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)


def people(seed, n=40):
    draw = np.random.default_rng(seed)
    for row in range(n):
        age, crp, sex = draw.normal(60 + 5 * seed, 12), draw.lognormal(2), draw.choice(["F", "M"])
        yield {"age": f"{age:.1f}", "crp": f"{crp:.2f}", "sex": sex, "label": str(row % 2)}


def own(folder, **settings):
    return load(DataConfig(name="folder", dir=str(folder), **settings), 0)


def cells(*rows, columns=("v",)):
    return read_cells(columns, [[cell] if isinstance(cell, str) else cell for cell in rows], lambda row: f"row {row}")


# ---------------------------------------------------------------------- cells


def test_a_column_holds_numbers_or_texts():
    records = cells(["1", "b"], ["", "a"], ["NA", "n/a"], ["-2.5e1", "b"], columns=("u", "v"))
    assert np.array_equal(records.values[:, 0], [1, np.nan, np.nan, -25], equal_nan=True)
    assert records.texts == (None, ("a", "b"))
    assert np.array_equal(records.values[:, 1], [1, 0, np.nan, 1], equal_nan=True)


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (
            ["120", "12 mmHg"],
            r"row 1: '12 mmHg' in column 'v' is not a number, though '120' \(row 0\) is: write numbers",
        ),
        (["120 mmHg", "130 mmHg"], r"row 0: '120 mmHg' in column 'v' is a number with 'mmHg' behind it: write 120"),
        (["1,5", "2,5"], r"row 0: '1,5' in column 'v' is a number with a decimal comma: write 1.5"),
        (["1", "inf"], r"row 1: a feature is not a finite number"),
        (["1", "1e39"], r"row 1: a feature is not a finite number"),
    ],
)
def test_cells_that_are_refused(column, sentence):
    with pytest.raises(Problem, match=sentence):
        cells(*column)


@pytest.mark.parametrize("column", [["50-60", "60-70"], ["3A", "3B"], ["1st", "2nd"], ["F", "M"]])
def test_texts_with_digits_are_texts(column):
    assert cells(*column).texts == (tuple(column),)


# ---------------------------------------------------------------------- sums


def test_sums_give_what_all_rows_together_would():
    draw = np.random.default_rng(0)
    values = draw.normal((60.0, 1e6), (12.0, 3.0), (300, 2))
    values[draw.random(values.shape) < 0.1] = np.nan
    pieces = np.split(values, [10, 150])
    each = {str(place): sums(numbers_alone(piece)) for place, piece in enumerate(pieces)}
    plain = join(each, ("age", "id"), "federated")
    assert plain is not None
    for place, column in enumerate(plain["columns"]):
        assert column["mean"] == pytest.approx(np.nanmean(values[:, place]), rel=1e-12)
        assert column["std"] == pytest.approx(np.nanstd(values[:, place]), rel=1e-4)
        assert column["flag"]
    samples = Preparation.of(plain).apply(torch.from_numpy(values))
    assert Preparation.of(plain).features == ["age", "id", "age is missing", "id is missing"]
    assert samples[:, :2].mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)  # a gap is the mean
    assert np.array_equal(samples[:, 2:].numpy(), np.isnan(values))


def test_what_is_sent_is_counted():
    records = cells(["1", "F"], ["2", "M"], ["", "F"], columns=("age", "sex"))
    plain = join({"a": sums(records), "b": sums(records)}, records.columns, "federated")
    assert plain is not None
    # Up: rows; count, sum and sum of squares of age; count of sex; F, M. Down: mean, deviation, flag, F, M.
    assert plain["traffic"] == {"up_mean": 2 * 5 * 8, "up_own": 2 * 2, "down_shared": 2 * (16 + 1 + 2)}
    local = join({"a": sums(records), "b": sums(records)}, records.columns, "local")
    assert local is not None
    assert local["traffic"] == {"up_mean": 2 * 8, "up_own": 2 * (2 + 1), "down_shared": 2 * (1 + 2)}
    whole = numbers_alone(np.ones((3, 2)))
    assert join({"a": sums(whole)}, None, "none") is None  # nothing to agree on


def test_a_constant_column_becomes_nothing_whatever_it_holds_later():
    records = numbers_alone(np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]]))
    plain = join({"a": sums(records)}, ("k", "v"), "federated")
    assert plain is not None
    assert plain["columns"][0]["std"] == 0
    samples = Preparation.of(plain).apply(torch.tensor([[0.1, 2.0], [1e6, 2.0]], dtype=torch.float64))
    assert samples.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert "of no use, because training rows hold at most one value of it: k" in words(plain)[0]


def test_names_of_rows_are_no_texts():
    names = cells(*[f"patient {letter}{other}" for letter in "abcdef" for other in "uvwxyz"], columns=("who",))
    with pytest.raises(Problem, match=r"column 'who' holds 36 different texts in 36 training rows, as names or free"):
        join({"a": sums(names)}, names.columns, "federated")


# ---------------------------------------------------------------------- a folder of files


@pytest.fixture
def hospitals(tmp_path):
    """Three sites: pune has no crp at all, lima a few gaps, and graz alone knows sex X."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "graz.csv", [{**row, "sex": "X"} if at < 6 else row for at, row in enumerate(people(0))])
    write(folder / "lima.csv", [{**row, "crp": ""} if at % 5 == 0 else row for at, row in enumerate(people(1))])
    write(folder / "pune.csv", [{key: row[key] for key in ("label", "sex", "age")} for row in people(2)])
    return folder


def test_columns_are_standardised_over_all_training_rows(hospitals):
    clients = own(hospitals)
    assert clients.columns == ("age", "crp", "sex")
    assert clients.shape == (6,)  # age, crp; sex = F, M, X; crp is missing
    assert clients.train.x[:, :1].mean() == pytest.approx(0, abs=1e-6)
    assert clients.train.x[:, :1].std(correction=0) == pytest.approx(1, rel=1e-5)
    assert abs(float(clients.test.x[:, :1].mean())) > 1e-3  # statistics come from training rows alone
    pune = clients.train.x[-clients.train.size[2] :]
    assert (pune[:, 1] == 0).all()
    assert (pune[:, 5] == 1).all()
    assert (clients.train.x[:, 2:5].sum(1) == 1).all()
    assert clients.preparation is not None
    assert clients.preparation["clients"] == {"pune": {"absent": ["crp"]}}
    sentences = "\n".join(clients.notices)
    assert "2 numeric columns standardised over all clients; text becomes one-hot (sex)" in sentences
    assert "no values at all: 'pune' has no crp" in sentences
    assert "before round 1 each client sent of its training samples: counts, sums and sums of squares" in sentences
    assert json.loads(json.dumps(clients.preparation)) == clients.preparation


def test_means_of_the_clients_own(hospitals):
    clients = own(hospitals, normalise="local")
    for client, size in enumerate(clients.train.size):
        begin = clients.train.start[client]
        age = clients.train.x[begin : begin + size, 0]
        assert float(age.mean()) == pytest.approx(0, abs=1e-6)
        assert float(age.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert clients.preparation is not None
    assert clients.preparation["traffic"]["up_mean"] == 3 * 8  # how many rows have a sex
    assert "standardised in each client" in clients.notices[0]


def test_numbers_as_they_are(hospitals):
    clients = own(hospitals, normalise="none")
    assert 50 < float(clients.train.x[:, 0].mean()) < 80
    assert clients.shape == (6,)  # texts and gaps need their features whatever becomes of numbers


@pytest.mark.parametrize("normalise", ["channel", "half"])
def test_a_table_is_no_image(hospitals, normalise):
    with pytest.raises(
        Problem, match=rf"'{normalise}' does not suit 'folder', which is a table: federated, local or no"
    ):
        own(hospitals, normalise=normalise)


def test_a_text_that_training_never_had():
    records = cells(["F"], ["M"], columns=("sex",))
    plain = join({"a": sums(records)}, ("sex",), "federated")
    assert plain is not None
    values, notes = Preparation.of(plain).align(cells("X", "M", columns=("sex",)), "rows.csv")
    assert Preparation.of(plain).apply(torch.from_numpy(values)).tolist() == [[0, 0], [0, 1]]
    assert notes == ["rows.csv: training had no 'X' in 'sex': such values count as none of its texts"]


def test_arrays_with_names_and_gaps(tmp_path):
    draw = np.random.default_rng(0)
    for name, columns in (("a", ["u", "v"]), ("b", ["v", "u"])):
        x = draw.normal(10, 2, (30, 2))
        x[:, columns.index("v")] += 100
        x[0, 0] = np.nan
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(30) % 2, columns=np.array(columns))
    clients = own(tmp_path, normalise="none")
    assert clients.columns == ("u", "v")
    assert (clients.train.x[:, 1] - clients.train.x[:, 0]).median() > 80
    np.savez(tmp_path / "c.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    with pytest.raises(Problem, match=r"c.npz does not name its columns, and a.npz does \(array 'columns'\)"):
        own(tmp_path)
    np.savez(tmp_path / "c.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2, columns=np.array(["u", "u"]))
    with pytest.raises(Problem, match=r"c.npz: 'columns' must hold a name of its own for each column"):
        own(tmp_path)


def test_arrays_without_names(tmp_path):
    draw = np.random.default_rng(0)
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=draw.normal(100, 5, (30, 3)), y=np.arange(30) % 2)
    clients = own(tmp_path)
    assert clients.columns is None
    assert float(clients.train.x.mean()) == pytest.approx(0, abs=1e-6)


def test_a_client_without_training_rows_has_no_means_of_its_own(tmp_path):
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    np.savez(tmp_path / "b.npz", x_train=x[:0], y_train=y[:0], x_test=x, y_test=y)
    assert own(tmp_path).train.size == (6, 0)
    with pytest.raises(Problem, match=r"'local' needs training rows of every client, and there are none of: b"):
        own(tmp_path, normalise="local")


def test_who_is_normalised_where_nobody_says():
    """A table of one's own files is; data sets that come with perfed stay as their papers have them."""
    assert resolve(DataConfig(name="folder"), (5,), "classification") == "federated"
    assert resolve(DataConfig(name="folder"), (1, 8, 8), "classification") == "channel"
    assert resolve(DataConfig(name="synthetic"), (60,), "classification") == "none"
    assert resolve(DataConfig(name="har"), (9, 128), "classification") == "channel"
    assert resolve(DataConfig(name="folder", normalise="local"), (5,), "classification") == "local"
    assert resolve(DataConfig(name="folder"), (5,), "next_token") == "none"
    plain = load(DataConfig(name="synthetic", clients=3, synthetic_samples=40), 0)
    assert plain.preparation is None
    scaled = load(DataConfig(name="synthetic", clients=3, synthetic_samples=40, normalise="federated"), 0)
    assert scaled.train.x.std(0, correction=0).tolist() == pytest.approx([1.0] * 60, rel=1e-4)


def test_a_shipped_table_is_neither_summed_up_nor_copied(monkeypatch):
    """With many clients and features, either would cost more than all the rest of the loading."""
    pool = Pool(np.ones((6, 2), np.float32), np.zeros(6, np.int64), 1)
    monkeypatch.setattr(normalise, "sums", None)
    rows = {"a": np.arange(3), "b": np.arange(3, 6)}
    made, preparation = normalise.normalised(pool, rows, rows, DataConfig(name="synthetic"))
    assert preparation is None
    assert np.shares_memory(made.x, pool.x)


def test_channels_of_images_over_all_clients(tmp_path):
    draw = np.random.default_rng(0)
    for name in "ab":
        x = draw.integers(0, 256, (20, 3, 4, 4)).astype(np.uint8)
        x[:, 2] = 7
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(20) % 2)
    assert own(tmp_path).mean is None
    clients = own(tmp_path, normalise="federated")
    assert clients.mean is not None
    assert clients.std is not None
    expected = clients.train.x.double().div(255).mean((0, 2, 3))
    assert clients.mean.flatten().tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert float(clients.std[2]) == 1  # a channel that is one colour
    assert clients.preparation == {
        "normalise": "federated",
        "traffic": {"up_mean": 2 * 9 * 8, "up_own": 0, "down_shared": 2 * 6 * 8},
    }
    assert "means and deviations over all clients" in clients.notices[0]
    with pytest.raises(
        Problem, match=r"'local' does not suit 'folder', which has images of bytes: channel, half, none"
    ):
        own(tmp_path, normalise="local")


# ---------------------------------------------------------------------- rows to predict on


class Frame:
    """What a DataFrame of pandas looks like from here."""

    def __init__(self, columns):
        self.columns, self._values = list(columns), columns

    def __getitem__(self, name):
        return np.array(self._values[name], dtype=object)


KNOWN = {
    "normalise": "federated",
    "named": True,
    "columns": [
        {"name": "age", "mean": 60.0, "std": 10.0, "flag": False},
        {"name": "sex", "texts": ["F", "M"], "flag": False},
        {"name": "crp", "mean": 2.0, "std": 1.0, "flag": True},
    ],
    "clients": {"pune": {"absent": ["crp"]}},
}


def test_columns_go_by_name():
    frame = Frame(
        {"crp": [3.0, None], "ward": ["w", "w"], "sex": ["M", "F"], "label": [0, 1], "age": [70, float("nan")]}
    )
    values, notes = Preparation.of(KNOWN).align(from_frame(frame), "the input", ("label", "client"))
    assert Preparation.of(KNOWN).apply(torch.from_numpy(values)).tolist() == [[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    assert notes == [
        "the input: not used, because the model does not know it: 'ward'",
        "the input: not used, because it is no feature: 'label'",
    ]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (
            {"sex": ["F"], "crp": [1.0], "Age": [60]},
            r"the input lacks what the model needs: 'age'; did you mean 'Age'?",
        ),
        ({"age": [60], "sex": ["F"]}, r"the input lacks what the model needs: 'crp'$"),
        ({"60": [1], "F": [2]}, r"has none of the columns that the model needs, age, sex, crp: has it a header line\?"),
        (
            {"age": ["old"], "sex": ["F"], "crp": [1.0]},
            r"column 'age' holds text \('old'\), in training it held numbers",
        ),
        ({"age": [60], "sex": [1], "crp": [1.0]}, r"column 'sex' holds numbers, in training it held text \(F, M\)"),
    ],
)
def test_rows_that_the_model_cannot_take(columns, sentence):
    with pytest.raises(Problem, match=sentence):
        Preparation.of(KNOWN).align(from_frame(Frame(columns)), "the input")


def test_a_client_without_a_column_needs_none():
    frame = Frame({"age": [60], "sex": ["F"]})
    values, _ = Preparation.of(KNOWN, "pune").align(from_frame(frame), "the input")
    assert Preparation.of(KNOWN, "pune").apply(torch.from_numpy(values)).tolist() == [[0, 0, 1, 0, 1]]


def test_a_preparation_is_plain_values():
    for client in ("pune", "graz"):
        preparation = Preparation.of(KNOWN, client)
        assert Preparation.of(json.loads(json.dumps(preparation.plain()))) == preparation


def test_rows_without_names_go_by_place():
    known = {**KNOWN, "columns": [KNOWN["columns"][0], KNOWN["columns"][2]]}
    values, _ = Preparation.of(known).align(numbers_alone(np.array([[70.0, 3.0]])), "the input")
    assert Preparation.of(known).apply(torch.from_numpy(values)).tolist() == [[1, 1, 0]]
    with pytest.raises(Problem, match=r"the input must have the shape \[samples, 2\], not \[1, 3\]: age, crp"):
        Preparation.of(known).align(numbers_alone(np.zeros((1, 3))), "the input")
    with pytest.raises(Problem, match=r"the input needs names of columns, because 'sex' holds text"):
        Preparation.of(KNOWN).align(Records(np.zeros((1, 3)), (None,) * 3), "the input")
