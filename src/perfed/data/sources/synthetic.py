"""Synthetic data: Synthetic(a, b): 60 features, 10 classes, as many clients as you ask for, each with its own model.

Li et al., "Federated optimization in heterogeneous networks" (2020), as pFedMe draws it. Client i has its own linear
model and its own inputs:

u ~ N(0, a), W ~ N(u, 1), c ~ N(u, 1);  B ~ N(0, b), v ~ N(B, 1), x ~ N(v, diag(j^-1.2));  y = argmax(Wx + c).
The second number of each N is a standard deviation, except for x, where it is the covariance.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.config import DataConfig
from perfed.data.pool import Pool

ONLY_PARTITION = "natural"
FEATURES, CLASSES = 60, 10
LARGEST = 10_000  # samples per client; log-normal sizes have no limit, and about 4 clients in 100 would pass this
_SYNTHETIC = 3  # the random stream of this purpose


def load(config: DataConfig, seed: int) -> Pool:
    """Draw data.clients natural clients of (int(logN(4, 2)) + 50) * 5 samples, at most LARGEST, or all of one size."""
    clients = config.clients
    if clients == 0:
        raise Problem("data.clients must be at least 1 for 'synthetic', which makes as many clients as you ask for")
    rng = np.random.default_rng([seed, _SYNTHETIC])
    sizes = np.minimum((rng.lognormal(4, 2, clients).astype(np.int64) + 50) * 5, LARGEST)
    if config.synthetic_samples:
        sizes = np.full(clients, config.synthetic_samples)
    u, shift = rng.normal(0, config.synthetic_a, clients), rng.normal(0, config.synthetic_b, clients)
    spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    xs, ys = [], []
    for client, size in enumerate(sizes):
        centre = rng.normal(shift[client], 1, FEATURES)
        weight, bias = rng.normal(u[client], 1, (FEATURES, CLASSES)), rng.normal(u[client], 1, CLASSES)
        x = centre + spread * rng.standard_normal((size, FEATURES))
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weight + bias, axis=1))
    owner = np.repeat(np.arange(clients), sizes)
    return Pool(np.concatenate(xs), np.concatenate(ys).astype(np.int64), CLASSES, owner=owner)
