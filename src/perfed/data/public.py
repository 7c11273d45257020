"""Public samples: held out before the partition, or of another data set; nobody's test sample is among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from perfed.core.clients import Clients, Split
from perfed.core.errors import Problem, nearest
from perfed.data.catalog import check, datasets, public_folder, scheme
from perfed.data.config import DataConfig
from perfed.data.normalise import choose
from perfed.data.pool import TEST, TRAIN, UNDECIDED, Pool, checked, label_tensor, spread
from perfed.data.preparation import Preparation
from perfed.data.records import Records
from perfed.data.table import is_one_client
from perfed.discover import load_member
from perfed.engines.public import UNKNOWN

_PUBLIC = 10  # the random stream of this purpose


def held_out(pool: Pool, config: DataConfig, seed: int) -> np.ndarray:
    """Choose the rows that are public and become no client's, with the same share of every class.

    Where rows have owners that stay clients, every owner gives its share; rows of one unit stay together.

    Args:
        pool: all samples.
        config: how many, and the partition.
        seed: what they are drawn from.

    Returns:
        The rows in increasing order, all of which could have been trained on; none where nothing is asked for.
    """
    if not config.public or config.public_data:
        return np.empty(0, dtype=np.int64)
    if choose(pool, config) == "local":
        raise Problem(
            "data.normalise 'local' gives every client a scale of its own, and public samples need one: federated"
        )
    able = np.arange(len(pool.y)) if pool.part is None else np.flatnonzero(np.isin(pool.part, (TRAIN, UNDECIDED)))
    owner = pool.owner[able] if pool.owner is not None and scheme(config) in ("natural", "domains") else 0 * able
    unit = able if pool.unit is None else pool.unit[able]
    _, first, piece = np.unique(unit, return_index=True, return_inverse=True)
    count = _count(config, len(able), len(first))
    rng = np.random.default_rng([seed, _PUBLIC])
    shuffled = rng.permutation(len(first))
    label, owner = pool.stratum[able][first], owner[first]
    order = shuffled[np.lexsort((label[shuffled], owner[shuffled]))]
    chosen = np.zeros(len(first), dtype=bool)
    chosen[order[spread(len(order), count, rng)]] = True
    for mine in np.unique(owner):  # whoever would be left without anything keeps one
        if chosen[owner == mine].all():
            chosen[np.argmax(owner == mine)] = False
    return able[chosen[piece]]


def _count(config: DataConfig, rows: int, units: int) -> int:
    """Return how many units are public: a share of them, or what comes to so many rows."""
    share = config.public if config.public < 1 else config.public / rows
    if share >= 1:
        raise Problem(f"data.public is {config.public:g}, but there are only {rows} samples that could be trained on")
    return max(1, int(units * share + 0.5))


def from_elsewhere(config: DataConfig, seed: int, clients: Clients) -> Clients:
    """Return the clients with public samples of another data set, prepared as theirs are.

    Args:
        config: names it.
        seed: what samples are drawn from, where not all are wanted.
        clients: the clients, whose test and validation samples are left out.
    """
    name, other = config.public_data, _elsewhere(config)
    pool = checked(load_member("perfed.data.sources", other.name).load(other, seed), other.name)
    able = np.ones(len(pool.y), dtype=bool) if pool.part is None else pool.part != TEST
    able = np.flatnonzero(able if pool.official is None else able & (pool.official != TEST))
    x = _prepared(pool, able, clients, name)
    measured = {row.tobytes() for split in (clients.test, clients.val) for row in split.x.numpy()}
    unseen = np.array([row.tobytes() not in measured for row in x], dtype=bool)
    same = len(x) - unseen.sum()
    x, able = x[unseen], able[unseen]
    if not len(x):
        raise Problem(f"data.public_data: every sample of '{name}' is one that a client is tested or validated on")
    if config.public:
        count = int(len(able) * config.public + 0.5) if config.public < 1 else int(config.public)
        if not 1 <= count <= len(able):
            raise Problem(
                f"data.public asks for {count} samples, and '{name}' has {len(able)} that are not for testing"
            )
        places = np.random.default_rng([seed, _PUBLIC]).permutation(len(able))
        places = places[np.argsort(pool.stratum[able[places]], kind="stable")]
        places = np.sort(places[spread(len(able), count, np.random.default_rng([seed, _PUBLIC, 1]))])
        x, able = x[places], able[places]
    classes = pool.task == clients.task.kind == "classification"  # targets have units that nobody knows
    known = classes and pool.labels is not None and pool.labels == clients.labels  # numbers alone may mean anything
    y = pool.y[able] if known else np.full_like(pool.y[able], UNKNOWN)
    public = Split(torch.from_numpy(x), label_tensor(y), (len(able),), labelled=known)
    told = f"{len(able):,} samples of '{name}' are public: known to the server, and no client's"
    told += f"; {same:,} more are left out, as clients are tested or validated on the same" if same else ""
    told += "" if known else "; their labels are not known to be those of the clients, so they have none"
    return replace(clients, public=public, notices=(*clients.notices, told))


def _elsewhere(config: DataConfig) -> DataConfig:
    """Return what reads the data set that public samples are from; one that the clients are from is refused."""
    name = config.public_data
    other = replace(config, name=name, public=0.0, public_data="", partition="", split="client")
    folder = public_folder(config)
    if folder is not None:
        other = replace(other, name="folder", dir=str(folder))
        other = replace(other, client_column="") if is_one_client(other) else other
    elif other.name not in datasets():
        raise Problem(f"data.public_data: there is no data set '{name}', and no folder{nearest(name, datasets())}")
    else:
        other = replace(other, labels="", channels="auto")
    check(other)
    own = config.dir and Path(config.dir).expanduser().resolve()
    if other.name == config.name and (folder is None or folder == own):
        raise Problem(
            f"data.public_data: the clients are from '{name}' themselves, so their test samples would be public: "
            "data.public alone holds some of the others out"
        )
    return other


def _prepared(pool: Pool, rows: np.ndarray, clients: Clients, name: str) -> np.ndarray:
    """Return samples in the form that those of the clients have."""
    x, shape, about = pool.x[rows], clients.shape, clients.preparation or {}
    if about.get("normalise") == "local":
        raise Problem(
            "data.normalise 'local' gives every client a scale of its own, and public samples need one: federated"
        )
    if "columns" in about:
        texts = pool.texts or (None,) * x.shape[1]
        shared = Preparation.of(about)
        values, _ = shared.align(Records(x.astype(np.float64), texts, pool.columns), f"data.public_data '{name}'")
        x = shared.apply(torch.from_numpy(values)).numpy()
    if (pool.task == "next_token") != (clients.task.kind == "next_token"):
        raise Problem(
            f"data.public_data: the task of '{name}' is {pool.task}, that of the clients {clients.task.kind}, and "
            "tokens go with tokens alone"
        )
    if pool.task == "next_token" and x.max() >= clients.task.outputs:
        raise Problem(
            f"data.public_data: '{name}' has the token {x.max()}, and the clients' go from 0 to "
            f"{clients.task.outputs - 1}"
        )
    image = clients.train.x.dtype == torch.uint8
    if x.shape[1:] != shape or (x.dtype == np.uint8) != image:
        kind = lambda bytes, shape: f"{'images of bytes' if bytes else 'numbers'} {list(shape)}"
        raise Problem(
            f"data.public_data: the samples of '{name}' are {kind(x.dtype == np.uint8, x.shape[1:])}, those of the "
            f"clients {kind(image, shape)}"
        )
    return np.ascontiguousarray(x if image or pool.task == "next_token" else x.astype(np.float32))
