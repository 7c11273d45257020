"""Whether a block of clients is being run with kernels of its own: the engine says so, layers ask."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack

_on = False


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
    return _on and tensors[0].dtype == torch.float32 and any(map(is_functorch_wrapped_tensor, tensors))


@functools.cache
def has_triton() -> bool:
    """Whether there is a compiler for kernels."""
    return find_spec("triton") is not None


def kernels_run() -> bool:
    """Whether a kernel may be launched on a tensor as it is: nobody traces, batches or differentiates here."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is None and has_triton()
