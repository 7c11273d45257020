"""MNIST and USPS: the same ten digits from two sources, which are two domains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfed.data.pool import TRAIN, Pool
from perfed.data.sources import images
from perfed.training.config import DataConfig

DOMAINS = ("mnist", "usps")


def load(config: DataConfig, seed: int) -> Pool:
    """Images uint8 [n, 1, 28, 28], those of USPS enlarged; their source is who they come from."""
    pools = [images.load(replace(config, name=name), seed) for name in DOMAINS]
    side = pools[0].x.shape[-1]
    x = np.concatenate([resized(pool.x, side) for pool in pools])
    owner = np.repeat(np.arange(len(pools)), [len(pool.y) for pool in pools])
    official = np.concatenate([np.asarray(pool.official) for pool in pools])
    mean, std = images.moments(x[official == TRAIN])
    y = np.concatenate([pool.y for pool in pools])
    return Pool(x, y, pools[0].classes, owner=owner, mean=mean, std=std, names=DOMAINS, official=official)


def resized(x: np.ndarray, side: int) -> np.ndarray:
    """Square images of another size, bilinear, as bytes."""
    if x.shape[-2:] == (side, side):
        return x
    import torch

    pixels = torch.from_numpy(x).float()
    found = torch.nn.functional.interpolate(pixels, size=(side, side), mode="bilinear", align_corners=False)
    return found.round().to(torch.uint8).numpy()
