"""What a table rests on, as one archive: settings, scores and costs of its runs, without data, logs and models."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perfed.core.errors import Problem
from perfed.studies.papers.cells import NEWCOMERS, Cell, cell
from perfed.studies.papers.protocol import Protocol
from perfed.studies.papers.watch import ALPHAS
from perfed.training import files

ENDING = ".tar.xz"
OWN = (NEWCOMERS, ALPHAS, "scores_*.json")  # what tables write into a run's folder


def check_path(path: Path) -> None:
    """Refuse what cannot be written, before anything is run."""
    if not path.name.endswith(ENDING):
        raise Problem(f"--pack writes a {ENDING} archive, and '{path}' is not called so")
    if path.exists():
        raise Problem(f"'{path}' exists already: choose another name, or remove it")
    if not path.parent.is_dir():
        raise Problem(f"there is no folder '{path.parent}'")


def pack(protocol: Protocol, out: Path, path: Path) -> None:
    """Write the cells of `out` that have a result, or have diverged; unpacked elsewhere, they give the table again."""
    content, seen = io.BytesIO(), set()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for column in protocol.columns:
            for row in protocol.rows:
                for one in (cell(protocol, out, column, row, seed) for seed in range(protocol.seeds)):
                    if one.folder not in seen and (one.done or one.diverged):
                        seen.add(one.folder)
                        for name, data in _contents(one, out):
                            # No owner and no time: the same runs, the same archive.
                            about = tarfile.TarInfo(name.as_posix())
                            about.size = len(data)
                            archive.addfile(about, io.BytesIO(data))
    if not seen:
        raise Problem(f"there is nothing to pack: no cell of this table has been run in '{out}'")
    files.write(path, content.getvalue())


def _contents(one: Cell, out: Path) -> Iterator[tuple[Path, bytes]]:
    """(name, bytes) of a cell's files."""
    yield one.record.relative_to(out), one.record.read_bytes()
    if not one.done:
        return
    own = [file for pattern in OWN for file in sorted(one.folder.glob(pattern))]
    for file in [*one.run.kept(), *own, *one.training.kept()]:
        if file.exists():
            yield file.relative_to(out), _elsewhere(one, file)
    if one.seed == 0 and (matrix := _matrix(one.training.server_file)):
        yield one.training.server_file.relative_to(out), matrix


def _elsewhere(one: Cell, file: Path) -> bytes:
    """A file's bytes; settings without the folder that the data were read from, which is another one elsewhere."""
    if file != one.run.config_file:
        return file.read_bytes()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("dir = ")).encode()


def _matrix(server: Path) -> bytes:
    """Of PGFed's server what its picture needs: the matrix A, and the places of a cohort; empty for other methods."""
    whole = files.load_tree(server) if server.is_file() else None
    if not isinstance(whole, dict) or not {"alpha", "ids"} <= set(whole):
        return b""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / server.name
        files.save_tree(path, {"alpha": whole["alpha"], "ids": whole["ids"]})
        return path.read_bytes()
