"""The reference: one client after another, plain loops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from perfed.core.data import ClientData
from perfed.core.messages import Down
from perfed.core.method import State
from perfed.core.random import derive
from perfed.core.tree import rows, stack
from perfed.engines.base import Asked, Engine, Task


class Sequential(Engine):
    """One client after another."""

    name = "sequential"

    def one(
        self, task: Task, key: Tensor, id: int, state: State, down: Down, done: int | None = None
    ) -> dict[str, Any]:
        """The task for one client."""
        key, m = derive(key, id), self.method
        dtype = m.model.dtype
        data = ClientData(self.clients, id, key, batch_size=m.batch_size, epochs=m.epochs, dtype=dtype, done=done)
        return task(state, down, data, key)

    def _each(self, task: Task, key: Tensor, asked: Asked) -> dict[str, Any]:
        ids, states, down, done = asked
        each = []
        for row, id in enumerate(ids):
            state, own = rows((states, down.own), row)
            each.append(self.one(task, key, id, state, Down(down.shared, own), None if done is None else done[row]))
        return stack(each)
