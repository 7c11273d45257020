"""CPU time of one gradient: the network as it was written, with autograd, against what `FastModel` makes of it.

    python bench/gradients.py > bench/results/gradients.json

All take turns; medians count, and ratios are what travels between machines. "chains" is the network with fused layers
under autograd, which is what a loss of a method's own gets; "rewritten" is what `model.grad(theta, batch)` does.
"""

import json
import statistics
import sys
import time

import torch

from perfed.accel.fast_model import FastModel
from perfed.core.model import Batch, Model
from perfed.core.random import derive
from perfed.models import make_network
from perfed.models.config import ModelConfig
from perfed.studies.bench.cpu import processor
from perfed.training.provenance import commit

REPEATS = 31
CASES = [
    ("mlr", (1, 28, 28), 10),
    ("mlp", (1, 28, 28), 10),
    ("lenet", (3, 32, 32), 10),
    ("lenet", (3, 32, 32), 64),
    ("fedavgcnn", (1, 28, 28), 10),
    ("fedavgcnn", (1, 28, 28), 64),
    ("fedavgcnn", (3, 32, 32), 64),
    ("resnet", (3, 32, 32), 10),
    ("resnet", (3, 32, 32), 64),
]


def measure(name: str, shape: tuple[int, ...], batch_size: int) -> dict[str, object]:
    """Measure the median milliseconds of a gradient, each way."""
    build = make_network(ModelConfig(name=name, hidden=100, norm="batch"), shape, 10)
    model = Model(build)
    plain, ours = FastModel(model, fused=False), FastModel(model)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(batch_size, *shape, generator=draw), torch.randint(0, 10, (batch_size,), generator=draw)
    batch, theta = Batch(x, y, None, derive(0)), ours.init(0)
    ways = {
        "as_written": lambda: plain.grad(theta, batch),
        "chains": lambda: ours.grad(theta, batch, ours.loss),
        "rewritten": lambda: ours.grad(theta, batch),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, gradient in ways.items():
            gradient()  # the caches hold what this way needs
            began = time.process_time()
            gradient()
            times[way].append(1e3 * (time.process_time() - began))
    ms = {way: statistics.median(taken) for way, taken in times.items()}
    sys.stderr.write(f"{name} {shape} {batch_size}: {ms}\n")
    return {
        "network": name,
        "sample": list(shape),
        "batch_size": batch_size,
        **{f"{way}_ms": round(taken, 3) for way, taken in ms.items()},
        "chains_ratio": round(ms["chains"] / ms["as_written"], 2),
        "rewritten_ratio": round(ms["rewritten"] / ms["as_written"], 2),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = [measure(*case) for case in CASES]
    about = {"cpu": processor(), "torch": torch.__version__, "commit": commit(), "repeats": REPEATS}
    sys.stdout.write(json.dumps({"gradients": measured, **about}, indent=1) + "\n")
