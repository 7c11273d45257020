"""Every method on every engine, with no code per method."""

import pytest
import torch

from perfed.contract import checks, settings, toy
from perfed.contract.runner import RULES
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.training.catalog import methods

METHODS = list(methods().values())
SEEDED = ("fedavg", "fedbabu", "fedper", "ifca", "pfedme", "pgfed", "scaffold")  # with and without seeds in a round
LONG = ("fedalign", "fedalt", "fedrep")  # a network of convolutions alone, or many epochs
PLAIN = {"momentum", "nesterov", "optimizer"}  # refused where steps have to be plain gradients
REFUSED = {
    "aruba": PLAIN, "pfedme": PLAIN, "scaffold": PLAIN, "pfedmb": {"optimizer"},
    "fedgkt": {"fine_tune"},  # a client predicts with two networks
}  # fmt: skip
REFUSED |= {"tifl": {"timeout"}}  # it needs a clock
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


@each_short_method
def test_every_task_is_learned_or_refused_by_its_name(entry):
    checks.check_tasks(entry)


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


@each_short_method
def test_rules_are_kept(entry):
    """Nothing is kept, changed in place, drawn from a global, looked up among test samples, forgotten or misplaced."""
    for check in RULES:
        check.run(entry)


@each_method
def test_state_survives_saving(entry):
    checks.check_saved(entry)


@each_short_method
def test_every_hyperparameter_matters(entry):
    """Each is shown to change the outcome, alone; or the method refuses to have it changed, in a sentence."""
    shown = dict(settings.evidences(entry))
    assert set(shown) == set(entry.fields)
    print(entry.name, *(f"{name}: {evidence and evidence.words}" for name, evidence in shown.items()), sep="\n    ")
    assert [name for name, evidence in shown.items() if evidence is None] == []
    refused = {name for name, evidence in shown.items() if evidence and not evidence.matters}
    assert refused == REFUSED.get(entry.name, set())


def test_what_matters_only_where_another_setting_has_another_value():
    """The mixture of PGFed is clamped where it falls below 0, and FedFomo's base is that of two rounds ago."""
    for name, setting in (("pgfed", "clamp"), ("pgfedmo", "clamp"), ("fedfomo", "base")):
        entry = methods()[name]
        evidence = settings._Trial(entry).evidence(setting, entry.fields[setting])
        assert evidence is not None
        assert evidence.matters


def test_a_setting_that_is_refused_changes_no_other_instance():
    """Adam is refused beside momentum: the instance that tries it goes without, and the next one has its momentum."""
    make = toy.maker(methods()["fedavg"])
    assert (make(optimizer="adam").momentum, make().momentum, make(epochs=3).momentum) == (0.0, 0.5, 0.5)
    assert toy.maker(methods()["scaffold"])().momentum == 0.0


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
