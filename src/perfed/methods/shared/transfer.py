"""What knowledge transfer between networks takes: outputs at a temperature, and batches of what clients uploaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence

from perfed.core.errors import Problem
from perfed.core.model import Batch


def divergence(out: Tensor, teacher: Tensor, T: float) -> Tensor:
    """Return T^2 times the KL divergence of outputs from a teacher's, both at temperature T, for each sample.

    Args:
        out: logits [samples, classes].
        teacher: those that they are to be like.
        T: what both are divided by; the larger, the more the order of unlikely classes counts.
    """
    return T**2 * kl_div((out / T).log_softmax(1), (teacher / T).softmax(1), reduction="none").sum(1)


def classifier(shapes: Iterable[Sequence[int]], width: int, classes: int) -> nn.Module:
    """Return a network with two hidden layers, which takes what several others make of their samples.

    Args:
        shapes: those of each one's representations, which have to be equally many numbers.
        width: of the hidden layers.
        classes: how many outputs it has.
    """
    inputs = sorted({math.prod(shape) for shape in shapes})
    if len(inputs) > 1:
        raise Problem(
            "one network at the server takes what all clients extract, but their networks extract "
            f"{' or '.join(map(str, inputs))} numbers of a sample: choose ones whose heads take equally many"
        )
    hidden = nn.Linear(inputs[0], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def batches(uploads: dict[str, Tensor], size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Put what clients uploaded into one table, and its samples into batches: client by client, in their order.

    Args:
        uploads: tables [clients, rows, ...] by name; `real` is False where a client's rows are filled up.
        size: most samples in a batch.

    Returns:
        The tables with the rows of one client behind another's, and the rows of each batch, [batches, samples]; -1
        fills short ones up.
    """
    rows = [real.nonzero().flatten() + client * len(real) for client, real in enumerate(uploads["real"])]
    each = [batch for own in rows for batch in own.split(size) if len(batch)]
    table = {name: tensor.flatten(0, 1) for name, tensor in uploads.items()}
    return table, pad_sequence(each, batch_first=True, padding_value=-1)


def batch_of(table: dict[str, Tensor], order: Tensor, step: Tensor, key: Tensor) -> tuple[Batch, Tensor]:
    """Return a step's batch of representations, whose filling has weight 0, and its samples' places in the table.

    Args:
        table: what `batches` returned; `z` and `y` are representations and labels.
        order: the rows of each batch; after the last one it begins again.
        step: the step's number, from 0.
        key: the step's.
    """
    rows = order.index_select(0, (step % len(order)).view(1))[0]
    place = torch.where(rows < 0, rows[0], rows)
    z = table["z"][place]
    return Batch(z, table["y"][place], (rows >= 0).to(z.dtype), key), place
