"""Ditto: a FedAvg model for all, and beside it one model per client that is pulled towards it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021, Algorithm 1.
https://arxiv.org/abs/2012.04221

The centre of the pull is the RECEIVED model, not the locally updated one. Personal and global training use the same
batches, as in the authors' code, which takes the two steps in turn; the server weights by sample counts.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Ditto(FedAvg):
    lam: float = hyper(0.1, "pull of the personal model towards the global one; 0 is Local", at_least=0)

    evaluates = "own"
    category = "personalised models: interpolation"

    def init_client(self):
        return self.model.init(self.context.seed)

    def pulled(self, v, batch, w):
        g, fresh = self.gradient(v, batch)
        return g + self.lam * self.pull(v, w), fresh

    def local(self, client, down, data):
        v = self.descend(client, data, self.pulled, down.shared)
        w = self.descend(down.shared, data)
        return v, Up(mean=w - down.shared)

    def personalise(self, client, down, data):
        return client
