"""Shakespeare: the next character of what a role says; roles of all 37 plays are the clients.

A sample is data.sequence characters of a role's lines, its targets are the characters that follow each of them. Samples
of a role do not overlap; what its last one lacks is filled and not scored. Roles below data.min_samples are left out.
LEAF (Caldas et al., 2018) has the same task from another edition, with one target for every 80 characters.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from perfed.core.errors import Problem
from perfed.core.task import IGNORED
from perfed.data.config import DataConfig
from perfed.data.npz import need
from perfed.data.pool import Pool, read_file

ONLY_PARTITION = "natural"


def load(config: DataConfig, _seed: int) -> Pool:
    """Read tokens int64 [rows, data.sequence]: places in the alphabet of all plays."""
    arrays, path = read_file(
        config,
        "shakespeare_roles.npz",
        "arrays text (bytes), offsets, role_names, role_play, play_titles",
        "the plays in https://github.com/CodyCahoon/Shapespeare",
    )
    names = ("text", "offsets", "role_names", "role_play", "play_titles")
    text, offsets, roles, play, titles = need(arrays, names, path)
    letters, tokens = np.unique(text, return_inverse=True)
    xs, ys, owners = [], [], []
    for role, (first, end) in enumerate(pairwise(offsets)):
        x, y = windows(tokens[first:end], config.sequence)
        if len(x) >= config.min_samples:
            xs.append(x)
            ys.append(y)
            owners.append(role)
    if not owners:
        raise Problem(f"no role has data.min_samples = {config.min_samples} samples of {config.sequence} characters")
    return Pool(
        np.concatenate(xs),
        np.concatenate(ys),
        classes=len(letters),
        owner=np.repeat(np.arange(len(owners)), [len(x) for x in xs]),
        names=tuple(f"{roles[role]} ({titles[play[role]]})" for role in owners),
        labels=tuple(chr(letter) for letter in letters),
        task="next_token",
    )


def windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text into samples [n, length] that follow one another, and the next token for each of theirs.

    >>> windows(np.array([5, 6, 7, 8]), 2)[1].tolist()
    [[6, 7], [8, -100]]
    """
    rows = -(-(len(tokens) - 1) // length) if len(tokens) > 1 else 0
    x, y = np.zeros(rows * length, dtype=np.int64), np.full(rows * length, IGNORED, dtype=np.int64)
    x[: len(tokens) - 1], y[: len(tokens) - 1] = tokens[:-1][: len(x)], tokens[1:]
    return x.reshape(rows, length), y.reshape(rows, length)
