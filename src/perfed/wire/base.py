"""A treatment of uploads has two halves: what a client does before it sends, and what the server does on receiving."""

from __future__ import annotations

from torch import Tensor

from perfed.core.messages import Up, Uploads


class Transform:
    """Treat uploads on their way. Clipping, noise, quantisation and masks belong here, never in a method.

    The client half runs wherever the client trains, on every engine, right after `local`; the server half runs at the
    server before uploads are inspected and reduced. Bytes are counted between the two.

    `up.mean` and `up.own` are trees: a tensor, a dict or tuple of tensors, or `()` where a method sends nothing, as
    Local does; `tree_map` reaches every tensor of any of them. `up.own` may hold whole numbers. The server half gives
    back what the method sent: the same trees, shapes but for the rows, and kinds of numbers. A treatment takes no
    arguments, and it draws random numbers from its key alone (`perfed.core.random.uniform`).

    Example:
        >>> import dataclasses, torch
        >>> from perfed.core.tree import tree_map
        >>> class Halved(Transform):
        ...     def client(self, up, key):
        ...         return dataclasses.replace(up, mean=tree_map(lambda tensor: tensor / 2, up.mean))
        >>> Halved().client(Up(mean={"w": torch.ones(3)}), torch.tensor(0)).mean
        {'w': tensor([0.5000, 0.5000, 0.5000])}
        >>> Halved().client(Up(), torch.tensor(0)).mean
        ()
    """

    def client(self, up: Up, key: Tensor) -> Up:
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
            uploads: what arrived; each tensor of `mean` and `own` has a row for each client.

        Returns:
            The rows after the server's half; numbers of rows and clients stay as they are.
        """
        return uploads
