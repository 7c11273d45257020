"""Synthetic(a, b) of Li et al., "Federated optimization in heterogeneous networks" (2020), as pFedMe draws it.

Client i has its own linear model and its own inputs:
u ~ N(0, a), W ~ N(u, 1), c ~ N(u, 1);  B ~ N(0, b), v ~ N(B, 1), x ~ N(v, diag(j^-1.2));  y = argmax(Wx + c).
The second number of each N is a standard deviation, except for x, where it is the covariance.
"""

from __future__ import annotations

import numpy as np

from perfed.core.errors import Problem
from perfed.data.pool import Pool
from perfed.training.config import DataConfig

FEATURES, CLASSES = 60, 10
LARGEST = 10_000  # samples per client; log-normal sizes have no limit, and about 4 clients in 100 would pass this
_SYNTHETIC = 3  # the random stream of this purpose


def load(config: DataConfig, seed: int) -> Pool:
    """`config.clients` natural clients of (int(logN(4, 2)) + 50) * 5 samples, at most LARGEST, or all of one size."""
    n = config.clients
    if n == 0:
        raise Problem("data.clients must be at least 1 for 'synthetic', which makes as many clients as you ask for")
    rng = np.random.default_rng([seed, _SYNTHETIC])
    sizes = np.minimum((rng.lognormal(4, 2, n).astype(np.int64) + 50) * 5, LARGEST)
    if config.synthetic_samples:
        sizes = np.full(n, config.synthetic_samples)
    u, shift = rng.normal(0, config.synthetic_a, n), rng.normal(0, config.synthetic_b, n)
    spread = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    xs, ys = [], []
    for i in range(n):
        centre = rng.normal(shift[i], 1, FEATURES)
        weight, bias = rng.normal(u[i], 1, (FEATURES, CLASSES)), rng.normal(u[i], 1, CLASSES)
        x = centre + spread * rng.standard_normal((sizes[i], FEATURES))
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ weight + bias, axis=1))
    owner = np.repeat(np.arange(n), sizes)
    return Pool(np.concatenate(xs), np.concatenate(ys).astype(np.int64), CLASSES, owner=owner)
