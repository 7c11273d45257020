"""Experiments in which one method is to beat another: the setting that they have in common, and its scores.

    from beat import accuracy

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1])
    def test_beats_fedavg(seed):
        assert accuracy("fedprox", seed, mu=0.1) > accuracy("fedavg", seed) - 0.02

Ten clients of one class each (`classes_per_client=2`: of two) with 400 training and 400 test samples of Fashion-
MNIST, pixels from -1 to 1, a network 784-64-10, plain SGD with batches of 20, 5 epochs: 100 steps a round. Where all
clients have one model, the mean over them is its balanced accuracy. With `scenario="label-groups"` the clients are
that scenario's, of digits, with a network 64-32-10, batches of 10 and 2 epochs; `lr` has to be said. Whatever is
asked for twice is trained once for each session, so the same control may stand in every test.

With PERFED_NOTES=FILE every score is also a line of that file: `python bench/experiments.py` runs all of them, and
docs/comparison.md is made of what they found.
"""

import functools
import json
import os
import tempfile
from pathlib import Path

from real_data import real

import perfed

COMMON = dict(data="fashion_mnist", samples=8000, partition="classes", classes_per_client=1, clients=10)
COMMON |= dict(
    test=0.5, val=0.0, normalise="half", model="mlp", hidden=64, lr=0.05, batch_size=20, epochs=5, engine="sequential"
)
OF_SCENARIOS = ("samples", "partition", "classes_per_client", "clients", "test", "val", "normalise", "lr")
COMMON |= dict(device="cpu", baseline=False, save_models="none", scores="none", eval_every=1)
# What scenarios are measured with; what clients are like is theirs to say. A network 64-32-10, batches of 10, 2 epochs.
TOY = COMMON | dict(data="digits", hidden=32, batch_size=10, epochs=2, engine="vectorised")
TOY = {key: value for key, value in TOY.items() if key not in OF_SCENARIOS}
FILES = {"fashion_mnist": "fashion_mnist.npz", "mnist": "mnist.npz", "usps": "usps.npz", "cifar10": "cifar10_test.npz"}


def finished(method, seed, rounds=10, **settings):
    """What is left of a run: curves (model -> mean test accuracy of each round), lines of its log, clients, result."""
    settings = (TOY if "scenario" in settings else COMMON) | settings
    if settings["data"] in FILES and "data_dir" not in settings:
        settings["data_dir"] = real(FILES[settings["data"]])
    return _finished(method, seed, rounds, tuple(sorted(settings.items())))


@functools.cache
def _finished(method, seed, rounds, settings):
    with tempfile.TemporaryDirectory(prefix="perfed-beat-") as folder:
        run = perfed.run(method, seed=seed, rounds=rounds, out=f"{folder}/run", **dict(settings))
        name = run.main
        assert not run.diverged, run.diverged
        lines = list(run.folder.method(name).rounds())
        curves = {model: [line["accuracy"][model] for line in lines] for model in lines[-1]["accuracy"]}
        return {"curves": curves, "lines": lines, "clients": run.about["clients"], "result": run.result(name)}


def curve(method, seed, rounds=10, model="personal", **settings):
    """The mean test accuracy over clients after each round; `model` is one of those that the method evaluates."""
    return finished(method, seed, rounds, **settings)["curves"][model]


def accuracy(method, seed, rounds=(6, 10), last=0, model="personal", **settings):
    """The mean test accuracy over clients, in the mean of the rounds from the first to the last of `rounds`.

    The run ends with the last of them, or with round `last` where it is given: so several windows are of one run.
    """
    first, end = rounds
    window = curve(method, seed, max(end, last), model, **settings)[first - 1 : end]
    assert len(window) == end - first + 1, "a run that stops early has no such rounds"
    mean = sum(window) / len(window)
    what = f"{'' if model == 'personal' else f'{model} model, '}round{'' if end == first else f's {first} to'} {end}"
    note(method, seed, what, mean, **settings)
    return mean


def note(method, seed, what, value, **settings):
    """Print what was measured, and keep it where the environment names a file for it.

    Args:
        method: the method, or its file.
        seed: of the run.
        what: what the number is, as the head of a table's column: "rounds 6 to 10", "simulated hours".
        value: the number; a share is shown with three places.
        settings: what the run was asked for beyond COMMON.
    """
    name = Path(method).stem
    print(
        f"| {' '.join([name, *(f'--{key} {value}' for key, value in settings.items())])} | {seed} | {what} | {value} |"
    )
    if file := os.environ.get("PERFED_NOTES"):
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        settings = {key: value for key, value in settings.items() if key != "data_dir"}  # where this machine has them
        line = {"of": Path(test).stem.removeprefix("test_"), "method": name, "settings": settings, "seed": seed}
        with Path(file).open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(line | {"what": what, "value": round(value, 5)}, sort_keys=True) + "\n")
