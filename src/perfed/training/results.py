"""A finished run, opened: scores, comparisons with Local, and each client's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perfed.core.errors import Problem, nearest
from perfed.core.method import Method
from perfed.core.task import Task
from perfed.data.preparation import Preparation
from perfed.data.records import Records, from_frame, is_frame, numbers_alone
from perfed.engines.scores import PERSONAL, plain
from perfed.models import make_networks
from perfed.models.predictor import Predictor, dtype_of
from perfed.models.raw_rows import OnRawRows
from perfed.models.shares import Shares
from perfed.training.config import Config
from perfed.training.folder import MANY, RunFolder, preparation_of, task_of_run
from perfed.training.prepare import BASELINE, MAJORITY, headline, known_labels, make_method
from perfed.training.settings import in_words, outdated
from perfed.training.statistics import gain_with_test, means, spread


class ClientModel:
    """A client of a method: its scores and its model."""

    def __init__(self, run: Run, method: str, id: int):
        self.run, self.method, self.id = run, method, id
        self.about: dict[str, Any] = run.about["clients"][id]
        self.name: str = self.about["name"]
        self.path: Path = run.folder.method(method).model(self.about["folder"])

    @property
    def scores(self) -> dict[str, Any]:
        """Scores of the last round, or of the round whose models are saved: model -> split -> metric."""
        return self.run.result(self.method)["clients"][self.id]

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the personalised model; None where the task has none."""
        return self.scores["personal"]["test"].get("accuracy")

    @property
    def score(self) -> float | None:
        """Test score of the personalised model, in the metric `run.metric`."""
        return self.scores["personal"]["test"].get(self.run.metric)

    @property
    def preparation(self) -> Preparation | None:
        """What becomes of a row before the network sees it; None where samples are no rows of a table."""
        return preparation_of(self.run.about, self.name)

    @property
    def named(self) -> bool:
        """Whether samples are rows of a table whose columns are found by name."""
        return self.preparation is not None and self.preparation.named

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of a sample as `predict` takes it."""
        return tuple(self.run.about["shape"]) if self.preparation is None else (len(self.preparation.columns),)

    def model(self) -> nn.Module:
        """Return a module in eval mode that gives outputs for samples.

        It is the personalised network; where the method predicts in its own way, a `Predictor`. One of a table takes
        rows as they are (`OnRawRows`).
        """
        network, preparation = self._network(), self.preparation
        return network if preparation is None or not preparation.changes else OnRawRows(network, preparation).eval()

    def _network(self) -> nn.Module:
        self.run.refuse_changed_network(self.method)
        network = self.run.network(self.id)
        try:
            state, tree = self.run.folder.method(self.method).load_model(self.path)
        except FileNotFoundError:
            raise Problem(
                f"client '{self.name}' has no model of {self.method}: the run kept none (--save-models), or it is lost"
            ) from None
        if tree is not None:
            return Predictor(self.run.made(self.method, self.id), tree).eval()
        known = network.state_dict()
        real = [key for key in state if key in known and known[key].is_floating_point()]
        if not real:
            raise Problem(f"'{self.path}' holds none of the network's parameters")
        for key in real:  # or they would be converted without a word
            if not state[key].is_floating_point():
                kind = str(state[key].dtype).removeprefix("torch.")
                raise Problem(f"'{self.path}' holds {kind} numbers as '{key}', and a network's parameters are none")
        network = network.to(state[real[0]].dtype)
        try:
            network.load_state_dict(network.state_dict() | state)
        except RuntimeError:
            raise Problem(f"'{self.path}' does not fit the run's network") from None
        method = self.run.made(self.method, self.id)
        if method.has_own_predict():
            return Predictor(method, method.model.flat(network.state_dict())).eval()
        return network.eval()

    def predict(self, x: Any, notice: Callable[[str], object] = warnings.warn) -> np.ndarray:
        """Return what the model predicts for every sample.

        Args:
            x: samples [n, ...] as the data set gives them: images from 0 to 255 are scaled as in training. Rows of a
                table may be a DataFrame, whose columns are found by name, or an array, NaN where a value is missing.
            notice: is told which columns are not used, and which texts are unknown.

        Returns:
            The classes [n], numbered as in training; of labels their probabilities, of numbers these in units of the
            label, of tokens the next one at each position.
        """
        return self.run.task.predicted(self.logits(x, notice)).numpy()

    def logits(self, x: Any, notice: Callable[[str], object] = warnings.warn) -> Tensor:
        """Return the network's output for samples.

        Args:
            x: samples [n, ...], as for `predict`.
            notice: as for `predict`.

        Returns:
            Logits [n, classes], or what the run's task has for them.
        """
        network = self._network()
        dtype, preparation = dtype_of(network), self.preparation
        if preparation is not None:
            x = preparation.apply(torch.from_numpy(self._rows(x, preparation, notice))).to(dtype)
            return _finite_logits(network, x)
        shape = self.sample
        x = torch.as_tensor(np.asarray(x))
        if len(shape) == 3 and x.shape[1:] == (*shape[1:], shape[0]) != shape:  # images with their channels last
            x = x.movedim(-1, 1)
        if x.shape[1:] != shape or x.dim() != len(shape) + 1:
            raise Problem(f"the input must have the shape [samples, {', '.join(map(str, shape))}], not {list(x.shape)}")
        if self.run.about.get("tokens"):
            return _finite_logits(network, _tokens(x, self.run.task.outputs))
        image = self.run.about["image"]  # trained on bytes: then x holds 0 to 255, whatever its type
        x = x.to(dtype) / (255 if image else 1)
        if image and self.run.about["mean"] is not None:
            mean, std = (torch.tensor(self.run.about[k], dtype=dtype).view(-1, 1, 1) for k in ("mean", "std"))
            x = (x - mean) / std
        return _finite_logits(network, x)

    def _rows(self, x: Any, preparation: Preparation, notice: Callable[[str], object]) -> np.ndarray:
        """Return rows of a table as `Preparation.apply` takes them."""
        data = self.run.config.data
        records = _records(x)
        apart = (*data.label_columns(records.columns or ()), data.client_column)
        values, notes = preparation.align(records, "the input", apart)
        for note in notes:
            notice(note)
        return values


def _records(x: Any) -> Records:
    """Return records of whatever holds rows of a table."""
    if isinstance(x, Records):
        return x
    if is_frame(x):
        return from_frame(x)
    x = np.asarray(x)
    if x.ndim != 2 or x.dtype.kind not in "biuf":
        raise Problem(f"the input must be rows of numbers [samples, columns], or a DataFrame, not {x.dtype} {x.shape}")
    return numbers_alone(x.astype(np.float64))


def _tokens(x: Tensor, count: int) -> Tensor:
    """Return samples as tokens; refuse numbers that are none."""
    wrong = (x != x.long()) | (x < 0) | (x >= count)
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise Problem(
            f"the input holds {x[row, place].item()} (sample {row}, place {place}), which is no token: they are whole "
            f"numbers from 0 to {count - 1}"
        )
    return x.long()


def _finite_logits(network: nn.Module, x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise Problem("the input holds numbers that are not finite")
    with torch.no_grad():
        return network(x)


class Run:
    """A run folder, opened."""

    def __init__(self, path: str | Path):
        self.folder = RunFolder(path)
        self.path = self.folder.path
        self.config: Config = self.folder.config()
        self.about: dict[str, Any] = self.folder.clients()
        self.entries = {entry.name: entry for entry in self.config.entries()}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {', '.join(self.entries)}; {len(self.about['clients'])} clients)"

    @property
    def main(self) -> str:
        """The method meant when none is named: the last of the run."""
        return list(self.entries)[-1]

    @cached_property
    def _network(self) -> Callable[[], nn.Module] | Shares:
        names = [client["name"] for client in self.about["clients"]]
        return make_networks(self.config.model, tuple(self.about["shape"]), self.task.outputs, names)

    @property
    def networks(self) -> Shares | None:
        """The networks of the clients, and who has which; None: all have the same one."""
        return self._network if isinstance(self._network, Shares) else None

    @cached_property
    def task(self) -> Task:
        """What the clients learn."""
        return task_of_run(self.about)

    @property
    def metric(self) -> str:
        """The score that logs, lists and pictures show: the first of the task's."""
        return self.task.scores[self.task.headline].metric

    @property
    def judged(self) -> str:
        """The metric of the headline."""
        return self.task.scores[self.headline].metric

    @property
    def sign(self) -> int:
        """Return -1 where less of the headline is better, else 1."""
        return self.task.sign(self.judged)

    def made(self, method: str, id: int = 0) -> Method:
        """Return a method with the run's settings, as it predicts with a client's models.

        Args:
            method: the method's name.
            id: the client, whose network it has.
        """
        made = make_method(self.config, self.entries[method], self._network, len(self.about["clients"]), task=self.task)
        return made if self.networks is None else made.with_network(self.networks.of[id])

    @property
    def labels(self) -> list[str]:
        """What the classes are called, in the order of a model's outputs; their numbers, where they have no names."""
        return known_labels(self.about)

    @cached_property
    def headline(self) -> str:
        """What methods are judged by, a key of `task.scores`, such as accuracy, balanced, f1 or auc.

        Where the run does not name it, balanced accuracy if more than 80 % of all test samples are of one class.
        """
        name, usual = headline(self.config.run, self.about), self.task.headline
        return name if self.config.run.headline != "auto" or name == usual or self._has_all_scores else usual

    @property
    def columns(self) -> list[str]:
        """Other scores that stand beside the headline: none where accuracy says enough."""
        classes = self.task.kind == "classification"
        usual = classes and self.headline == "accuracy" and not self._accuracy_says_little
        return [] if usual or not self._has_all_scores else [key for key in self.task.scores if key != self.headline]

    @property
    def _majority(self) -> dict[str, Any]:
        """The most frequent class among the test samples; runs of perfed 0.1 did not look."""
        return self.about.get("majority", {"label": "", "pooled": 0.0, "clients": 0})

    @property
    def _accuracy_says_little(self) -> bool:
        """Whether one class has more than 80 % of all test samples, or over half of them and more at some client."""
        majority = self._majority
        return majority["pooled"] > MAJORITY or (majority["pooled"] > 0.5 and majority["clients"] > 0)

    @cached_property
    def _has_all_scores(self) -> bool:
        clients = [self.result(name)["clients"][0] for name in self.entries]
        metrics = [score.metric for score in self.task.scores.values()]
        return all(metric in client[PERSONAL].get("test", {}) for client in clients for metric in metrics)

    @property
    def why(self) -> str:
        """Which scores stand in the run's table, and why, in a sentence; empty where they are accuracies."""
        majority, parts = self._majority, []
        if self._accuracy_says_little:
            pooled = f"{majority['pooled']:.1%} of all test samples"
            many = f"more than {MAJORITY:.0%} of those of {majority['clients']} of {len(self.about['clients'])} clients"
            alike = f"'{majority['label']}' is the label of {pooled} and of {many}"
            if self.task.kind == "multilabel":
                alike = f"{majority['pooled']:.1%} of all labels of test samples are {majority['label']}"
            parts.append(f"{alike}: accuracy alone says little")
        if self.headline != "accuracy":
            less = ", of which less is better: a gain is what it falls by" if self.sign < 0 else ""
            title = self.task.scores[self.headline].title
            parts.append(f"mean, weighted, worst tenth and gain are of {title}{less}")
        return "; ".join(parts)

    def network(self, id: int = 0) -> nn.Module:
        """Return a fresh network of this run's kind.

        Args:
            id: the client whose network it is, where they differ.
        """
        return self._network.make(id)() if isinstance(self._network, Shares) else self._network()

    def network_name(self, id: int) -> str:
        """Return the name of a client's network.

        Args:
            id: the client.
        """
        return self.networks.name(id) if self.networks else self.config.model.name

    def result(self, method: str) -> dict[str, Any]:
        """Return what a method's training ended with.

        Args:
            method: the method's name.

        Returns:
            The contents of its result file: rounds, bytes, every client's scores.
        """
        if method not in self.entries:
            raise Problem(f"this run has no method '{method}'{nearest(method, self.entries)}")
        folder = self.folder.method(method)
        if not folder.finished:
            raise Problem(f"{method} is not finished: continue with `perfed resume {self.path}`")
        result = folder.result()
        if len(result["clients"]) != len(self.about["clients"]):
            raise Problem(f"'{folder.result_file}' is damaged: it has {len(result['clients'])} clients")
        return result

    def clients(self, method: str | None = None) -> list[ClientModel]:
        """Return all clients of a method.

        Args:
            method: the method's name; None: the last one of the run.

        Returns:
            The clients, in the order of the data.
        """
        method = method or self.main
        self.result(method)
        return [ClientModel(self, method, id) for id in range(len(self.about["clients"]))]

    def client(self, name: str, method: str | None = None) -> ClientModel:
        """Return a client.

        Args:
            name: the name that the client has in the data, or that of its folder.
            method: the method's name; None: the last one of the run.

        Returns:
            The client, with its scores and its model.
        """
        for client in self.clients(method):
            if name in (client.name, client.about["folder"]):
                return client
        names = [client["name"] for client in self.about["clients"]]
        close = nearest(name, names) if len(names) <= 50 or "mean" in nearest(name, names) else ""
        raise Problem(f"this run has no client '{name}'{close}")

    def accuracies(self, method: str, model: str = "personal", split: str = "test") -> np.ndarray:
        """Return every client's accuracy.

        Args:
            method: the method's name.
            model: which of the models that the method evaluates.
            split: train (where it was scored), val or test.

        Returns:
            A number for each client; NaN where a client has no samples in the split.
        """
        return self.scores(method, "accuracy", model, split)

    def scores(self, method: str, metric: str, model: str = "personal", split: str = "test") -> np.ndarray:
        """Return every client's score in a metric.

        Args:
            method: the method's name.
            metric: accuracy, loss, and where the run has them balanced_accuracy, macro_f1, auc and macro_auc; those of
                its task.
            model: which of the models that the method evaluates.
            split: train (where it was scored), val or test.

        Returns:
            A number for each client; NaN where a client has no samples in the split.
        """
        scores = [client[model].get(split, {}).get(metric) for client in self.result(method)["clients"]]
        return np.array([np.nan if s is None else s for s in scores])

    def curve(self, method: str, model: str = "personal") -> tuple[list[int], list[float]]:
        """Return how the mean test score `metric` went: accuracy, unless the task has another.

        Args:
            method: the method's name.
            model: which of the models that the method evaluates.

        Returns:
            The rounds that were evaluated, and the mean test score in each.
        """
        lines = [line for line in self.folder.method(method).rounds() if self.metric in line]
        return [line["round"] for line in lines], [line[self.metric][model] for line in lines]

    def clock(self, method: str) -> list[float]:
        """Return the simulated clock after each round that was evaluated; nothing where no time was simulated."""
        lines = [line for line in self.folder.method(method).rounds() if self.metric in line]
        return [line["clock"] for line in lines if "clock" in line]

    def seconds(self, method: str) -> float:
        """Return the time spent in rounds, interruptions not counted.

        Args:
            method: the method's name.

        Returns:
            Seconds.
        """
        return sum(self.folder.method(method).seconds())

    @property
    def diverged(self) -> dict[str, str]:
        """The methods whose training diverged, and why."""
        return {name: self.result(name)["diverged"] for name in self.entries if "diverged" in self.result(name)}

    def summary(self) -> list[dict[str, Any]]:
        """Return a dict for each method: accuracy over clients, gain over Local, bytes, time, where the models are."""
        return [self._summary(name) for name in self.entries]

    def _summary(self, name: str) -> dict[str, Any]:
        result = self.result(name)
        others = [model for model in result["clients"][0] if model != PERSONAL]
        sent = result["bytes"]
        return {
            "run": str(self.path),
            "method": name,
            "title": result["title"],
            "evaluates": result["evaluates"],
            "rounds": result["rounds"],
            "saved_round": result.get("saved_round", result["rounds"]),
            "clients": len(self.about["clients"]),
            "headline": self.headline,
            "why": self.why,
            "scores": {model: self._means(name, model) for model in (PERSONAL, *others)},
            "spread": {model: self.spread(name, model, self.judged) for model in (PERSONAL, *others)},
            self.metric: self.spread(name, PERSONAL, self.metric),
            "others": {model: self.spread(name, model, self.metric) for model in others},
            "gain": None if name == BASELINE or BASELINE not in self.entries else self.gain(name),
            "bytes": {
                "down": sent["down_shared"] + sent["down_own"],
                "up": sent["up_mean"] + sent["up_own"],
                "extra": sent.get("extra", {}),
                "by_compartment": sent,
            },
            "seconds": round(self.seconds(name), 3),
            "clock": result.get("clock"),
            "untrained": [client["name"] for client in self.about["clients"] if not client["train"]],
            "faults": result.get("faults"),
            "refused": result.get("refused"),
            "extended": result.get("extended"),
            "diverged": result.get("diverged", ""),
            "changes": self._changes(name),
            "models": str(self.folder.method(name).clients),
        }

    def _changes(self, name: str) -> list[str]:
        """Say where the settings of a method have not been the run's all the time."""
        result = self.result(name)
        changes = [f"after round {each['round']}: {in_words(each['settings'])}" for each in result.get("changes", [])]
        if last := outdated(result, self.config, self.entries[name], self.about):
            changes.append(f"after its end: {in_words(last)}")
        return changes

    def check(self, methods: Iterable[str] | None = None, thorough: bool = True) -> int:
        """Look at every file of methods that have ended; one that is damaged or missing is a Problem.

        Args:
            methods: their names; None: all that have ended.
            thorough: look into the models of more than 1,000 clients, too; else only whether they are there.

        Returns:
            The number of files.
        """
        folders = [self.folder.method(name) for name in (self.entries if methods is None else methods)]
        ended = [folder for folder in folders if folder.finished]
        for folder in ended:
            folder.check(thorough or len(self.about["clients"]) <= MANY)
        return len({name for folder in ended for name in folder.digests})

    def refuse_changed_network(self, method: str) -> None:
        """Refuse to load a model into another network than it was trained as.

        Args:
            method: the method's name.
        """
        result, folder = self.result(method), self.folder.method(method)
        change = outdated(result, self.config, self.entries[method], self.about)
        network = {key: values for key, values in change.items() if key.startswith("model.")}
        if network:
            raise Problem(f"'{self.folder.config_file}' names another network than {method}'s: {in_words(network)}")
        folder.refuse_damaged(self.folder.clients_file)

    def _means(self, method: str, model: str) -> dict[str, float | None]:
        """Return the mean over clients of every score."""
        values = {key: self.scores(method, score.metric, model) for key, score in self.task.scores.items()}
        return {key: plain(means(each[None])[0].item()) for key, each in values.items()}

    def spread(self, method: str, model: str = PERSONAL, metric: str = "accuracy") -> dict[str, float | None]:
        """Describe how a test score is spread over clients.

        Args:
            method: the method's name.
            model: which of the models that the method evaluates.
            metric: as for `scores`.

        Returns:
            Its `mean`, `weighted` by samples, `std`, and `worst10`; None where no client has the score.
        """
        samples = np.array([client["test"] for client in self.about["clients"]])
        numbers = spread(self.scores(method, metric, model), samples, self.task.sign(metric))
        shown = {"mean": "mean", "weighted": "pooled", "std": "std", "worst10": "worst10"}
        return {name: plain(numbers[key]) for name, key in shown.items()}

    def gain(self, method: str) -> dict[str, Any]:
        """Compare a method with Local, client by client, in the test score that is the run's headline.

        A gain is above 0 where the method is better, whichever direction that is; it is in units of the score.

        Args:
            method: the method's name.

        Returns:
            What `gain_with_test` returns.
        """
        return gain_with_test(self.scores(BASELINE, self.judged), self.scores(method, self.judged), sign=self.sign)
