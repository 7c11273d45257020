"""Bytes on their way, by direction and compartment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from perfed.core.errors import Problem
from perfed.core.further import models_of
from perfed.core.messages import Down, Uploads
from perfed.core.method import Method
from perfed.core.model import Model
from perfed.core.tree import leaves

PUBLIC_DATA = "public_data"  # to each client once, when it first takes part; it may as well have had them


@dataclass
class Traffic:
    """Bytes sent so far; counters and single weights are not counted, weights of entries are.

    Nor is what training cannot change, such as a frozen backbone: everybody has it from the start. Of masked tensors
    the entries inside count, and not the masks, which follow from a few numbers, such as a width.
    """

    down_shared: int = 0
    down_own: int = 0
    up_mean: int = 0
    up_own: int = 0
    extra: dict[str, int] = field(default_factory=dict)  # between servers, and public data; in neither `down` nor `up`

    @property
    def down(self) -> int:
        """Bytes from the server to clients."""
        return self.down_shared + self.down_own

    @property
    def up(self) -> int:
        """Bytes from clients to the server."""
        return self.up_mean + self.up_own

    def count(self, method: Method, receivers: int, down: Down, uploads: Uploads | None = None) -> None:
        """Add an exchange.

        Args:
            method: whose models' padding and frozen parameters do not count.
            receivers: number of clients that were sent `down`.
            down: what they were sent; `own` has a row for each.
            uploads: the rows that came back; None: nothing did.
        """
        models = {model.width: model for model in models_of(method).values()}
        sizes = {width: model.sent for width, model in models.items()}
        sent = sizes if down.mask is None else sizes | _entries(down.mask, models)
        self.down_shared += int(count_bytes([down.shared], sent) * receivers)
        self.down_own += int(count_bytes([down.own], sent))
        if uploads is not None:
            sent = sizes if uploads.mask is None else sizes | _entries(uploads.mask, models)
            of_entries = [weight for weight in leaves(uploads.weight) if weight.dim() > 1]
            self.up_mean += int(count_bytes([uploads.mean, of_entries], sent))
            self.up_own += int(count_bytes([uploads.own], sizes))

    def count_batches(self, method: Method, samples: int) -> None:
        """Add what clients and server exchanged while clients trained.

        Args:
            method: whose `batch_traffic` says so.
            samples: training samples that they went through, in all epochs together.
        """
        sent = method.batch_traffic(samples)
        if unknown := sent.keys() - {"up", "down"}:
            name = type(method).__name__
            raise Problem(f"{name}.batch_traffic returns '{min(unknown)}': numbers go 'up' or 'down'")
        self.up_own += sent.get("up", 0) * method.model.dtype.itemsize
        self.down_own += sent.get("down", 0) * method.model.dtype.itemsize


def _entries(mask: Tensor, models: dict[int, Model]) -> dict[int, Fraction]:
    """Return the length of a mask's rows -> how many of them are True, on average over the clients."""
    width = mask.shape[1]
    sent = mask & models[width].moving.mask if width in models else mask
    return {width: Fraction(int(sent.sum()), max(len(mask), 1))}


def count_bytes(trees: Iterable[Any], sizes: Mapping[int, int | Fraction]) -> int | Fraction:
    """Count the bytes of the tensors in a compartment; a row of theta counts without what is not sent of it.

    Args:
        trees: trees of tensors.
        sizes: numbers in a row of theta -> how many of them count.

    Returns:
        The number of bytes.
    """
    total: int | Fraction = 0
    for tensor in leaves(list(trees)):
        numbers: int | Fraction = tensor.numel()
        if tensor.dim() and tensor.shape[-1] in sizes:
            numbers = numbers // tensor.shape[-1] * sizes[tensor.shape[-1]]
        total += numbers * tensor.element_size()
    return total
