"""The vectorised engine on a GPU against the reference on the CPU."""

import pytest
import torch

from perfed import contract
from perfed.catalog import methods
from perfed.core.model import Model
from perfed.core.tree import tree_map
from perfed.engines.sequential import Sequential
from perfed.engines.vectorised import Vectorised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def on(device, name, network):
    entry = methods()[name]
    like = contract.maker(entry, network)()
    settings = {field: getattr(like, field) for field in entry.fields}
    return entry.load()(Model(contract.NETWORKS[network], dtype=torch.float64, device=device), **settings)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("network", contract.NETWORKS)
@pytest.mark.parametrize("name", list(methods()))
def test_gpu_equals_cpu(name, network, compile):
    if compile and name not in ("fedavg", "pgfed"):
        pytest.skip("compiling takes long: two methods stand for all")
    expected = contract.play(Sequential(on("cpu", name, network), contract.toy_clients(), seed=5))
    engine = Vectorised(
        on("cuda", name, network), contract.toy_clients(), seed=5, compile=compile, sizes=(3,) if compile else ()
    )
    found = contract.play(engine)
    here = lambda tree: tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, tree)
    contract.compare(contract.Outcome(*(here(getattr(found, f)) for f in vars(found))), expected, "the GPU")
