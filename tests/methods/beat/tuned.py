"""Tuned: FedAvg whose clients train for one epoch before an evaluation, at a rate of its own.

A control of the experiments with methods that adapt.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Tuned(FedAvg):
    adapt_lr: float = hyper(0.05, "learning rate of the epoch before an evaluation", above=0)

    evaluates = "adapted"

    def personalise(self, client, down, data):
        return {"personal": self.at_rate(self.adapt_lr).descend(down.shared, data, epochs=1), "global": down.shared}
