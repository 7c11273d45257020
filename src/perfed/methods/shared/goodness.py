"""How good a model is on some samples, as one number of which more is better, whatever the task."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core.data import Data
from perfed.core.method import Method


def goodness(method: Method, theta: Tensor, data: Data, split: str = "train") -> Tensor:
    """Return the score that models are judged by, its sign turned where less of it is better; NaN without samples.

    Args:
        method: whose model it is.
        theta: the model.
        data: samples of a client, or public ones.
        split: which of a client's.
    """
    task = method.model.task
    metric = task.scores[task.headline].metric  # accuracy, where the task has it
    return task.sign(metric) * task.finish(data.mean(method.score, {"": theta}, split)[""])[metric]


def held_out(method: Method, theta: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Return a model's score on ONE client's validation samples, and how many these are.

    Of a client without validation samples it is the score on its training samples. Where nothing can be scored, both
    numbers are 0.

    Args:
        method: whose model it is.
        theta: the model.
        data: the client's samples.
    """
    has_some = data.count("val") > 0
    score = torch.where(has_some, goodness(method, theta, data, "val"), goodness(method, theta, data))
    count = torch.where(has_some, data.count("val"), data.size).to(score.dtype)
    return score.nan_to_num(0), count.where(score.isfinite(), 0)
