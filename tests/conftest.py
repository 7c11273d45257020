"""What the tests share: the contract's small ragged federation in float64, and its two networks."""

import os

import numpy as np
import pytest
import torch

from perfed.contract.toy import SIZES as SIZES
from perfed.contract.toy import norm_net, plain_net
from perfed.contract.toy import toy_clients as make_clients
from perfed.core.model import Model

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as plain Python; read when Triton is first imported
torch.set_num_threads(1)  # tiny tensors: threads only wait for each other


@pytest.fixture(scope="session", autouse=True)
def quick_runs(request):
    """Where slow tests are left out, runs draw no picture and wait for no disk: both take longer than tiny runs do."""
    with pytest.MonkeyPatch.context() as patch:
        if "not slow" in request.config.option.markexpr:
            patch.setattr("perfed.report.folder.picture", lambda run: b"")
            patch.setattr("os.fsync", lambda handle: None)
        yield


@pytest.fixture
def pictures(monkeypatch):
    """For tests that look at the picture of a run."""
    from perfed.report.picture import picture

    monkeypatch.setattr("perfed.report.folder.picture", picture)


@pytest.fixture
def clients():
    return make_clients()


@pytest.fixture
def model():
    return Model(plain_net, dtype=torch.float64)


@pytest.fixture
def norm_model():
    return Model(norm_net, dtype=torch.float64)


@pytest.fixture
def full_precision():
    """Without TF32, whose products differ from float32's in the fourth digit."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def within_arguments():
    """No kernel may look outside its arguments: a GPU says so at best, the interpreter never."""
    if torch.cuda.is_available():  # they are compiled: `compute-sanitizer` does it there
        yield
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, begin = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    ranges: list[tuple[int, int]] = []

    def check(ptrs, mask):
        where = np.asarray(ptrs.data, dtype=np.uint64)[np.asarray(mask.data, dtype=bool)]
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(where.shape, dtype=bool)
        for first, end in ranges:
            inside |= (where >= first) & (where + size <= end)
        assert inside.all(), "a kernel looked outside its arguments"

    def arguments(self, args, kwargs):
        found = begin(self, args, kwargs)
        ranges.clear()
        for tensor in (*found[0], *found[1].values()):
            if hasattr(tensor, "data_ptr"):
                storage = tensor.untyped_storage()
                ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return found

    def checked_load(self, ptrs, mask, *rest):
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst = arguments
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst = begin
