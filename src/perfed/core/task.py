"""What a network learns to do: the loss of a sample, the scores, what a label is and what a prediction is.

A task says what `y` of a batch holds and what `outputs` mean:

- `classification`: y int64 [n], classes from 0; outputs [n, classes].
- `binary`: y float [n], 0 or 1; outputs [n, 1], logits.
- `multilabel`: y float [n, labels], 0 or 1; outputs [n, labels], logits.
- `regression`: y float [n] or [n, targets], standardised; outputs [n, targets].
- `next_token`: y int64 [n, T], -100 where a position is not counted; outputs [n, T, vocabulary].
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from perfed.core import full_scores
from perfed.core.errors import Problem, nearest
from perfed.core.tree import outside_transformations

Direction = Literal["higher", "lower"]
IGNORED = -100  # the label of a position that is not counted


class Losses:
    """Compute the losses of single outputs with PyTorch; an engine may have others, equal but for rounding."""

    @staticmethod
    def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
        """Return the cross-entropy of each row: logits [n, classes] and classes [n] to [n]."""
        return F.cross_entropy(out, y, reduction="none")

    @staticmethod
    def binary_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
        """Return the mean binary cross-entropy of each row: logits and labels [n, labels] to [n]."""
        return F.binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)

    @staticmethod
    def squared_error(out: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of each row: outputs and targets [n, targets] to [n]."""
        return ((out - y) ** 2).mean(1)


class Score(NamedTuple):
    """Say what a score is.

    Attributes:
        metric: its name in results.
        better: which direction is better.
        title: what it is called in a sentence.
        heading: what it is called above a column.
    """

    metric: str
    better: Direction
    title: str
    heading: str


@dataclass(frozen=True)
class Task(ABC):
    """Say what a network learns to do.

    Attributes:
        outputs: how many numbers the network gives for a sample (for each position of a sequence): classes, labels,
            targets, or the vocabulary; 0: it is not said.
        kind: the task's name.
        scores: by the name that asks for one as `run.headline`; the first is what models are judged by.
        things: what its outputs stand for.
        uneven: the name of the score that they are judged by where nearly all labels are alike; empty: the first.
        whole: the metrics that need all outputs for a client at once, see `full`.
    """

    outputs: int = 0

    kind: ClassVar[str]
    scores: ClassVar[dict[str, Score]]
    things: ClassVar[str] = "outputs"
    uneven: ClassVar[str] = ""
    whole: ClassVar[tuple[str, ...]] = ()

    @property
    def headline(self) -> str:
        """Return the name of the score that models are judged by, where nobody says otherwise."""
        return next(iter(self.scores))

    @property
    def in_words(self) -> str:
        """Return what the task is, for a sentence: regression of 3 targets."""
        count = f" of {self.outputs} {self.things if self.outputs != 1 else self.things[:-1]}" if self.outputs else ""
        return f"{self.kind}{count}"

    def better(self, metric: str) -> Direction:
        """Return which direction of a metric is better."""
        known: dict[str, Direction] = {score.metric: score.better for score in self.scores.values()}
        return "lower" if metric == "loss" else known.get(metric, "higher")

    def sign(self, metric: str) -> int:
        """Return 1 for a metric of which more is better, -1 for one of which less is."""
        return 1 if self.better(metric) == "higher" else -1

    # ------------------------------------------------------------------ of tensors

    @abstractmethod
    def losses(self, out: Tensor, y: Tensor, by: Any = Losses) -> Tensor:
        """Return the loss of each sample, which training makes small.

        Args:
            out: the network's outputs [n, ...].
            y: the labels [n, ...].
            by: has functions named as those of `Losses`.

        Returns:
            [n].
        """

    @abstractmethod
    def rates(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return numbers of each sample; `finish` makes a client's scores of their means.

        Args:
            out: the network's outputs [n, ...].
            y: the labels [n, ...].

        Returns:
            name -> [n].
        """

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return scores, `loss` among them, of the means of `rates` over a client's samples: by default these."""
        return means

    def full(self, out: Tensor, y: Tensor, size: list[int] | tuple[int, ...]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the scores that need all outputs for a client at once.

        Args:
            out: the network's outputs [n, ...], client after client.
            y: the labels [n, ...].
            size: samples of each client, n in all.

        Returns:
            metric -> one number for each client, NaN where it has no such score; the metrics are those of `whole`.
        """
        return {}

    @property
    def reading(self) -> str:
        """Say how a network's outputs are read."""
        return "the largest output is the prediction"

    @abstractmethod
    def predicted(self, out: Tensor) -> Tensor:
        """Return what outputs predict: classes, probabilities, numbers in units of the label, or next tokens."""

    @abstractmethod
    def fault(self, y: Tensor) -> str:
        """Say in words what is wrong with one of the labels `y`: it "is ..."; empty where nothing is."""

    def refuse(self, y: Tensor, what: str) -> None:
        """Raise a Problem where labels are not this task's.

        Args:
            y: the labels.
            what: whose labels they are, for the sentence: "a label of the test samples is ...".
        """
        if why := self.fault(y):
            raise Problem(f"a label of {what} {why}")

    # ------------------------------------------------------------------ as plain values

    def plain(self) -> dict[str, Any]:
        """Return the task as plain values, which `task_of` reads back."""
        return {"kind": self.kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}}

    @classmethod
    def of_plain(cls, about: dict[str, Any]) -> Self:
        """Return the task that `plain` has described."""
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in about.items()}
        del values["kind"]
        return cls(**values)


