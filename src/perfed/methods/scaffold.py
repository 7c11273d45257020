"""SCAFFOLD: control variates correct the drift of local training.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020, Algorithm 1, option II. https://arxiv.org/abs/1910.06378

tau is the number of steps this client really took. Momentum and Adam are refused: (w - y) / (tau eta) is then no
average of gradients. The mean over clients is uniform, as in the paper. After every round c is the mean of all c_i.
"""

from dataclasses import dataclass

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class SCAFFOLD(Method):
    server_lr: float = hyper(1.0, "server learning rate eta_g", above=0)
    compact: bool = hyper(False, "upload P + 1 numbers the server reads one by one, not 2 P inside a sum; same result")

    evaluates = "global"
    category = "global model: regularised local loss"
    averages = False

    def check(self):
        if self.momentum or self.optimizer != "sgd":
            raise Problem("scaffold needs plain SGD: with momentum or Adam its control variates are not gradients")

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        return {"w": w, "c": torch.zeros_like(w), "clients": w.new_tensor(clients)}

    def init_client(self):
        return torch.zeros_like(self.model.init(self.context.seed))  # c_i

    def broadcast(self, server, ids):
        return Down(shared={"w": server["w"], "c": server["c"]})

    def corrected(self, y, batch, drift):
        g, fresh = self.gradient(y, batch)
        return g + drift, fresh

    def local(self, c_i, down, data):
        w, c = down.shared["w"], down.shared["c"]
        y = self.descend(w, data, self.corrected, c - c_i)
        scale = 1 / (data.steps().to(w.dtype) * self.lr)
        change = -c - scale * self.pull(y, w)  # c_i+ - c_i
        if self.compact:
            return c_i + change, Up(own={"y": y - w, "scale": scale})
        return c_i + change, Up(mean={"y": y - w, "c": change}, weight=1.0)

    def aggregate(self, server, cohort):
        if self.compact:
            step, scaled = cohort.own["y"].mean(0), (cohort.own["scale"][:, None] * cohort.own["y"]).mean(0)
            change = -server["c"] - self.model.weights.only(scaled)
        else:
            step, change = cohort.mean["y"], cohort.mean["c"]
        share = 1 / server["clients"] * cohort.size
        moved = self.model.weights.only(self.server_lr * step, step)  # statistics are averaged, not learned
        return {**server, "w": server["w"] + moved, "c": server["c"] + share * change}

    def personalise(self, c_i, down, data):
        return down.shared["w"]
