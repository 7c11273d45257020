"""What may happen to an upload between a client and the server.

A transform is a function `(up, key) -> up` of ONE client's upload, applied by every engine right after `local`; `key`
is the randomness of this client and round. Clipping, noise, quantisation and masks belong here, never in a method.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from perfed.core.messages import Up

Transform = Callable[[Up, Tensor], Up]


def identity(up: Up, key: Tensor) -> Up:  # noqa: ARG001 (a transform's form)
    """Send the upload as it is."""
    return up
