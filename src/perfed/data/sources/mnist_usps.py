"""MNIST and USPS: MNIST, and USPS enlarged to 28x28 pixels: one task from two sources, which are its domains."""

from __future__ import annotations

import numpy as np

from perfed.data.config import DataConfig
from perfed.data.images import moments
from perfed.data.pool import TRAIN, Pool
from perfed.data.sources import mnist, usps

USUAL_PARTITION = "domains"


def load(config: DataConfig, seed: int) -> Pool:
    """Read images uint8 [rows, 1, 28, 28], those of USPS enlarged; their source is who they come from."""
    pools = {"mnist": mnist.load(config, seed), "usps": usps.load(config, seed)}
    side = pools["mnist"].x.shape[-1]
    x = np.concatenate([resized(pool.x, side) for pool in pools.values()])
    y = np.concatenate([pool.y for pool in pools.values()])
    owner = np.repeat(np.arange(len(pools)), [len(pool.y) for pool in pools.values()])
    official = np.concatenate([np.asarray(pool.official) for pool in pools.values()])
    mean, std = moments(x[official == TRAIN])
    return Pool(x, y, classes=10, owner=owner, mean=mean, std=std, names=tuple(pools), official=official)


def resized(x: np.ndarray, side: int) -> np.ndarray:
    """Return square images in another size, bilinear, as bytes."""
    if x.shape[-2:] == (side, side):
        return x
    import torch  # here, because lists of data sets do without

    pixels = torch.from_numpy(x).float()
    larger = torch.nn.functional.interpolate(pixels, size=(side, side), mode="bilinear", align_corners=False)
    return larger.round().to(torch.uint8).numpy()
