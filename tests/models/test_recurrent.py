"""`gru` and `lstm` on tokens: every engine trains them as the reference does."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from perfed.contract import checks
from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.core.task import IGNORED, NextToken
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.engines.vectorised import Vectorised
from perfed.methods.fedavg import FedAvg
from perfed.models import make_network
from perfed.models.config import ModelConfig

TOKENS, LENGTH = 7, 5


def talk() -> Clients:
    """Two clients with different numbers of samples, a fifth of whose targets are not counted."""
    draw = torch.Generator().manual_seed(0)
    tokens = lambda n: torch.randint(TOKENS, (n, LENGTH), generator=draw)
    skipped = lambda n: torch.rand(n, LENGTH, generator=draw) < 0.2
    split = lambda *sizes: Split(
        tokens(sum(sizes)), tokens(sum(sizes)).masked_fill(skipped(sum(sizes)), IGNORED), sizes
    )
    return Clients(("a", "b"), split(9, 5), split(1, 2), split(4, 3), task=NextToken(TOKENS))


RECORDED = pytest.param(
    {"fast": True},
    marks=[pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="recorded steps need Triton")],
    id="recorded",
)


@pytest.mark.parametrize("settings", [pytest.param({}, id="plain"), RECORDED])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_tokens_train_alike_on_every_engine(name, settings):
    clients = talk()
    network = make_network(ModelConfig(name=name, hidden=4), clients.shape, TOKENS)
    model = lambda: Model(network, dtype=torch.float64, task=clients.task)
    job = lambda: Job(FedAvg(model(), epochs=2, batch_size=4, lr=0.05), clients)
    expected = checks.play(Sequential(job()), [(0, 1)] * 2)
    actual = checks.play(Vectorised(job(), **settings), [(0, 1)] * 2)
    assert checks.difference(actual.server, expected.server) < 1e-12
    assert checks.difference(actual.scores, expected.scores) < 1e-12
    assert not torch.equal(expected.server, job().method.init_server(2))
