"""The vectorised engine on a GPU against the reference on the CPU."""

import pytest
import torch

from perfed import contract
from perfed.catalog import methods
from perfed.config import ModelConfig
from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.core.tree import tree_map
from perfed.engines.sequential import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.methods.fedavg import FedAvg
from perfed.models import make_network

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
    if network not in contract.networks(methods()[name]):
        pytest.skip("a network that this method refuses")
    if compile and name not in ("fedavg", "pgfed"):
        pytest.skip("compiling takes long: two methods stand for all")
    expected = contract.play(Sequential(on("cpu", name, network), contract.toy_clients(), seed=5))
    engine = Vectorised(
        on("cuda", name, network), contract.toy_clients(), seed=5, compile=compile, sizes=(3,) if compile else ()
    )
    found = contract.play(engine)
    here = lambda tree: tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, tree)
    contract.compare(contract.Outcome(*(here(getattr(found, f)) for f in vars(found))), expected, "the GPU")


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("name", ["lenet", "resnet"])
def test_a_gpu_run_can_be_repeated(name, engine):
    """Bit for bit, with convolutions in float32: what resuming to the byte needs."""
    draw = torch.Generator().manual_seed(0)
    split = lambda n: Split(torch.rand(3 * n, 3, 32, 32, generator=draw), torch.arange(3 * n) % 10, (n, n, n))
    clients = Clients(("a", "b", "c"), split(40), split(5), split(9), 10)
    network = make_network(ModelConfig(name=name, norm="batch"), clients.shape, 10)
    torch.backends.cudnn.deterministic = True  # as every run sets it
    make = lambda: FedAvg(Model(network, device="cuda"), epochs=2, lr=0.05)
    one, two = (contract.play(engine(make(), clients.to("cuda")), [range(3)] * 2) for _ in range(2))
    assert contract.difference(one.server, two.server) == 0
