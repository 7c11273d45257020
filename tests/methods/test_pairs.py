"""Numbers of pairs of clients: the table of those that were set holds what the whole matrix would."""

import random

import pytest
import torch
from conftest import make_clients, plain_net

from perfed.contract import checks
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.federation.federation import Federation
from perfed.methods.pgfed import PGFed
from perfed.methods.pgfedmo import PGFedMo
from perfed.methods.shared import pairs
from perfed.training.folder import MethodFolder
from perfed.training.observers.checkpoint import Checkpoints, restore
from perfed.training.observers.log import MetricsLog

N = 5
COHORTS = ((0, 1, 3), (1, 2, 3), (0, 2), (1, 2, 3), (0, 1, 3))  # one smaller than the others; 4 never takes part


def tables(monkeypatch, clients, number):
    """The same numbers as a table and as a matrix."""
    monkeypatch.setattr(pairs, "MATRIX", 0)
    table = pairs.all_pairs(clients, number)
    assert isinstance(table, dict)
    return table, number.repeat(clients, clients)


def test_a_table_holds_what_a_matrix_would(monkeypatch):
    torch.manual_seed(0)
    draw, ids = random.Random(0), lambda count: torch.tensor(sorted(draw.sample(range(40), count)))
    table, matrix = tables(monkeypatch, 40, torch.tensor(0.1))
    for _ in range(30):
        rows, columns = ids(draw.randint(1, 9)), ids(draw.randint(1, 9))
        numbers, before = torch.randn(len(rows), len(columns)), table["numbers"].clone()
        new = pairs.write_pairs(table, rows, columns, numbers)
        assert torch.equal(table["numbers"], before)
        table, matrix = new, pairs.write_pairs(matrix, rows, columns, numbers)
        rows, columns = ids(draw.randint(1, 9)), ids(draw.randint(1, 9))
        assert torch.equal(pairs.read_pairs(table, rows, columns), matrix[rows][:, columns])
    assert torch.equal(pairs.read_pairs(table, torch.arange(40), torch.arange(40)), matrix)
    assert len(table["pairs"]) == 1 + int((matrix != 0.1).sum())


def test_of_very_many_clients_only_what_was_set_takes_room():
    table = pairs.all_pairs(2_000_000_000, torch.tensor(0.5, dtype=torch.float64))
    last = torch.tensor([0, 1_999_999_999])
    table = pairs.write_pairs(table, last, last, torch.arange(4.0, dtype=torch.float64).view(2, 2))
    asked = torch.tensor([0, 7, 1_999_999_999])
    expected = [[0, 0.5, 1], [0.5, 0.5, 0.5], [2, 0.5, 3]]
    assert pairs.read_pairs(table, asked, asked).tolist() == expected
    assert pairs.read_pairs(table, asked[:0], asked).shape == (0, 3)
    assert sum(tensor.numel() for tensor in table.values()) == 10


def federation(kind=PGFed, engine=Sequential, folder=None):
    method = kind(Model(plain_net, dtype=torch.float64), lr=0.05, epochs=1, mu=0.6, alpha_lr=0.02)
    return Federation(engine(Job(method, make_clients(), 5, cohort=3, folder=folder)))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("kind", [PGFed, PGFedMo])
def test_training_with_a_table_is_the_same_to_the_bit(kind, engine, monkeypatch):
    expected = checks.play(engine(Job(federation(kind).method, make_clients(), 5, cohort=3)), COHORTS)
    monkeypatch.setattr(pairs, "MATRIX", 0)
    fed = federation(kind, engine)
    found = checks.play(fed.engine, COHORTS, fed)
    table, everybody = found.server.pop("alpha"), torch.arange(N)
    assert isinstance(table, dict)
    assert torch.equal(pairs.read_pairs(table, everybody, everybody), expected.server.pop("alpha"))
    checks.compare(found, expected, "with a table", tolerance=0)
    assert fed.method.change({"alpha": table, **found.server}) is None
    assert checks.difference(fed.method.newcomer({"alpha": table, **found.server}).shared["w"], found.server["w"]) == 0


def test_a_table_is_in_checkpoints_and_a_matrix_of_an_older_one_goes_on(tmp_path, monkeypatch):
    feds = {}
    for name, limit in (("matrix", 1000), ("table", 0)):
        monkeypatch.setattr(pairs, "MATRIX", limit)
        fed, folder = federation(folder=tmp_path), MethodFolder(tmp_path / name)
        folder.path.mkdir()
        for cohort in COHORTS[:3]:
            fed.step(cohort)
        Checkpoints(folder, 1, MetricsLog(folder)).write(fed)
        feds[name] = fed
    for name in feds:  # with a limit of 0: a folder with a matrix was begun before there were tables
        resumed = federation(folder=tmp_path)
        assert restore(MethodFolder(tmp_path / name), resumed, print) is not None
        assert isinstance(resumed.server["alpha"], torch.Tensor) == (name == "matrix")
        for fed in (feds[name], resumed):
            for cohort in COHORTS[3:]:
                fed.step(cohort)
        assert checks.difference(resumed.server, feds[name].server) == 0
        assert checks.difference(resumed.evaluate().tables, feds["matrix"].evaluate().tables) == 0
