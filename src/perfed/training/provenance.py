"""Where a number comes from: the sources' commit and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path


def commit() -> str:
    """Return the commit these sources are from, with a + where files differ from it; empty for an installed package.

    $PERFED_COMMIT goes first: sources that were copied without their history cannot know it themselves.
    """
    if told := os.environ.get("PERFED_COMMIT", "").strip():
        return told

    def git(*words: str) -> str:
        try:
            here = str(Path(__file__).parent)
            done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return commit + ("+" if commit and git("status", "--porcelain", "--untracked-files=no", "--", ".") else "")


def hardware(device: str) -> str:
    """Return the GPU's name where a GPU is used, else the machine's kind and its cores."""
    import torch

    from perfed.engines.workers import cores

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} with {cores()} cores"


def together(texts: Iterable[str]) -> str:
    """Join commits or machines to a text that names each once; a text may name several itself."""
    return "; ".join(dict.fromkeys(name for text in texts for name in text.split("; ") if name))
