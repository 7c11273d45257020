"""Digits: 1,797 handwritten digits of 8x8 pixels, part of scikit-learn: no download.

Alpaydin and Kaynak (1998).
"""

from __future__ import annotations

import numpy as np

from perfed.data.config import DataConfig
from perfed.data.pool import Pool


def load(_config: DataConfig, _seed: int) -> Pool:
    """Return images [1, 8, 8]; grey values 0 to 16 become 0 to 1."""
    from sklearn.datasets import load_digits  # slow to import

    x, y = load_digits(return_X_y=True)
    x = np.asarray(x, dtype=np.float32).reshape(-1, 1, 8, 8) / 16
    return Pool(x, np.asarray(y, dtype=np.int64), classes=10)
