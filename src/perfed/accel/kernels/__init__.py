"""Kernels for a whole cohort, one file for each family; README.md says how to add one."""

import torch


def precision() -> str:
    """Return the precision of matrix products in the words of Triton."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def next_two(n: int) -> int:
    """Return the next power of two, which blocks of a kernel must be."""
    return 1 << max(n - 1, 0).bit_length()
