"""Images of the user's own files: which axis holds the channels; networks want [n, channels, height, width]."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from perfed.core.errors import Problem
from perfed.data.table import Table

USUAL = (1, 3, 4)  # grey, colours, colours with transparency


def channels_first(tables: Sequence[Table], where: str) -> tuple[list[Table], list[str]]:
    """Bring images into the form [n, channels, height, width].

    Args:
        tables: the samples of all clients; what has no three axes is no image and stays as it is.
        where: 'first' or 'last'; 'auto': as the images' shapes say.

    Returns:
        The tables, and what was done, in sentences.
    """
    turned = [table.x.ndim == 4 and _is_last(table, where) for table in tables]
    if not any(turned):
        return list(tables), []
    shape = tables[turned.index(True)].x.shape
    notice = f"images {list(shape[1:])} have their channels last: they are read as {[shape[3], *shape[1:3]]}"
    move = lambda table: dataclasses.replace(table, x=np.ascontiguousarray(np.moveaxis(table.x, 3, 1)))
    return [move(table) if last else table for table, last in zip(tables, turned, strict=True)], [notice]


def _is_last(table: Table, where: str) -> bool:
    """Return True if images have their channels in the last axis; a shape that does not say it is a Problem.

    Channels are 1, 3 or 4. Where both outer axes may be they, or the first cannot be, images are likely to be square.
    """
    if where != "auto":
        return where == "last"
    first, middle, last = table.x.shape[1:]
    square_first, square_last = middle == last, first == middle
    if (first in USUAL) != (last in USUAL):
        return last in USUAL
    if first in USUAL and square_first != square_last:
        return square_last
    if first not in USUAL and (square_first or not square_last):
        return False
    raise Problem(
        f"client '{table.client}' ({table.file.name}): images of shape {[first, middle, last]} may have {first} "
        f"channels of {middle}x{last}, or {last} channels of {first}x{middle}: say it with --channels first or last"
    )
