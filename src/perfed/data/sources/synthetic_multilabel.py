"""Synthetic multi-label data: 20 features, 5 labels of which a sample has any number; every client has its own model.

Made of the seed alone. Client i has its own linear model and its own inputs, where a = data.synthetic_a says how much
the models differ and b = data.synthetic_b how much the inputs do:

W_i = W + a U_i, v_i ~ N(0, b^2), x ~ N(v_i, 1); a sample has label j if (W_i x)_j / sqrt(20) + c_j + noise > 0.
W, U_i ~ N(0, 1), noise ~ N(0, 0.3^2) are drawn per entry; c = 0.5, 0.25, 0, -0.5, -1 makes labels frequent and rare.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.pool import Pool

ONLY_PARTITION = "natural"
FEATURES, NOISE = 20, 0.3
SHIFTS = np.array([0.5, 0.25, 0.0, -0.5, -1.0])
FEWEST, MOST = 60, 200  # samples of a client, where nobody says how many
_SYNTHETIC = 10  # the random stream of this purpose


def load(config: DataConfig, seed: int) -> Pool:
    """Draw data.clients natural clients of FEWEST to MOST samples, or of data.synthetic_samples."""
    clients = config.clients
    if clients == 0:
        raise Problem(f"data.clients must be at least 1: '{config.name}' makes as many clients as you ask for")
    rng = np.random.default_rng([seed, _SYNTHETIC])
    sizes = rng.integers(FEWEST, MOST, clients, endpoint=True)
    if config.synthetic_samples:
        sizes = np.full(clients, config.synthetic_samples)
    shared = rng.standard_normal((FEATURES, len(SHIFTS)))
    xs, ys = [], []
    for size in sizes:
        own = shared + config.synthetic_a * rng.standard_normal(shared.shape)
        x = config.synthetic_b * rng.standard_normal(FEATURES) + rng.standard_normal((size, FEATURES))
        scores = x @ own / np.sqrt(FEATURES) + SHIFTS + NOISE * rng.standard_normal((size, len(SHIFTS)))
        xs.append(x.astype(np.float32))
        ys.append((scores > 0).astype(np.float32))
    owner = np.repeat(np.arange(clients), sizes)
    return Pool(np.concatenate(xs), np.concatenate(ys), classes=len(SHIFTS), owner=owner, task="multilabel")
