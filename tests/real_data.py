"""Where real data files are on this machine, if they are."""

import os
from pathlib import Path

import pytest


def real(file):
    """The folder with real data files, or a skip."""
    root = Path(__file__).resolve().parents[1]
    places = [Path(os.environ["PERFED_DATA"])] if "PERFED_DATA" in os.environ else []
    places += [root / "shared" / "data", root.parent / "shared" / "data"]
    for place in places:
        if (place / file).is_file():
            return str(place)
    return pytest.skip(f"{file} is in no data folder")
