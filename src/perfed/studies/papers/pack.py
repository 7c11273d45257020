"""What a table rests on, as one archive: settings, scores and costs of its runs, without data, logs and models."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perfed.core.errors import Problem
from perfed.methods.pgfed import PGFed
from perfed.studies.papers.cells import Cell, all_cells
from perfed.studies.papers.protocol import Protocol
from perfed.training import catalog, files

ENDING = ".tar.xz"


def check_path(path: Path) -> None:
    """Refuse what cannot be written, before anything is run."""
    if not path.name.endswith(ENDING):
        raise Problem(f"--pack writes a {ENDING} archive, and '{path}' is not called so")
    if path.exists():
        raise Problem(f"'{path}' exists already: choose another name, or remove it")
    if not path.parent.is_dir():
        raise Problem(f"there is no folder '{path.parent}'")


def pack(protocol: Protocol, out: Path, path: Path) -> None:
    """Write the cells that have a result, or have diverged, as an archive that gives the table again elsewhere.

    Args:
        protocol: the table.
        out: the folder of all tables' runs.
        path: the archive.
    """
    content = io.BytesIO()
    cells = [cell for cell in all_cells(protocol, out) if cell.done or cell.diverged]
    if not cells:
        raise Problem(f"there is nothing to pack: no cell of this table has been run in '{out}'")
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for cell in cells:
            for file, data in _contents(cell):
                # Without owner and time, so that the same runs give the same archive.
                about = tarfile.TarInfo(file.relative_to(out).as_posix())
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    files.write(path, content.getvalue())


def _contents(cell: Cell) -> Iterator[tuple[Path, bytes]]:
    """Yield a cell's files, and what the archive has of each."""
    run, training = cell.run, cell.training
    yield cell.record, cell.record.read_bytes()
    if not cell.done:
        return
    paths = [path for path in [*run.kept(), *cell.own_files(), *training.kept()] if run.files.exists(path)]
    for path in paths:
        content = run.files.read(path)
        if path == run.config_file:
            content = _without_data_folder(content)
        if path == training.result_file:
            content = training.result_of(paths)
        yield path, content
    server = training.server_file
    if cell.seed == 0 and server.is_file() and issubclass(catalog.find(cell.method).load(), PGFed):
        yield server, _tree_file(PGFed.kept(training.server()))


def _without_data_folder(config: bytes) -> bytes:
    """Return settings without the folder that the data were read from, which is another one elsewhere."""
    lines = config.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("dir = ")).encode()


def _tree_file(tree: dict) -> bytes:
    """Return the bytes of a file of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        files.save_tree(path, tree)
        return path.read_bytes()
