"""FedProx: FedAvg with a pull towards the received model in the local loss.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020, Algorithm 2.
https://arxiv.org/abs/1812.06127

The penalty is mu/2 ||w - w^t||^2 over all parameters jointly, squared. Clients are sampled uniformly and averaged with
their sample counts, as in the authors' code; the paper samples by size and averages uniformly.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = hyper(0.1, "weight of the proximal term; 0 is FedAvg", at_least=0)

    category = "global model: regularised local loss"

    def proximal(self, w, batch, w_t):
        g, fresh = self.gradient(w, batch)
        return g + self.mu * self.pull(w, w_t), fresh

    def local(self, client, down, data):
        w = self.descend(down.shared, data, self.proximal, down.shared)
        return client, Up(mean=w - down.shared)
