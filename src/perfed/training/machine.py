"""What this machine has, for `perfed doctor`."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from perfed import __version__
from perfed.data.config import DataConfig
from perfed.data.pool import data_dir
from perfed.engines.workers import cores
from perfed.training.config import RunConfig
from perfed.training.engine import pick_device, pick_engine


def findings() -> dict[str, Any]:
    """Return versions, cores, GPU, disk, data, and the engine that `auto` would pick."""
    device = pick_device("auto")
    extras = {"datasets": _version("datasets"), "pillow": _version("pillow")}
    data = data_dir(DataConfig())
    free = shutil.disk_usage(Path.cwd()).free
    return {
        "perfed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "platform": platform.platform(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "engine": f"{pick_engine(RunConfig(), device, cohort=2)} on {device}",
        "disk": f"{free / 1e9:.0f} GB free here" + ("" if free > 1e9 else " (too little for larger runs)"),
        "data": f"{data}: " + (f"{len(list(data.glob('*.npz')))} npz files" if data.is_dir() else "not there yet"),
        "extras": {name: number or "not installed: pip install 'perfed[data]'" for name, number in extras.items()},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
