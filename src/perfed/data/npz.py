"""Reading .npz files without ever running what is in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perfed.core.errors import Problem


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file; a file that is damaged or holds pickled objects is a Problem."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except Exception as error:  # a damaged archive raises almost anything: zip, zlib, lzma, header or memory errors
        if "pickle" in str(error):  # numpy's own text advises to allow it; we do not
            raise Problem(f"{path} holds pickled Python objects, which could run code and are never opened") from None
        raise Problem(f"{path} cannot be read as .npz ({type(error).__name__}); is it damaged?") from None


def need(arrays: dict[str, np.ndarray], keys: tuple[str, ...], where: object) -> list[np.ndarray]:
    """Return the named arrays in order; a missing array is a Problem."""
    for key in keys:
        if key not in arrays:
            raise Problem(f"{where} has no array '{key}' (it has: {', '.join(sorted(arrays)) or 'nothing'})")
    return [arrays[key] for key in keys]
