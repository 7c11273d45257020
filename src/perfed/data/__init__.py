"""Where data come from: one file per source. Importing this needs neither torch nor the data."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.errors import Problem, nearest
from perfed.data.official import in_parts
from perfed.data.pool import normalised
from perfed.data.schemes import partition, scheme
from perfed.data.skew import angles
from perfed.training.config import DataConfig

if TYPE_CHECKING:
    from perfed.core.clients import Clients

DATASETS: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, part of scikit-learn: no download",
    "synthetic": "Synthetic(a, b): 60 features, 10 classes, as many clients as you ask for, each with its own model",
    "mnist": "70,000 handwritten digits of 28x28 pixels; where the file names writers, they can be the clients",
    "fashion-mnist": "70,000 pictures of clothes of 28x28 pixels, 10 classes",
    "usps": "9,298 handwritten digits of 16x16 pixels",
    "mnist-usps": "MNIST, and USPS enlarged to 28x28 pixels: one task from two sources, which are its domains",
    "cifar10": "60,000 colour pictures of 32x32 pixels, 10 classes",
    "cifar100": "60,000 colour pictures of 32x32 pixels, 100 classes",
    "har": "30 people with a phone at the belt: 9 sensor channels, 128 time steps, 6 activities",
    "folder": "your own files in --data-dir: one .npz or .csv per client, or one .csv with a client column",
}
_FILE = dict.fromkeys(("mnist", "fashion-mnist", "usps", "cifar10", "cifar100"), "images") | {"mnist-usps": "domains"}


def load(config: DataConfig, seed: int) -> Clients:
    """The clients that `config` describes. The same seed gives the same clients, row by row."""
    check(config)
    source = importlib.import_module(f"perfed.data.sources.{_FILE.get(config.name, config.name)}")
    pool = normalised(source.load(config, seed), config)
    if config.split == "official":
        pool = in_parts(pool, config, seed)
    from perfed.data.split import assemble  # imports torch

    return assemble(pool, partition(pool, config, seed), config, seed)


def check(config: DataConfig) -> None:
    """Refuse what can be refused without reading a file."""
    if config.name not in DATASETS:
        raise Problem(f"data.name: there is no data set '{config.name}'{nearest(config.name, DATASETS)}")
    if config.split == "client" and config.test + config.val >= 1:
        raise Problem(
            f"data.test + data.val must be below 1 to leave training samples, not {config.test:g} + {config.val:g}"
        )
    name = scheme(config)
    if config.split == "official" and name == "natural":
        raise Problem("data.split 'official' does not go with natural clients, whose samples may all lie in one part")
    if config.share_low > config.share_high:
        raise Problem(f"data.share_low {config.share_low:g} must not be above data.share_high {config.share_high:g}")
    angles(config)
    if config.name == "folder" and config.dir is None:
        raise Problem("data set 'folder' needs --data-dir: the folder with one file per client, or one table")
    if config.dir is not None and not Path(config.dir).expanduser().exists():
        raise Problem(f"data.dir: there is no folder '{config.dir}'")
