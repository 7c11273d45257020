"""Alone: the server trains on public samples and clients do nothing, so one sees what these are worth without them.

A control of the experiments with public samples.
"""

from dataclasses import dataclass

from perfed.core.messages import Up
from perfed.methods.zhao import Zhao


@dataclass(frozen=True)
class Alone(Zhao):
    def local(self, client, down, data):
        return client, Up(mean=0 * down.shared)
