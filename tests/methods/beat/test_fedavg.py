"""The setting that these experiments have in common: what FedAvg has there, and that nothing is trained twice."""

import beat
import pytest
from beat import accuracy, curve, finished

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("classes", "early", "late"), [(1, 0.659, 0.709), (2, 0.747, 0.767)])
def test_fedavg_is_where_a_plain_loop_has_it(classes, early, late):
    """Rounds 6 to 15 and 16 to 20 of a loop in plain PyTorch (means of seeds), tested on all classes alike."""
    for rounds, expected in (((6, 15), early), ((16, 20), late)):
        found = [accuracy("fedavg", seed, rounds, last=20, classes_per_client=classes) for seed in (0, 1)]
        assert sum(found) / 2 == pytest.approx(expected, abs=0.03)


def test_a_client_has_400_training_and_400_test_samples():
    for classes in (1, 2):
        about = finished("fedavg", 0, 1, epochs=1, classes_per_client=classes)["clients"]
        assert {(client["train"], client["val"], client["test"]) for client in about} == {(400, 0, 400)}
        assert {len(client["labels"]) for client in about} == {classes}


def test_nothing_is_trained_twice(monkeypatch):
    once = curve("local", 0, 2, epochs=1)
    monkeypatch.setattr(beat.perfed, "run", None)
    assert curve("local", 0, 2, epochs=1) == once
    assert accuracy("local", 0, (1, 2), epochs=1) == sum(once) / 2
    with pytest.raises(TypeError):
        accuracy("local", 1, (1, 2), epochs=1)
