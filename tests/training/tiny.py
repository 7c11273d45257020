"""A run so small that a test can have hundreds: three hospitals' tables, Local and FedAvg, four rounds."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from perfed import api
from perfed.federation.federation import Federation
from perfed.training.config import from_dict

QUIET = Console(quiet=True)
NET = "from torch import nn\n\n\ndef net():\n    return nn.Linear(4, 2)\n"
METHOD = "from dataclasses import dataclass\n\nfrom perfed.methods.fedavg import FedAvg\n\n\n"
METHOD += "@dataclass(frozen=True)\nclass Mine(FedAvg):\n    pass\n"


def write_clients(folder):
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        x = draw.integers(0, 200, size=(60, 4))
        np.savez(folder / f"{name}.npz", x=(x * 0.01).astype("float32"), y=(x[:, 0] > 100).astype(int))


def settings(home, **more):
    """The configuration of a run with a method and a network of the user's own; files are beside the data."""
    (home / "mine.py").write_text(METHOD)
    (home / "net.py").write_text(NET)
    raw = {"data": {"name": "folder", "dir": str(home / "data")}, "methods": ["local", str(home / "mine.py")]}
    raw |= {"model": {"name": f"{home / 'net.py'}:net"}, "train": {"epochs": 1, "lr": 0.01}}
    return raw | {"run": {"rounds": 4, "engine": "sequential", "checkpoint_every": 1, **more}}


def make(home):
    """Make `finished`, a run that has ended, and `stopped`, the same interrupted in its last method's last round."""
    write_clients(home / "data")
    config = from_dict(settings(home))
    api.start(config, home / "finished", QUIET)
    begin = Federation.begin

    def stops(self, *args):
        if type(self.method).__name__ == "Mine" and self.round == 3:
            raise KeyboardInterrupt
        return begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "begin", stops)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, home / "stopped", QUIET)
    return home


def copied(home: Path, kind: str, to: Path) -> Path:
    """Return a copy of one of the two runs."""
    return Path(shutil.copytree(home / kind, to, symlinks=True))


def contents(folder):
    """Every file in a folder, what it holds, and where links lead."""
    every = sorted(folder.rglob("*"))
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in every
        if path.is_symlink() or path.is_file()
    }
