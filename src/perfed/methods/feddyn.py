"""FedDyn: a linear and a quadratic term, renewed every round, make local optima agree with the global one.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization. ICLR 2021,
Algorithm 1. https://arxiv.org/abs/2111.04263

Plain mean over the participants, N (all clients) in the update of h. -h / a does not shrink with a: with everybody
taking part the first round moves the model by twice the mean change, for any a, so a -> 0 is not FedAvg. Evaluated is
the model that is sent; the authors' code reports means of clients' models, divides a by a client's relative size and
clips gradients. Without the quadratic term (some copies drop it) the local objective has no lower bound.
"""

from dataclasses import dataclass

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class FedDyn(Method):
    a: float = hyper(0.1, "weight of the dynamic regulariser, the paper's alpha", above=0)

    evaluates = "global"
    category = "global model: regularised local loss"
    averages = False

    def check(self):
        if self.optimizer == "sgd" and self.lr * self.a >= 2:
            raise Problem(f"feddyn diverges unless lr * a is below 2: {self.lr:g} * {self.a:g} = {self.lr * self.a:g}")

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        return {"w": w, "h": torch.zeros_like(w), "clients": w.new_tensor(clients)}

    def init_client(self):
        return self.model.zeros()  # h_i, after exact local training the gradient of f_i at w_i

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def dynamic(self, w, batch, given):
        g, fresh = self.gradient(w, batch)
        return g - given["h"] + self.a * self.pull(w, given["w"]), fresh

    def local(self, h_i, down, data):
        w = self.descend(down.shared, data, self.dynamic, {"h": h_i, "w": down.shared})
        return h_i - self.a * self.pull(w, down.shared), Up(mean=w - down.shared, weight=1.0)

    def aggregate(self, server, cohort):
        share = 1 / server["clients"] * cohort.size
        h = server["h"] - self.a * share * self.model.weights.only(cohort.mean)
        return {**server, "w": server["w"] + cohort.mean - h / self.a, "h": h}

    def personalise(self, h_i, down, data):
        return down.shared
