"""Trees of tensors on their way: taken apart without pickle, and searched for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from perfed.core.tree import leaves

AT_ONCE = 1 << 20  # numbers of which a CPU holds the sizes at a time


def pack(tree: Any) -> tuple[Any, list[Tensor]]:
    """Take a tree apart: return a JSON skeleton and the tensors it points to."""
    tensors: list[Tensor] = []

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors.append(node)
            return len(tensors) - 1
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                raise TypeError(f"a state's keys must be text, not {list(node)}")
            return {"dict": {key: walk(value) for key, value in node.items()}}
        if type(node) in (tuple, list):  # a NamedTuple would not come back as one
            return {type(node).__name__: [walk(value) for value in node]}
        if node is None or isinstance(node, bool | int | float | str):
            return {"value": node}
        raise TypeError(f"a state holds tensors, dicts, tuples, lists and plain values, not {type(node).__name__}")

    return walk(tree), tensors


def unpack(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the tree that `pack` took apart."""
    if isinstance(skeleton, int):
        return tensors[skeleton]
    ((kind, inside),) = skeleton.items()
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in inside.items()}
    if kind in ("tuple", "list"):
        parts = [unpack(value, tensors) for value in inside]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "value":
        return inside
    raise ValueError(f"unknown node {kind!r} in a saved state")


def paths(tree: Any, root: str) -> list[str]:
    """Return a name for every tensor of a tree, in the order of its leaves, such as 'state/velocity'."""
    keyed = _pytree.tree_flatten_with_path(tree)[0]
    words = lambda path: [str(getattr(part, "key", getattr(part, "idx", ""))) for part in path]
    return ["/".join([root, *words(path)]) for path, _ in keyed]


def first_not_finite(tree: Any, count: int, device: Any, root: str) -> tuple[Tensor, list[str]]:
    """Find rows with numbers that are not finite, without waiting for the device.

    Args:
        tree: tensors [count, ...].
        count: number of rows.
        device: where the answer is wanted.
        root: first part of the tensors' names.

    Returns:
        For each row the place of its first tensor that is not finite, -1 where all are; and the tensors' names.
    """
    bad = [not_finite(leaf) for leaf in leaves(tree)]
    return first_true(bad, count, device), paths(tree, root)


def not_finite(stacked: Any) -> Tensor | None:
    """Return for each row whether it holds a number that is not finite; None for numbers that always are."""
    if not isinstance(stacked, Tensor) or not stacked.is_floating_point() or not stacked.numel():
        return None
    # The largest number of a row tells whether all are finite, in one look at each.
    flat = stacked[:, None].flatten(1)
    if flat.is_cuda:
        return ~torch.linalg.vector_norm(flat, torch.inf, dim=1).isfinite()
    pieces = flat.split(max(1, AT_ONCE // flat.shape[1]))  # a norm takes eight times as long on a CPU
    return ~torch.cat([piece.abs().amax(1) for piece in pieces]).isfinite()


def first_true(flags: Sequence[Tensor | None], count: int, device: Any) -> Tensor:
    """Return for each of `count` rows the place of the first of these flags [count] that is true; -1: none is.

    It takes few operations, however many flags there are: a GPU's host pays for each in every exchange.
    """
    places = [place for place, flag in enumerate(flags) if flag is not None]
    if not places:
        return torch.full((count,), -1, device=device)
    table = torch.stack([flag for flag in flags if flag is not None])
    first = table.byte().argmax(0)
    if places != list(range(len(places))):
        first = torch.tensor(places, device=device)[first]
    return torch.where(table.any(0), first, -1)
