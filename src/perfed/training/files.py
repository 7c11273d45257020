"""Files that are whole or not there: atomic writes, checksums, and trees of tensors without pickle."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from perfed.core.errors import Problem
from perfed.engines.trees import pack, unpack


def write(path: Path, content: bytes | str | Iterable[bytes]) -> None:
    """Replace a file in one step; after a crash at any moment the old or the new one is there, whole."""
    # Names of files need not be valid text: what has no UTF-8 form is written as an escape.
    content = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    pieces = [content] if isinstance(content, bytes) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise Problem(f"cannot write '{path}': {error.strerror}") from error
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until what was written to a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file: a line for each key, and for each element where a value is a list of objects.

    Not with json's own indentation: that is written in Python, which takes long where there are very many clients.
    """

    def lines(item: Any) -> str:
        if isinstance(item, list) and any(isinstance(element, dict) for element in item):
            return "[\n  " + ",\n  ".join(map(text, item)) + "\n ]"
        return text(item)

    text = lambda item: json.dumps(item, sort_keys=True)
    write(path, "{\n " + ",\n ".join(f"{text(key)}: {lines(value[key])}" for key in sorted(value)) + "\n}\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a damaged one is a Problem."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(f"there is no file '{path}'") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise Problem(f"'{path}' is damaged: not valid JSON") from None


def _digest(skeleton: str, tensors: list[Tensor]) -> str:
    total = hashlib.sha256(skeleton.encode())
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return total.hexdigest()


def tensor_file(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    """Return the bytes of a safetensors file, equal every time: safetensors itself writes metadata in any order."""
    content = save(tensors, about)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def save_tree(path: Path, tree: Any) -> None:
    """Write a tree of tensors and plain values, with a checksum."""
    skeleton, tensors = pack(tree)
    shapes = [list(t.shape) for t in tensors]
    tensors = [t.detach().cpu().contiguous().reshape(t.shape or (1,)) for t in tensors]
    text = json.dumps([skeleton, shapes])
    named = {str(number): tensor.clone() for number, tensor in enumerate(tensors)}
    write(path, tensor_file(named, {"tree": text, "sha256": _digest(text, tensors)}))


def load_tree(path: Path) -> Any:
    """Read what `save_tree` wrote; a file that is damaged, or something else, is a Problem."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # Each in memory of its own: inside the file's, alignment varies, and with it the last bits of products.
            tensors = [file.get_tensor(str(number)).clone() for number in range(len(file.keys()))]
        text = about["tree"]
        if about["sha256"] != _digest(text, tensors):
            raise Problem(f"'{path}' is damaged: its checksum does not fit")
        skeleton, shapes = json.loads(text)
        return unpack(skeleton, [t.reshape(shape) for t, shape in zip(tensors, shapes, strict=True)])
    except FileNotFoundError:
        raise Problem(f"there is no file '{path}'") from None
    except (SafetensorError, KeyError, ValueError, OSError, IndexError) as error:
        raise Problem(f"'{path}' is damaged or not a file of perfed ({type(error).__name__})") from None


def slug(name: str, taken: set[str]) -> str:
    """Make a safe, unique folder name of a client's name, which comes from outside and may be anything."""
    simple = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40].strip("_")
    reserved = re.fullmatch(r"(?i)con|prn|aux|nul|com\d|lpt\d", simple)
    if not simple or simple != name or reserved or simple.lower() in taken:
        unique = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
        simple = f"{simple or 'client'}_{unique}"
    if simple.lower() in taken:
        raise Problem(f"two clients are called '{name}'")
    taken.add(simple.lower())
    return simple


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a run folder; a second process is refused."""
    with (folder / ".lock").open("w") as file:
        try:
            # Not flock: worker processes would inherit that, and hold the folder of a run that was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Problem(f"another process is working in '{folder}'") from None
        yield


def long_enough(path: Path, size: int) -> None:
    """Refuse a log that has lost lines."""
    if size and (not path.exists() or path.stat().st_size < size):
        raise Problem(f"'{path}' is shorter than its checkpoint says: lines are missing")


def truncate(path: Path, size: int) -> None:
    """Cut a log back to what a checkpoint vouches for."""
    long_enough(path, size)
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(size)
