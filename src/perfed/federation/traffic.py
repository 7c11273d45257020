"""Bytes on their way, by direction and compartment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from perfed.core.further import models_of
from perfed.core.messages import Down, Uploads
from perfed.core.method import Method
from perfed.core.tree import leaves


@dataclass
class Traffic:
    """Bytes sent so far; counters and single weights are not counted, weights of entries are.

    Nor is what training cannot change, such as a frozen backbone: everybody has it from the start.
    """

    down_shared: int = 0
    down_own: int = 0
    up_mean: int = 0
    up_own: int = 0
    extra: dict[str, int] = field(default_factory=dict)  # between servers; in neither `down` nor `up`

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
        sizes = {model.width: model.sent for model in models_of(method).values()}
        size = lambda tree: count_bytes([tree], sizes)
        self.down_shared += size(down.shared) * receivers
        self.down_own += size(down.own)
        if uploads is not None:
            of_entries = [weight for weight in leaves(uploads.weight) if weight.dim() > 1]
            self.up_mean += size([uploads.mean, of_entries])
            self.up_own += size(uploads.own)


def count_bytes(trees: Iterable[Any], sizes: dict[int, int]) -> int:
    """Count the bytes of the tensors in a compartment; a row of theta counts without what is not sent of it.

    Args:
        trees: trees of tensors.
        sizes: numbers in a row of theta -> how many of them count.

    Returns:
        The number of bytes.
    """
    total = 0
    for tensor in leaves(list(trees)):
        numbers = tensor.numel()
        if tensor.dim() and tensor.shape[-1] in sizes:
            numbers = numbers // tensor.shape[-1] * sizes[tensor.shape[-1]]
        total += numbers * tensor.element_size()
    return total
