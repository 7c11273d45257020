"""Trees of tensors (dicts, tuples, lists): map over them, stack them, take rows, send them to a device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree  # what vmap itself flattens its arguments with
from torch.utils._python_dispatch import _disable_current_modes

leaves = _pytree.tree_leaves
flatten = _pytree.tree_flatten
unflatten = _pytree.tree_unflatten
_SHORT = 4096  # numbers that are kept on a device


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree of fn(leaf, *leaves of the others)."""
    if isinstance(tree, Tensor):  # most are one tensor, and flattening takes longer than what is done to it
        return fn(tree, *rest)
    return _pytree.tree_map(fn, tree, *rest)


def rows(tree: Any, index: Any) -> Any:
    """Take row (or rows) `index` of every tensor."""
    return tree_map(lambda t: t[index], tree)


def stack(trees: Sequence[Any]) -> Any:
    """Join trees to one, whose tensors have a new first axis."""
    return tree_map(lambda *t: torch.stack(t), *trees)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)  # or the host would wait until the GPU is idle
    return tensor.to(device)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers on a device, for reading alone: equal ones may share their memory."""
    if device.type != "cuda" or len(values) > _SHORT:
        return send(torch.tensor(values, dtype=torch.int64), device)
    return _sent(tuple(values), device)


@functools.lru_cache(maxsize=256)
def _sent(values: tuple[int, ...], device: torch.device) -> Tensor:
    with outside_transformations():
        return send(torch.tensor(values, dtype=torch.int64), device)


@contextlib.contextmanager
def outside_transformations() -> Iterator[None]:
    """Leave vmap, grad and tracing, inside which a tensor that is made to be kept would be a wrapper of theirs."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
