"""The reference: one client after another, plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from perfed.core.data import ClientData
from perfed.core.messages import Down
from perfed.core.method import State
from perfed.core.random import derive
from perfed.core.tree import rows, stack
from perfed.engines.base import Engine, Task


class Sequential(Engine):
    """One client after another."""

    name = "sequential"

    def one(self, task: Task, key: Tensor, id: int, state: State, down: Down) -> dict[str, Any]:
        """The task for one client."""
        key, m = derive(key, id), self.method
        dtype = m.model.dtype
        data = ClientData(self.clients, id, key, batch_size=m.batch_size, epochs=m.epochs, dtype=dtype)
        return task(state, down, data, key)

    def _each(self, task: Task, key: Tensor, ids: Sequence[int], states: Sequence[State], down: Down) -> dict[str, Any]:
        each = [
            self.one(task, key, id, state, Down(down.shared, rows(down.own, row)))
            for row, (id, state) in enumerate(zip(ids, states, strict=True))
        ]
        return collect(each)


def collect(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Stacked results of single clients; states stay apart."""
    out = {name: stack([one[name] for one in each]) for name in each[0] if name != "state"}
    return out | ({"state": [one["state"] for one in each]} if "state" in each[0] else {})
