"""Diabetes: 442 patients, 10 measurements each; the number to predict is how far the disease has gone a year later.

Efron et al., "Least angle regression" (2004); part of scikit-learn: no download. The target goes from 25 to 346.
"""

from __future__ import annotations

import numpy as np

from perfed.data.config import DataConfig
from perfed.data.pool import Pool

USUAL_NORMALISE = "federated"
COLUMNS = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def load(_config: DataConfig, _seed: int) -> Pool:
    """Return measurements in their own units."""
    from sklearn.datasets import load_diabetes  # slow to import

    x, y = load_diabetes(return_X_y=True, scaled=False)
    x, y = np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.float64)[:, None]
    return Pool(x, y, classes=1, labels=("progression",), columns=COLUMNS, task="regression")
