"""The shapes of images, for networks that depend on them."""

from __future__ import annotations

from perfed.core.errors import Problem


def image(shape: tuple[int, ...], name: str, least: int) -> tuple[int, int, int]:
    """Return channels, height and width of a sample; refuse what is no image or too small."""
    if len(shape) != 3:
        raise Problem(f"model.name '{name}' needs images [channels, height, width], but a sample has shape {shape}")
    channels, height, width = shape
    if min(height, width) < least:
        raise Problem(f"model.name '{name}' needs images of at least {least}x{least} pixels, not {height}x{width}")
    return channels, height, width


def after_two_convolutions(height: int, width: int) -> int:
    """Count the pixels left by two rounds of a 5x5 convolution without padding and 2x2 pooling.

    >>> after_two_convolutions(32, 32)
    25
    """
    left = lambda size: ((size - 4) // 2 - 4) // 2
    return left(height) * left(width)
