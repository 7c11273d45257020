"""Public samples: what a method may see of them, and what sending them takes."""

from __future__ import annotations

from dataclasses import replace

import torch

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem
from perfed.core.method import Method

UNKNOWN = -1  # a label that nobody has, or that a method does not see


def visible(method: Method, clients: Clients) -> Clients:
    """Return the clients with the public samples that a method says it needs; refuse where there are none.

    Args:
        method: the method. Without public samples its server, where it trains, has a blank one: it gives steps a key.
        clients: the clients.
    """
    name, public = type(method).__name__, clients.public
    if not method.public:
        return replace(clients, public=_blank(clients)) if method.refines else clients
    if public is None:
        raise Problem(f"{name} needs public samples, and there are none: data.public holds some out of the training")
    if method.reads_labels and not public.labelled:
        raise Problem(
            f"{name} needs labelled public samples, and the labels of these are unknown: see data.public_data"
        )
    if not method.reads_labels and public.labelled:
        return replace(clients, public=replace(public, y=torch.full_like(public.y, UNKNOWN), labelled=False))
    return clients


def _blank(clients: Clients) -> Split:
    """Return a sample of zeros without a label."""
    x, y = clients.train.x, clients.train.y
    return Split(x.new_zeros(1, *x.shape[1:]), torch.full_like(y[:1], UNKNOWN), (1,), labelled=False)


def size_of(public: Split | None) -> int:
    """Return the bytes of public samples on their way; labels that nobody knows do not travel."""
    if public is None:
        return 0
    parts = (public.x, public.y) if public.labelled else (public.x,)
    return sum(part.numel() * part.element_size() for part in parts)
