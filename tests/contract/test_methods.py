"""Every method on every engine, with no code per method."""

import pytest
import torch

from perfed.contract import checks, toy
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.training.catalog import methods

METHODS = list(methods().values())
SEEDED = ("fedavg", "fedbabu", "fedper", "ifca", "pfedme", "pgfed", "scaffold")  # with and without seeds in a round
LONG = ("fedalign", "fedbn", "moon", "perfedavg", "pfedme")  # normalisation, several passes, or steps within steps
each_method = pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
each_short_method = pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=[pytest.mark.slow] * (e.name in LONG), id=e.name) for e in METHODS]
)
each_seeded_method = pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=[pytest.mark.slow] * (e.name not in SEEDED), id=e.name) for e in METHODS]
)


def cases():
    """Every method with the networks that suit it; what differs little from another case is slow."""
    for entry in METHODS:
        suitable = toy.networks(entry)
        for network in suitable:
            for engine in checks.ENGINES:
                # Whole cohorts with the network that has more to it, all else with the plain one.
                rest = (network == "norm") != (engine == "vectorised") and len(suitable) > 1
                rest |= engine == "vectorised in blocks" and entry.name not in SEEDED  # the engine's doing, not theirs
                marks = [pytest.mark.slow] if rest else []
                yield pytest.param(entry, network, engine, marks=marks, id=f"{engine}-{network}-{entry.name}")


@pytest.mark.parametrize(("entry", "network", "engine"), list(cases()))
def test_engine_equals_sequential(entry, network, engine):
    if engine == "workers" and torch.cuda.is_available():
        pytest.skip("with a GPU, PyTorch does not let a process that has used autograd fork workers")
    checks.check_engines(entry, network, engine)


@pytest.mark.slow
@each_method
def test_compiled_equals_plain(entry):
    checks.check_compiled(entry, twice=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_inductor_equals_plain():
    """Dropout under the compiler that miscompiles hashed counters; full batches only, so that one step is compiled."""
    make, clients = toy.maker(methods()["fedavg"], "norm"), toy.toy_clients((10, 5))
    expected = checks.play(Sequential(Job(make(), clients)), [(0, 1)])
    engine = Vectorised(Job(make(), clients), compile=True, sizes=(2,))
    checks.compare(checks.play(engine, [(0, 1)]), expected, "compiled by inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.timeout(900)  # some methods take minutes on busy cores
@each_method
def test_inductor_equals_plain_for_all(entry):
    checks.check_compiled(entry, backend="inductor", networks=("plain", "norm"), twice=True)


@each_seeded_method
def test_several_runs_in_one_batch_equal_each_alone(entry):
    checks.check_together(entry)


@each_method
def test_statistics_move(entry):
    checks.check_statistics(entry)


@each_method
def test_nothing_is_changed_in_place(entry):
    checks.check_pure(entry)


@each_method
def test_same_seed_same_result(entry):
    checks.check_repeatable(entry)


@each_method
def test_state_survives_saving(entry):
    checks.check_saved(entry)


@each_method
def test_states_keep_their_form(entry):
    checks.check_stable(entry)


@each_method
def test_a_global_model_is_the_same_for_all(entry):
    checks.check_global(entry)


@each_short_method
def test_every_hyperparameter_matters(entry):
    checks.check_settings(entry)


@each_seeded_method
def test_learns_where_clients_disagree(entry):
    checks.check_learns(entry)


@each_method
def test_method_file_is_short_and_documented(entry):
    text = entry.file.read_text()
    assert len(text.splitlines()) <= 110, "a method file over 110 lines: what shared tool is missing in core?"
    assert "super()" not in text
    assert entry.summary
    assert entry.name == "local" or "http" in entry.paper
    assert all(field.meaning for field in entry.fields.values())
