"""Files that are whole or not there: atomic writes, checksums, trees of tensors without pickle, and no links.

What lies in a run folder may come from anywhere. So every file in one is opened here, by a `Folder`: from the run
folder down, no symbolic link is followed, and nothing but a plain file is opened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from perfed.core.errors import Problem
from perfed.engines.trees import pack, unpack

MOST = 2**30  # bytes of a file that is read whole: what is larger is nothing that perfed has written
LONGEST = 2**26  # bytes of a line of a log
PIECE = 2**20  # bytes that are read at once where a file is only looked through


class Folder:
    """A folder, and all that is done to the files in it; paths are given whole.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Folder(Path(name))
        ...     folder.make(folder.root / "a")
        ...     digest = folder.write(folder.root / "a" / "b.txt", "text")
        ...     folder.read(folder.root / "a" / "b.txt"), folder.names(folder.root / "a"), digest[:6]
        (b'text', ['b.txt'], '982d9e')
    """

    def __init__(self, root: Path):
        """Name a folder; links that lead to it are the business of whoever names it.

        Args:
            root: the folder.
        """
        self.root = root

    # ------------------------------------------------------------------ the way to a file

    @contextlib.contextmanager
    def _parent(self, path: Path, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the folder that something lies in, opened, and its name there."""
        *parents, name = path.relative_to(self.root).parts or (".",)
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            here = self.root
            for part in parents:
                here /= part
                handle = self._enter(handle, here, make)
            yield handle, name
        finally:
            os.close(handle)

    def _enter(self, handle: int, path: Path, make: bool) -> int:
        """Open a folder inside an opened one, which is closed."""
        if path.name == "..":
            raise Problem(f"'{path}' leads out of '{self.root}'")
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path.name, dir_fd=handle)
            inside = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
        except OSError as error:
            raise self._reason(error, path, handle) from None
        os.close(handle)
        return inside

    def _reason(self, error: OSError, path: Path, handle: int) -> Exception:
        """Return what to raise where something cannot be opened."""
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(path.name, dir_fd=handle, follow_symlinks=False).st_mode):
                return Problem(f"'{path}' is a link, and nothing in a run folder is followed elsewhere: remove it")
        return Problem(f"cannot open '{path}': {error.strerror}")

    def _open(self, path: Path, flags: int) -> int:
        """Open a plain file that is there; with O_CREAT, make it."""
        with self._parent(path) as (parent, name):
            try:
                # Without O_NONBLOCK a pipe would be waited for.
                handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=parent)
            except OSError as error:
                raise self._reason(error, path, parent) from None
        about = os.fstat(handle)
        if stat.S_ISREG(about.st_mode) and (about.st_nlink == 1 or not flags & (os.O_WRONLY | os.O_RDWR)):
            return handle
        os.close(handle)
        if stat.S_ISREG(about.st_mode):
            raise Problem(f"'{path}' has another name elsewhere (a hard link), where a change would be seen: copy it")
        raise Problem(f"'{path}' is not a plain file")

    def open(self, path: Path) -> BinaryIO:
        """Open a file to read it; FileNotFoundError where it is not there."""
        return os.fdopen(self._open(path, os.O_RDONLY), "rb")

    # ------------------------------------------------------------------ looking

    def size(self, path: Path) -> int | None:
        """Return a plain file's size; None where it is not there."""
        try:
            with self.open(path) as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    def changed(self, path: Path) -> int:
        """Return when a file was changed last, in nanoseconds."""
        with self.open(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def exists(self, path: Path) -> bool:
        """Tell if a plain file is there."""
        return self.size(path) is not None

    def has_folder(self, path: Path) -> bool:
        """Tell if a folder is there."""
        try:
            with self._parent(path / "any"):
                return True
        except FileNotFoundError:
            return False

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; a folder that is not there has none."""
        try:
            with self._parent(path / "any") as (handle, _):
                return sorted(os.listdir(handle))  # noqa: PTH208 (a handle has no path)
        except FileNotFoundError:
            return []

    # ------------------------------------------------------------------ reading

    def read(self, path: Path) -> bytes:
        """Read a whole file; one that is missing, or far too large, is a Problem."""
        try:
            with self.open(path) as file:
                if os.fstat(file.fileno()).st_size > MOST:
                    raise Problem(f"'{path}' is damaged: it is larger than {MOST:,} bytes")
                return file.read()
        except FileNotFoundError:
            raise Problem(f"there is no file '{path}'") from None

    def text(self, path: Path) -> str:
        """Read a file of text."""
        return _decoded(self.read(path), f"'{path}'")

    def read_json(self, path: Path, form: Any = dict) -> Any:
        """Read a JSON file; a damaged one is a Problem.

        Args:
            path: the file.
            form: what it has to look like, as `refuse_form` takes it.

        Returns:
            What it holds.
        """
        value = parse_json(self.text(path), f"'{path}'")
        refuse_form(value, form, f"'{path}'")
        return value

    def read_lines(self, path: Path, form: Any = dict) -> list[dict[str, Any]]:
        """Read a log: a JSON object in each line; a log that is not there has no lines.

        Args:
            path: the file.
            form: what each line has to look like, as `refuse_form` takes it.

        Returns:
            The objects.
        """
        lines = []
        with contextlib.suppress(FileNotFoundError), self.open(path) as file:
            for number, content in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
                where = f"'{path}', line {number},"
                if len(content) == LONGEST:
                    raise Problem(f"{where} is damaged: it is longer than {LONGEST:,} bytes")
                lines.append(parse_json(_decoded(content, where), where))
                refuse_form(lines[-1], form, where)
        return lines

    def digest(self, path: Path, size: int | None = None) -> Any:
        """Return the SHA-256 of a file, or of its first bytes, as hashlib has it, so that more can be added."""
        total, left = hashlib.sha256(), -1 if size is None else size
        with self.open(path) as file:
            while piece := file.read(PIECE if left < 0 else min(left, PIECE)):
                total.update(piece)
                left -= len(piece) if left > 0 else 0
        return total

    # ------------------------------------------------------------------ writing

    def make(self, path: Path) -> None:
        """Make a folder, and those above it."""
        with self._parent(path / "any", make=True):
            pass

    def write(self, path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> str:
        """Replace a file in one step; after a crash at any moment the old or the new one is there, whole.

        Args:
            path: the file.
            content: what it holds; text that has no UTF-8 form, as names of files may, is written as an escape.

        Returns:
            The SHA-256 of what was written.
        """
        content = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        total = hashlib.sha256()
        try:
            with self._parent(path) as (parent, name):
                temporary = f".{name}.tmp"
                try:
                    with contextlib.suppress(FileNotFoundError):  # a crash left it, or somebody put a link there
                        os.unlink(temporary, dir_fd=parent)
                    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=parent)
                    with os.fdopen(handle, "wb") as file:
                        for piece in [content] if isinstance(content, bytes) else content:
                            file.write(piece)
                            total.update(piece)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=parent)
                    raise
                os.fsync(parent)
        except OSError as error:
            raise Problem(f"cannot write '{path}': {error.strerror}") from error
        return total.hexdigest()

    def write_json(self, path: Path, value: dict[str, Any]) -> str:
        """Write a JSON file; returns the SHA-256 of what was written."""
        return self.write(path, json_text(value))

    def append(self, path: Path, content: bytes) -> None:
        """Append to a log, which is made where it is not there."""
        with os.fdopen(self._open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(content)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a log back to what a checkpoint vouches for."""
        self.refuse_short(path, size)
        with contextlib.suppress(FileNotFoundError), os.fdopen(self._open(path, os.O_RDWR), "r+b") as file:
            file.truncate(size)

    def refuse_short(self, path: Path, size: int) -> None:
        """Refuse a log that has lost lines."""
        if size and (self.size(path) or 0) < size:
            raise Problem(f"'{path}' is shorter than its checkpoint says: lines are missing")

    def sync(self, path: Path) -> None:
        """Wait until what was written to a file is on disk."""
        with self.open(path) as file:
            os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        """Remove a file, or a link itself."""
        with self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and what is in it, as far as that can be; links go, what they lead to stays."""
        with contextlib.suppress(OSError), self._parent(path) as (parent, name):
            shutil.rmtree(name, dir_fd=parent)

    @contextlib.contextmanager
    def only_one(self) -> Iterator[None]:
        """Hold the folder; a second process is refused."""
        try:
            file = os.fdopen(self._open(self.root / ".lock", os.O_RDWR | os.O_CREAT), "r+b")
        except FileNotFoundError:
            raise Problem(f"there is no folder '{self.root}'") from None
        with file:
            try:
                # Not flock: worker processes would inherit that, and hold the folder of a run that was killed.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise Problem(f"another process is working in '{self.root}'") from None
            yield

    # ------------------------------------------------------------------ trees of tensors

    def save_tree(self, path: Path, tree: Any) -> str:
        """Write a tree of tensors and plain values, with a checksum.

        Args:
            path: the file.
            tree: dicts, lists and tuples of them.

        Returns:
            The SHA-256 of what was written.
        """
        skeleton, tensors = pack(tree)
        shapes = [list(t.shape) for t in tensors]
        tensors = [t.detach().cpu().contiguous().reshape(t.shape or (1,)) for t in tensors]
        text = json.dumps([skeleton, shapes])
        named = {str(number): tensor.clone() for number, tensor in enumerate(tensors)}
        return self.write(path, tensor_file(named, {"tree": text, "sha256": _digest(text, tensors)}))

    def load_tree(self, path: Path) -> Any:
        """Read what `save_tree` wrote; a file that is damaged, or something else, is a Problem."""
        try:
            # The library opens files by name alone: this one names what is open already, wherever its name leads.
            with self.open(path) as plain, safe_open(f"/dev/fd/{plain.fileno()}", framework="pt") as file:
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
        except (
            *(SafetensorError, KeyError, ValueError, OSError, IndexError),
            *(TypeError, AttributeError, RuntimeError, MemoryError),  # of a tree that was not made by `pack`
        ) as error:
            raise Problem(f"'{path}' is damaged or not a file of perfed ({type(error).__name__})") from None


def write(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> str:
    """Write a file that belongs to no run folder, as `Folder.write` does."""
    return Folder(path.parent).write(path, content)


def write_json(path: Path, value: dict[str, Any]) -> str:
    """Write a JSON file that belongs to no run folder, as `Folder.write_json` does."""
    return Folder(path.parent).write_json(path, value)


def read_json(path: Path) -> Any:
    """Read a JSON file that belongs to no run folder, as `Folder.read_json` does."""
    return Folder(path.parent).read_json(path)


def save_tree(path: Path, tree: Any) -> str:
    """Write a tree of tensors that belongs to no run folder, as `Folder.save_tree` does."""
    return Folder(path.parent).save_tree(path, tree)


def load_tree(path: Path) -> Any:
    """Read a tree of tensors that belongs to no run folder, as `Folder.load_tree` does."""
    return Folder(path.parent).load_tree(path)


def json_text(value: dict[str, Any]) -> Iterator[bytes]:
    """Yield JSON, piece by piece: a line for each key, and for each element where a value is a list of objects.

    Not with json's own indentation: that is written in Python, which takes long where there are very many clients.
    """
    text = lambda item: json.dumps(item, sort_keys=True).encode()
    yield b"{\n "
    for number, key in enumerate(sorted(value)):
        item = value[key]
        yield b",\n " * (number > 0) + text(key) + b": "
        if isinstance(item, list) and any(isinstance(element, dict) for element in item):
            for place, element in enumerate(item):
                yield (b",\n  " if place else b"[\n  ") + text(element)
            yield b"\n ]"
        else:
            yield text(item)
    yield b"\n}\n"


def parse_json(text: str, where: str) -> Any:
    """Read JSON; what is none is a Problem that says where it was."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of 5,000 digits, brackets without end
        raise Problem(f"{where} is damaged: not valid JSON") from None


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Problem(f"{where} is damaged: not text") from None


NUMBER = (int, float, type(None))  # a score; None where there were no samples


def refuse_form(value: Any, form: Any, where: str, place: str = "") -> None:
    """Refuse what does not look as it must: files may have been damaged, or made by something else.

    Args:
        value: plain values, as JSON gives them.
        form: a type (object: anything), or a tuple of types; `[form]`, a list of such; `{"key": form}`, a table that
            has this key, and perhaps others; `{"key?": form}`, a table that may have it; `{str: form}`, a table in
            which all others are such.
        where: what the sentence begins with.
        place: where in it the value is.
    """
    if isinstance(form, list):
        _refuse_type(value, list, where, place)
        for number, element in enumerate(value):
            refuse_form(element, form[0], where, f"{place}[{number}]")
    elif isinstance(form, dict):
        _refuse_type(value, dict, where, place)
        named = {key.rstrip("?") for key in form if isinstance(key, str)}
        for key, inside in form.items():
            if key is str:
                for other in value.keys() - named:
                    refuse_form(value[other], inside, where, f"{place}.{other}".lstrip("."))
            elif (name := key.rstrip("?")) in value:
                refuse_form(value[name], inside, where, f"{place}.{name}".lstrip("."))
            elif name == key:
                raise Problem(f"{where} is damaged: it has no '{f'{place}.{key}'.lstrip('.')}'")
    else:
        _refuse_type(value, form, where, place)


def _refuse_type(value: Any, kind: type | tuple[type, ...], where: str, place: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if object not in kinds and type(value) not in kinds:  # True is a number only where numbers of that type are
        raise Problem(f"{where} is damaged: {repr(place) if place else 'it'} cannot be {shown(value)}")


def shown(value: Any) -> str:
    """Write a value for a message, which has to stay a sentence."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