def _beside(out: Tensor, y: Tensor) -> Tensor:
    """Return labels [n] or [n, k] in the shape and type of outputs [n, k]."""
    return y.reshape(out.shape).to(out.dtype)


@dataclass(frozen=True)
class Classification(Task):
    """One of several classes for each sample."""

    kind, things = "classification", "classes"
    scores: ClassVar = {
        "accuracy": Score("accuracy", "higher", "accuracy", "accuracy"),
        "balanced": Score("balanced_accuracy", "higher", "balanced accuracy", "balanced accuracy"),
        "f1": Score("macro_f1", "higher", "macro-F1", "F1"),
        "auc": Score("macro_auc", "higher", "AUC (mean over classes)", "AUC"),
    }
    uneven = "balanced"
    whole = ("balanced_accuracy", "macro_f1", "auc", "macro_auc")

    def losses(self, out: Tensor, y: Tensor, by: Any = Losses) -> Tensor:
        return by.cross_entropy(out, y)

    def rates(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(out, y, reduction="none")
        return {"loss": loss, "accuracy": (out.argmax(-1) == y).to(loss.dtype)}

    def full(self, out: Tensor, y: Tensor, size: list[int] | tuple[int, ...]) -> dict[str, Tensor]:
        return full_scores.of_classes(out, y, size)

    def predicted(self, out: Tensor) -> Tensor:
        return out.argmax(-1)

    def fault(self, y: Tensor) -> str:
        if not len(y) or not self.outputs or (int(y.min()) >= 0 and int(y.max()) < self.outputs):
            return ""
        return f"is not one of the {self.outputs} classes"


@dataclass(frozen=True)
class Multilabel(Task):
    """Several labels, each of which a sample has or has not.

    The loss is binary cross-entropy with logits, the mean over labels. Accuracy is the share of the labels that are
    predicted rightly, a label being predicted where its probability is above one half.
    """

    kind, things = "multilabel", "labels"
    scores: ClassVar = {
        "accuracy": Score("accuracy", "higher", "accuracy (mean over labels)", "accuracy"),
        "auc": Score("auc", "higher", "AUC (mean over labels)", "AUC"),
        "average_precision": Score("average_precision", "higher", "average precision (mean over labels)", "AP"),
    }
    uneven = "auc"
    whole = ("auc", "average_precision")

    def losses(self, out: Tensor, y: Tensor, by: Any = Losses) -> Tensor:
        return by.binary_cross_entropy(out, _beside(out, y))

    def rates(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = (out > 0) == (y.reshape(out.shape) > 0)
        return {"loss": self.losses(out, y), "accuracy": right.to(out.dtype).mean(1)}

    def full(self, out: Tensor, y: Tensor, size: list[int] | tuple[int, ...]) -> dict[str, Tensor]:
        return full_scores.of_labels(out, y.reshape(out.shape), size)

    @property
    def reading(self) -> str:
        return "outputs are logits: a probability is 1 / (1 + e^-output)"

    def predicted(self, out: Tensor) -> Tensor:
        return out.sigmoid()

    def fault(self, y: Tensor) -> str:
        return "" if bool(((y == 0) | (y == 1)).all()) else "is neither 0 nor 1"


@dataclass(frozen=True)
class Binary(Multilabel):
    """One label, which a sample has or has not."""

    outputs: int = 1

    kind = "binary"
    scores: ClassVar = {
        "accuracy": Score("accuracy", "higher", "accuracy", "accuracy"),
        "auc": Score("auc", "higher", "AUC", "AUC"),
        "average_precision": Score("average_precision", "higher", "average precision", "AP"),
    }

    def predicted(self, out: Tensor) -> Tensor:
        return super().predicted(out).squeeze(1)


@dataclass(frozen=True)
class Regression(Task):
    """One or several numbers for each sample.

    Labels of a batch are standardised, (label - shift) / scale, by statistics of training rows (`measured`,
    `standardised`). The loss is their squared error, the mean over targets; all other scores and all predictions are
    in units of the label.

    Attributes:
        shift: what each target's mean was; empty: 0.
        scale: what each target's standard deviation was; empty: 1.
    """

    outputs: int = 1
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    kind, things = "regression", "targets"
    scores: ClassVar = {
        "absolute_error": Score("absolute_error", "lower", "absolute error", "absolute error"),
        "squared_error": Score("squared_error", "lower", "squared error", "squared error"),
        "r2": Score("r2", "higher", "R²", "R²"),
    }
    whole = ("r2",)

    def __post_init__(self) -> None:
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            if values and len(values) != self.outputs:
                raise Problem(
                    f"regression of {self.outputs} targets needs as many numbers as {name}, not {len(values)}"
                )

    @classmethod
    def measured(cls, y: Tensor) -> Regression:
        """Return the task whose shift and scale are those of the training rows `y` [n] or [n, targets]."""
        rows = y.double().reshape(len(y), -1)
        std, mean = torch.std_mean(rows, 0, correction=0)
        scale = [value if value > 0 else 1.0 for value in std.tolist()]  # a target that never changes stays as it is
        return cls(rows.shape[1], tuple(mean.tolist()), tuple(scale))

    def standardised(self, y: Tensor) -> Tensor:
        """Return labels as people have them, [n] or [n, targets], as batches hold them: float32."""
        rows = y.double().reshape(len(y), self.outputs)
        return ((rows - self._shift(rows)) / self._scale(rows)).float().reshape(y.shape)

    def losses(self, out: Tensor, y: Tensor, by: Any = Losses) -> Tensor:
        return by.squared_error(out, _beside(out, y))

    def rates(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        error = (out - _beside(out, y)) * self._scale(out)
        errors = {"squared_error": (error**2).mean(1), "absolute_error": error.abs().mean(1)}
        return {"loss": self.losses(out, y), **errors}

    def full(self, out: Tensor, y: Tensor, size: list[int] | tuple[int, ...]) -> dict[str, Tensor]:
        return full_scores.of_numbers(out, y.reshape(out.shape), size)

    @property
    def reading(self) -> str:
        pairs = zip(self.scale or (1.0,) * self.outputs, self.shift or (0.0,) * self.outputs, strict=True)
        return "outputs are standardised: a prediction is " + ", ".join(f"{s:.6g} output + {m:.6g}" for s, m in pairs)

    def predicted(self, out: Tensor) -> Tensor:
        numbers = out * self._scale(out) + self._shift(out)
        return numbers.squeeze(1) if self.outputs == 1 else numbers

    def fault(self, y: Tensor) -> str:
        return "" if bool(y.isfinite().all()) else "is not a finite number"

    def _shift(self, like: Tensor) -> Tensor | float:
        return _constants(self.shift, like.dtype, like.device) if self.shift else 0.0

    def _scale(self, like: Tensor) -> Tensor | float:
        return _constants(self.scale, like.dtype, like.device) if self.scale else 1.0


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with outside_transformations():
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class NextToken(Task):
    """The next token at every position of a sequence.

    A sample's loss is the mean over its counted positions, 0 where it has none. A client's scores are means over all
    its counted positions, not over its samples: a long sample counts more than a short one, as in a perplexity of the
    whole text. Perplexity is e to the power of that mean.
    """

    kind, things = "next_token", "tokens"
    scores: ClassVar = {
        "accuracy": Score("accuracy", "higher", "accuracy (over tokens)", "accuracy"),
        "perplexity": Score("perplexity", "lower", "perplexity", "perplexity"),
    }

    def losses(self, out: Tensor, y: Tensor, by: Any = Losses) -> Tensor:
        each = by.cross_entropy(out.flatten(0, 1), y.clamp_min(0).flatten()).reshape(y.shape)
        counted = (y != IGNORED).to(each.dtype)
        return (each * counted).sum(1) / counted.sum(1).clamp_min(1)

    def rates(self, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        tokens = (y != IGNORED).sum(1).to(out.dtype)
        right = (out.argmax(-1) == y).sum(1).to(out.dtype)  # no output is IGNORED
        return {"loss": self.losses(out, y) * tokens, "accuracy": right, "tokens": tokens}

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        loss, accuracy = (means[name] / means["tokens"] for name in ("loss", "accuracy"))  # 0 / 0: no tokens, no score
        return {"loss": loss, "accuracy": accuracy, "perplexity": loss.exp()}

    def predicted(self, out: Tensor) -> Tensor:
        return out.argmax(-1)

    def fault(self, y: Tensor) -> str:
        counted = y[y != IGNORED]
        if not len(counted) or not self.outputs or (int(counted.min()) >= 0 and int(counted.max()) < self.outputs):
            return ""
        return f"is neither {IGNORED} nor one of the {self.outputs} tokens"


KINDS: dict[str, type[Task]] = {task.kind: task for task in (Classification, Binary, Multilabel, Regression, NextToken)}


def task_of(about: dict[str, Any]) -> Task:
    """Return the task that `Task.plain` has described.

    Args:
        about: plain values, such as a run folder has.

    Example:
        >>> task_of({"kind": "regression", "outputs": 1, "shift": [3.5], "scale": [2.0]})
        Regression(outputs=1, shift=(3.5,), scale=(2.0,))
    """
    kind = about.get("kind", "")
    if kind not in KINDS:
        raise Problem(f"there is no task '{kind}'{nearest(kind, KINDS)}")
    return KINDS[kind].of_plain(about)
