"""A treatment of uploads has two halves: what a client does before it sends, and what the server does on receiving."""

from __future__ import annotations

from torch import Tensor

from perfed.core.messages import Up, Uploads


class Transform:
    """Treat uploads on their way. Clipping, noise, quantisation and masks belong here, never in a method.

    The client half runs wherever the client trains, on every engine, right after `local`; the server half runs at the
    server before uploads are inspected and reduced. Bytes are counted between the two.

    Example:
        >>> import dataclasses, torch
        >>> class Halved(Transform):
        ...     def client(self, up, key):
        ...         return dataclasses.replace(up, mean=up.mean / 2)
        >>> Halved().client(Up(mean=torch.ones(3)), torch.tensor(0)).mean
        tensor([0.5000, 0.5000, 0.5000])
    """

    def client(self, up: Up, key: Tensor) -> Up:  # noqa: ARG002
        """Return what one client sends in place of its upload; runs under vmap, so the rules for `local` hold.

        Args:
            up: the upload that the method made.
            key: what this client's randomness in this round and exchange is drawn from.

        Returns:
            The upload as it travels.
        """
        return up

    def server(self, uploads: Uploads) -> Uploads:
        """Return the uploads that the method's server works with.

        Args:
            uploads: what arrived, one row per client.

        Returns:
            The rows after the server's half; numbers of rows and clients stay as they are.
        """
        return uploads
