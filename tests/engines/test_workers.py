"""Worker processes that are killed, whose parent is killed, and that get little memory: results stay as they are."""

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from perfed.contract import checks
from perfed.contract.toy import plain_net
from perfed.core.errors import Problem
from perfed.core.model import Model
from perfed.engines import workers
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.workers import Workers
from perfed.federation.federation import Federation
from perfed.methods.ditto import Ditto

RESERVE = os.posix_fallocate
COHORTS = [range(5), (0, 1, 2), (1, 3, 4)]


@dataclass(frozen=True)
class Killed(Ditto):
    """Ditto whose process is killed once for each of these files that is there, while it trains or predicts."""

    training: str = ""
    predicting: str = ""

    def strike(self, path):
        with contextlib.suppress(FileNotFoundError):  # two processes may see the file, and one takes it away
            if path:
                Path(path).unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    def local(self, client, down, data):
        result = super().local(client, down, data)
        self.strike(self.training)
        return result

    def personalise(self, client, down, data):
        self.strike(self.predicting)
        return super().personalise(client, down, data)


def make(clients, engine=Workers, **settings):
    method = Killed(Model(plain_net, dtype=torch.float64), epochs=1, batch_size=5, lr=0.05, **settings)
    options = {"workers": 2} if engine is Workers else {}
    return Federation(engine(Job(method, clients, seed=5), **options))


def outcome(federation):
    return checks.play(federation.engine, COHORTS, federation)


@pytest.fixture
def expected(clients):
    return outcome(make(clients, Sequential))


def test_what_a_killed_worker_did_is_done_again(clients, expected, tmp_path):
    files = {"training": tmp_path / "training", "predicting": tmp_path / "predicting"}
    for path in files.values():
        path.touch()
    federation = make(clients, **{key: str(path) for key, path in files.items()})
    checks.compare(outcome(federation), expected, "with killed workers", 0)
    assert federation.look() == []
    assert not any(path.exists() for path in files.values())


def test_workers_that_die_with_nothing_to_do(clients, expected):
    """Seen by the parent before it hands out work, or only when it does."""
    federation = make(clients)
    for round, cohort in enumerate(COHORTS):
        for worker in federation.engine.workers:
            os.kill(worker.process.pid, signal.SIGKILL)
            if round == 1:
                worker.process.join()
        federation.step(cohort)
    checks.compare(checks.play(federation.engine, [], federation), expected, "with killed workers", 0)
    assert federation.look() == []


def test_no_more_workers_than_there_is_work(clients):
    federation = make(clients)
    federation.engine.count = 64
    federation.step((0, 1, 2))
    assert len(federation.engine.workers) == 3
    federation.engine.close()


def without_room(monkeypatch, folders, size=0):
    """Let devices have no room for files above `size` bytes: those that these folders are on, or all."""
    devices = None if folders is None else {Path(folder).stat().st_dev for folder in folders}

    def refuse(handle, offset, count):
        if count > size and (devices is None or os.fstat(handle).st_dev in devices):
            raise OSError(errno.ENOSPC, "No space left on device")
        RESERVE(handle, offset, count)

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_without_room_in_shared_memory_files_are_used(clients, expected, monkeypatch, tmp_path):
    shared = Path(workers.SHARED)
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no shared memory of its own here")
    monkeypatch.setattr(workers.tempfile, "tempdir", str(tmp_path))
    without_room(monkeypatch, [shared])
    federation = make(clients)
    federation.step(COHORTS[0])
    assert [os.fstat(file.fileno()).st_size > 0 for file in federation.engine.shared.files] == [False, True]
    federation.engine.close()
    checks.compare(outcome(make(clients)), expected, "in files", 0)
    without_room(monkeypatch, [shared], 128)  # for what is large alone
    memory = workers.Memory()
    for count, place in ((2, 0), (80, 1), (3, 0), (90, 1)):
        note = memory.write((torch.arange(count), {"a": torch.ones(1)}))
        assert note["file"] == place
        assert torch.equal(memory.read(note)[0], torch.arange(count))
    memory.close()


def test_without_room_anywhere(clients, monkeypatch):
    without_room(monkeypatch, None)
    federation = make(clients)
    with pytest.raises(Problem, match=r"no room for 0 MB of tensors in .*, through which workers get them: make one"):
        federation.step()
    federation.engine.close()


def test_a_worker_that_cannot_be_started(clients, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    federation = make(clients)
    with pytest.raises(Problem, match=r"cannot start worker process 1: Resource .*: use fewer --workers"):
        federation.step()
    federation.engine.close()


def test_a_worker_dies_with_its_parent(clients, monkeypatch):
    """Also in the middle of its work, when it does not look at its pipe."""

    def sleep(self, client, down, data):
        time.sleep(60)

    monkeypatch.setattr(Ditto, "local", sleep)
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        federation = make(clients)
        start = workers._Worker.send

        def tell(worker, message):
            os.write(write, f"{worker.process.pid}\n".encode())
            start(worker, message)

        monkeypatch.setattr(workers._Worker, "send", tell)
        try:
            federation.step()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        pids = [int(pipe.readline()) for _ in range(2)]
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        began = time.monotonic()
        assert pipe.read() == ""  # nobody has the other end any more
    assert time.monotonic() - began < 10
    for pid in pids:
        assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
