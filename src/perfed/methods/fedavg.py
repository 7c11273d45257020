"""FedAvg: clients train the received model, the server averages what they changed.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017, Algorithm 1. https://arxiv.org/abs/1602.05629

Averages floating buffers (BatchNorm statistics) with the parameters; weights are renormalised over the participants.
Evaluated as the global model; `fine_tune` gives the fine-tuned evaluation of the pFedMB paper.
"""

from dataclasses import dataclass

from perfed.core.messages import Up
from perfed.core.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    evaluates = "global"
    category = "global model"

    def init_server(self, clients):
        return self.model.init(self.context.seed)

    def local(self, client, down, data):
        w = self.descend(down.shared, data)
        return client, Up(mean=w - down.shared)

    def aggregate(self, server, cohort):
        return server + cohort.mean

    def personalise(self, client, down, data):
        return down.shared
