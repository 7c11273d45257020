"""The table of methods: what each is, what it evaluates, and what it sends, measured from a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from perfed.core.clients import Clients, Split
from perfed.core.model import Model
from perfed.engines.base import Job
from perfed.engines.local import Sequential
from perfed.federation.federation import Federation
from perfed.report.tables import markdown
from perfed.training.catalog import Entry, methods

ROUNDS, COHORT, FEATURES, CLASSES = 2, 4, 300, 10
HEADINGS = ("name", "method", "idea", "evaluated", "down", "up", "secure sums")


def network() -> nn.Module:
    """Normalisation and a convolution (of a single pixel, so it is a linear layer): no method refuses it."""
    first = (nn.Unflatten(1, (FEATURES, 1)), nn.Conv1d(FEATURES, 64, 1), nn.Flatten())
    return nn.Sequential(*first, nn.GroupNorm(4, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def measured(entry: Entry) -> dict[str, Any]:
    """What a method sends per participant and round, in multiples of the model's P, in the last of two rounds.

    Rounds of a warm-up are left out.
    `secure_sums`: whether the server needs no more than sums of the uploads ('per group' where each group has its own).
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(COHORT * 8, FEATURES, generator=draw)
    split = Split(x, torch.randint(0, CLASSES, (len(x),), generator=draw), (8,) * COHORT)
    clients = Clients(tuple("abcd"), split, split, split, CLASSES)
    settings = {"epochs": 1, "lr": 0.01, "cohort": COHORT} | ({"warmup": 0} if "warmup" in entry.fields else {})
    federation = Federation(Sequential(Job(entry.load()(Model(network), **settings), clients)))
    before = (0, 0)
    for _ in range(ROUNDS):
        before = federation.traffic.down, federation.traffic.up
        federation.step()
    method, sent = federation.method, federation.traffic
    unit = COHORT * method.model.P * 4
    sums = "nothing is sent" if sent.up == 0 else "no" if sent.up_own else "yes" if method.groups == 1 else "per group"
    down, up = sent.down - before[0], sent.up - before[1]
    return {"down": round(down / unit, 2), "up": round(up / unit, 2), "secure_sums": sums}


def table() -> str:
    """All methods as Markdown."""
    rows = []
    for name, entry in methods().items():
        sent = measured(entry)
        multiple = lambda value: "0" if value == 0 else f"{value:g} P"
        traffic = multiple(sent["down"]), multiple(sent["up"]), sent["secure_sums"]
        rows.append((f"`{name}`", entry.title, entry.summary, entry.evaluates, *traffic))
    return markdown(HEADINGS, rows)
