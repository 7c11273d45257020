"""Reading .npz and .npy files without ever running what is in them, and without more memory than they are given."""

from __future__ import annotations

import os
import zipfile
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from perfed.core.errors import Problem

LIMIT = "PERFED_NPZ_GB"  # how much a file may hold, where the usual bound is too low
USUAL_LIMIT = 10**9  # bytes of arrays that a file may hold, however small it is
UNPACKED = 10  # times its own size that a larger file may hold; samples seldom shrink more than that


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file; one that is damaged, holds pickled objects or too much is a Problem."""
    try:
        with path.open("rb") as file:
            if _is_pickle(file, path.stat().st_size):
                raise _pickled(path)
            with zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                arrays = {key: info for key, info in members.items() if info.filename.endswith(".npy")}
                sizes = []
                for info in arrays.values():
                    with archive.open(info) as member:  # of which the header alone is read
                        sizes.append(_declared(member, info.file_size, path))
                _refuse_too_much(sum(sizes), path)
                return {key: _read(archive.open(info)) for key, info in arrays.items()}
    except (Problem, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # a damaged archive raises almost anything: zip, zlib, lzma, header or memory errors
        raise Problem(f"{path} cannot be read as .npz ({type(error).__name__}); is it damaged?") from None


def read_npy(path: Path) -> np.ndarray:
    """Read the array of an .npy file; one that is damaged, holds pickled objects or too much is a Problem."""
    try:
        with path.open("rb") as file:
            if _is_pickle(file, path.stat().st_size):
                raise _pickled(path)
            _refuse_too_much(_declared(file, path.stat().st_size, path), path)
            file.seek(0)
            return _read(file)
    except (ValueError, EOFError, MemoryError, OverflowError):
        raise Problem(f"{path} cannot be read as .npy; is it damaged?") from None


def _read(file: IO[bytes]) -> np.ndarray:
    with file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _is_pickle(file: IO[bytes], size: int) -> bool:
    """Return True for what begins and ends as pickles do; numpy takes any file that is damaged for a pickle."""
    begin = file.read(2)
    file.seek(max(size - 1, 0))
    end = file.read(1)
    file.seek(0)
    return begin[:1] == b"\x80" and begin[1:] <= b"\x05" and end == b"."


def _declared(file: IO[bytes], size: int, path: Path) -> int:
    """Return the bytes of an array as its header declares them, and refuse objects and what cannot be there."""
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise _pickled(path)
    count = prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or count > size:
        raise ValueError("there are fewer numbers than the header says")
    return count


def _refuse_too_much(count: int, path: Path) -> None:
    """Refuse a small file that would fill the memory, before any of it is read."""
    asked = os.environ.get(LIMIT, "")
    try:
        limit = float(asked) * 1e9 if asked else max(USUAL_LIMIT, UNPACKED * path.stat().st_size)
    except ValueError:
        raise Problem(f"the environment variable {LIMIT} must be a number of gigabytes, not '{asked}'") from None
    if not count <= limit:
        raise Problem(
            f"{path} of {path.stat().st_size / 1e6:,.1f} MB declares {count / 1e9:,.1f} GB of arrays, and at most "
            f"{limit / 1e9:,.1f} GB are read: if it is meant to be so large, set {LIMIT} to more"
        )


def _pickled(path: Path) -> Problem:
    return Problem(f"{path} holds pickled Python objects, which could run code and are never opened")


def need(arrays: dict[str, np.ndarray], keys: tuple[str, ...], where: object) -> list[np.ndarray]:
    """Return the named arrays in order; a missing array is a Problem."""
    for key in keys:
        if key not in arrays:
            raise Problem(f"{where} has no array '{key}' (it has: {', '.join(sorted(arrays)) or 'nothing'})")
    return [arrays[key] for key in keys]
