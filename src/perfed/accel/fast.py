"""Whether a block of clients is being run with kernels of its own: the engine says so, layers ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)

_on = False
_kernels = False  # whether an engine with kernels was made: then they may be used around it, too


@contextlib.contextmanager
def fast() -> Iterator[None]:
    """Inside, layers of a block under vmap use the kernels for a whole cohort where these cover them."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


def covered(*tensors: Tensor) -> bool:
    """Whether the cohort's kernels may be used for these: a block of float32 numbers, in a fast engine."""
    if not _on or tensors[0].dtype != torch.float32 or not any(map(is_functorch_wrapped_tensor, tensors)):
        return False
    # A derivative through a client's own vmap: kernels know theirs inside the innermost vmap alone.
    kinds = [one.key() for one in get_interpreter_stack() or ()]
    maps = [at for at, kind in enumerate(kinds) if kind == TransformType.Vmap]
    return bool(maps) and not {TransformType.Grad, TransformType.Jvp} & set(kinds[: maps[-1]])


def use_kernels() -> None:
    """An engine that launches kernels has been made."""
    global _kernels
    _kernels = True


def kernels_used() -> bool:
    """Whether kernels are in use; otherwise nobody has asked whether this machine can compile them."""
    return _kernels


def kernels_run(tensor: Tensor) -> bool:
    """Whether a kernel may be launched on this tensor as it is: nobody traces, batches or differentiates here."""
    free = not torch.compiler.is_compiling() and peek_interpreter_stack() is None
    wrapped = is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return _kernels and free and not wrapped
