"""CPU seconds per training step of pFedMB and of FedAvg, on the same data and network, in one run.

    python bench/pfedmb_step.py

The papers count B times FedAvg's computation for B branches. A round of pFedMB here takes twice as many steps (the
alpha phase, then the W phase); each should cost about one step of FedAvg. Both methods train in turns, several times,
and the smallest time of each counts: other processes only ever add.
"""

import json
import sys
import time

import torch

from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.methods.fedavg import FedAvg
from perfed.methods.pfedmb import PFedMB
from perfed.models.lenet import LeNet

BRANCHES, CLIENTS, SAMPLES, REPEATS = 5, 2, 320, 5


def seconds(method, clients: Clients) -> float:
    """Measure the CPU time of a round, from download to the server's average."""
    federation = Federation(Sequential(Job(method, clients)))
    began = time.process_time()
    federation.step()
    return time.process_time() - began


def measure(batch_size: int) -> dict[str, float]:
    """Measure the seconds per step of both, and their ratio."""
    draw = torch.Generator().manual_seed(0)
    count = CLIENTS * SAMPLES
    x, y = torch.rand(count, 3, 32, 32, generator=draw), torch.randint(0, 10, (count,), generator=draw)
    split = Split(x, y, (SAMPLES,) * CLIENTS)
    clients = Clients(tuple("ab"), split, split, split, 10)
    model = Model(lambda: LeNet(3, 32, 32, 10))
    common = {"epochs": 2, "batch_size": batch_size, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    methods = {"fedavg": FedAvg(model, **common), "pfedmb": PFedMB(model, branches=BRANCHES, **common)}
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(REPEATS):
        for name, method in methods.items():
            best[name] = min(best[name], seconds(method, clients))
    steps = CLIENTS * 2 * (SAMPLES // batch_size)
    each = {"fedavg": best["fedavg"] / steps, "pfedmb": best["pfedmb"] / (2 * steps)}
    return {"batch_size": batch_size, "parameters": model.P, "branches": BRANCHES} | {
        "fedavg_ms": round(1e3 * each["fedavg"], 3),
        "pfedmb_ms": round(1e3 * each["pfedmb"], 3),
        "ratio": round(each["pfedmb"] / each["fedavg"], 3),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in (10, 64):
        sys.stdout.write(json.dumps(measure(size)) + "\n")
