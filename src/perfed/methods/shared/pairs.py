"""A number for each pair of clients: a matrix where that is small, else a table of the pairs that were ever set.

A table grows with what cohorts touch, by 12 bytes for each pair that is set for the first time; a matrix of 100,000
clients would take 40 GB from the start. Numbers are the same in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

MATRIX = 1000  # clients up to which there is a matrix, of at most 4 MB
OTHERS = torch.iinfo(torch.int64).max  # the last entry of a table: it stands for all pairs that were never set

Pairs = Tensor | dict[str, Tensor]  # a matrix; or pairs, ascending, and their numbers


def all_pairs(clients: int, number: Tensor) -> Pairs:
    """Give every pair the same number.

    Args:
        clients: how many there are.
        number: a tensor without axes.
    """
    if clients <= MATRIX:
        return number.repeat(clients, clients)
    return {"pairs": torch.full((1,), OTHERS, device=number.device), "numbers": number.view(1)}


def read_pairs(table: Pairs, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the numbers of some clients with some others.

    Args:
        table: what `all_pairs` or `write_pairs` returned.
        rows: clients [m].
        columns: clients [k]; what -1 gives means nothing.

    Returns:
        [m, k].
    """
    if isinstance(table, Tensor):
        return table[rows][:, columns.clamp_min(0)]
    wanted = _keys(rows, columns)
    place = torch.searchsorted(table["pairs"], wanted)
    return table["numbers"][torch.where(table["pairs"][place] == wanted, place, -1)]


def write_pairs(table: Pairs, rows: Tensor, columns: Tensor, numbers: Tensor) -> Pairs:
    """Set the numbers of some clients with some others.

    Args:
        table: what `all_pairs` or `write_pairs` returned; it stays as it is.
        rows: clients [m].
        columns: clients [k].
        numbers: [m, k].

    Returns:
        The new table.
    """
    if isinstance(table, Tensor):
        return table.index_put((rows[:, None], columns), numbers)
    before = len(table["pairs"])
    pairs, place = torch.cat([table["pairs"], _keys(rows, columns).flatten()]).unique(return_inverse=True)
    merged = numbers.new_empty(len(pairs))
    merged[place[:before]] = table["numbers"]
    merged[place[before:]] = numbers.flatten()
    return {"pairs": pairs, "numbers": merged}


def _keys(rows: Tensor, columns: Tensor) -> Tensor:
    return rows[:, None] << 32 | columns
