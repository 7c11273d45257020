"""Forms: of which tensors, shapes and kinds of numbers an upload consists.

A method declares the form of its uploads by what its own `local` makes for a specimen: a client of two samples of
zeros, whom it sends what the real clients got. Not by what the first clients sent: the first may be the bad one, and a
run that is resumed would have another first one. Whoever then sends another form loses its turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perfed.core.clients import SPLITS, Clients, Split
from perfed.core.errors import Problem
from perfed.core.tree import flatten, leaves, tree_map
from perfed.engines.trees import paths

Form = dict[str, Any]  # state, mean, own, weight, group, loss -> a tree with a Kind for every tensor


@dataclass(frozen=True)
class Kind:
    """The form of one tensor; a leaf of trees, as tensors are."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def kinds(tree: Any, first: int = 0) -> Any:
    """Return the tree with a Kind for every tensor.

    Args:
        tree: a tree of tensors.
        first: number of first axes that do not count; 1 for stacked trees.
    """
    return tree_map(lambda leaf: Kind(tuple(leaf.shape[first:]), leaf.dtype), tree)


def digest(shared: Any, own: Any) -> Any:
    """Return a value that is equal for messages of equal form: a method's uploads follow from what its clients got.

    Args:
        shared: what goes to everyone.
        own: what has a row for each client.
    """
    (for_all, nested), (for_each, nested_own) = flatten(shared), flatten(own)
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in for_all]
    return str(nested), *shapes, str(nested_own), *(tuple(leaf.shape[1:]) for leaf in for_each)


def most_frequent(forms: list[Form | None]) -> Form:
    """Return the form that most have, the first of several; None stands for whoever sent nothing."""
    (first, *others) = known = [form for form in forms if form is not None]
    return first if all(form == first for form in others) else max(known, key=known.count)


def specimen(clients: Clients) -> Clients:
    """Return one client of two samples of zeros, of the shape that all clients' samples have."""
    splits = {name: _blank(clients.split(name)) for name in SPLITS}
    public = clients.public and _blank(clients.public)
    return replace(clients, names=("specimen",), public=public, **splits)


def _blank(source: Split) -> Split:
    """Return two samples of zeros in place of a split's."""
    return Split(
        source.x.new_zeros(2, *source.x.shape[1:]), source.y.new_zeros(2, *source.y.shape[1:]), (2,), source.longest
    )


def fault(sent: Form, declared: Form) -> tuple[str, str] | None:
    """Return the first tensor that is not as declared, and what is wrong with it; None: nothing is.

    Args:
        sent: the form of one client's state and upload.
        declared: the form that the method declares.
    """
    if sent == declared:
        return None
    mine, wanted = _named(sent), _named(declared)
    for name, kind in wanted.items():
        if name not in mine:
            return name, "it is missing"
        if mine[name].shape != kind.shape:
            return name, f"its shape is {mine[name].shape}, not {kind.shape}"
        if mine[name].dtype != kind.dtype:
            return name, f"its numbers are {_word(mine[name].dtype)}, not {_word(kind.dtype)}"
    unknown = [name for name in mine if name not in wanted]
    return (unknown[0], "the method does not send it") if unknown else ("", "its tensors are nested in another way")


def refuse_unusable(declared: Form, method: str) -> None:
    """Refuse a form that no server can use.

    Args:
        declared: the form that the method declares.
        method: the method's name.
    """
    for name, kind in _named({part: tree for part, tree in declared.items() if part != "state"}).items():
        part = name.partition("/")[0]
        if kind.dtype.is_complex:
            raise Problem(f"{method} sends complex numbers as '{name}': send real and imaginary part as two tensors")
        if part == "mean" and not kind.dtype.is_floating_point:
            raise Problem(
                f"{method} sends {_word(kind.dtype)} as '{name}', and a mean of those would be cut to whole numbers: "
                "send them as floating-point numbers, or client by client in Up.own"
            )
        if part in ("group", "loss") and kind.shape:
            raise Problem(f"{method} sends a {part} of shape {kind.shape}: a client has one number there")
        if part == "mask" and (kind.dtype != torch.bool or len(kind.shape) != 1):
            kind_of_mask = f"{_word(kind.dtype)} of shape {kind.shape}"
            raise Problem(f"{method} sends a mask of {kind_of_mask}: it is True or False for each entry")
        if part == "mask" and not any(leaf.shape[-1:] == kind.shape for leaf in leaves(declared["mean"])):
            raise Problem(f"{method} sends a mask of {kind.shape[0]} entries, but no tensor in Up.mean has so many")
        if part == "group" and kind.dtype.is_floating_point:
            raise Problem(f"{method} sends a group of {_word(kind.dtype)}: groups are numbered with whole numbers")


def refuse_misfits(mean: Any, weight: Any, method: str) -> None:
    """Refuse weights of tensors that do not belong to those of the mean.

    Args:
        mean: rows of `Up.mean`.
        weight: rows of `Up.weight` where it is a tree.
        method: the method's name.
    """
    (weights, nested), (tensors, wanted) = flatten(kinds(weight, 1)), flatten(kinds(mean, 1))
    if nested != wanted:
        theirs, mine = (", ".join(paths(tree, name)) for tree, name in ((weight, "weight"), (mean, "mean")))
        raise Problem(
            f"{method} sends the weights {theirs or 'of nothing'} for {mine or 'no mean'}: Up.weight is one number, or "
            "a tree like Up.mean"
        )
    for name, own, tensor in zip(paths(mean, "mean"), weights, tensors, strict=True):
        sides = zip(own.shape[::-1], tensor.shape[::-1], strict=False)
        if len(own.shape) > len(tensor.shape) or any(mine not in (1, its) for mine, its in sides):
            raise Problem(
                f"{method} sends a weight of shape {own.shape} for '{name}' of shape {tensor.shape}: a weight is one "
                "number, or a tensor that is broadcast to the one it belongs to"
            )


def _named(form_of_upload: Form) -> dict[str, Kind]:
    named: dict[str, Kind] = {}
    for part, tree in form_of_upload.items():
        named |= zip(paths(tree, part), leaves(tree), strict=True)
    return named


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
