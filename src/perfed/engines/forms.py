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
    splits = {}
    for name in SPLITS:
        source = clients.split(name)
        splits[name] = Split(source.x.new_zeros(2, *source.x.shape[1:]), source.y.new_zeros(2), (2,))
    return replace(clients, names=("specimen",), **splits)


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
        if part in ("weight", "group", "loss") and kind.shape:
            raise Problem(f"{method} sends a {part} of shape {kind.shape}: a client has one number there")
        if part == "group" and kind.dtype.is_floating_point:
            raise Problem(f"{method} sends a group of {_word(kind.dtype)}: groups are numbered with whole numbers")


def _named(form_of_upload: Form) -> dict[str, Kind]:
    named: dict[str, Kind] = {}
    for part, tree in form_of_upload.items():
        named |= zip(paths(tree, part), leaves(tree), strict=True)
    return named


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
