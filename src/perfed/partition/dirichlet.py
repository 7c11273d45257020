"""Uneven classes and sizes: every class is shared out by proportions from Dir(alpha), as MOON and PGFed do it."""

from __future__ import annotations

import numpy as np

from perfed.config import DataConfig
from perfed.core.errors import Problem
from perfed.datasets.pool import Pool

ATTEMPTS = 200


def rows(pool: Pool, config: DataConfig, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw until every client has data.min_samples; a small alpha with many clients may have no such draw."""
    clients, least, total = config.clients, config.min_samples, len(pool.y)
    if clients * least > total:
        raise Problem(
            f"{clients} clients with at least {least} samples each need {clients * least} samples, but there are "
            f"{total}: lower data.clients or data.min_samples"
        )
    members = [np.flatnonzero(pool.y == c) for c in range(pool.classes)]
    sizes = np.array([len(m) for m in members])
    for _ in range(ATTEMPTS):
        cuts = _draw(sizes, clients, config.alpha, rng)
        if cuts is not None and np.diff(cuts, axis=1).sum(axis=0).min() >= least:
            dealt = [np.split(rng.permutation(m), cut[1:-1]) for m, cut in zip(members, cuts, strict=True)]
            return [np.sort(np.concatenate(pieces)) for pieces in zip(*dealt, strict=True)]
    raise Problem(
        f"no Dirichlet({config.alpha:g}) draw in {ATTEMPTS} gave each of {clients} clients at least {least} samples: "
        "raise data.alpha, or lower data.clients or data.min_samples"
    )


def _draw(sizes: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray | None:
    """Where to cut each class, [classes, clients + 1]; None when only full clients drew a share of some class."""
    held = np.zeros(clients, dtype=np.int64)
    cuts = np.zeros((len(sizes), clients + 1), dtype=np.int64)
    for c, size in enumerate(sizes):
        share = rng.dirichlet(np.full(clients, alpha))
        share = np.where(held < sizes.sum() / clients, share, 0.0)  # a client with its fair part gets no more
        if share.sum() <= 0:
            return None
        cuts[c, 1:] = np.cumsum(share / share.sum()) * size
        cuts[c, np.flatnonzero(share)[-1] + 1 :] = size  # a sample lost by rounding must not go to a full client
        held += np.diff(cuts[c])
    return cuts
