"""PGFed: a client minimises its own risk plus a learned mixture of the others', each to first order.

Luo, Mendieta, Chen, Wu: PGFed: Personalize Each Client's Global Objective for Federated Learning. ICCV 2023,
Algorithm 1. https://arxiv.org/abs/2212.01448

The gradients used in a round are those of the LAST cohort (the listing; eqs. 13-15 print the current one, whose
gradients do not exist yet). f_i is a mean over samples, as in the authors' code (eq. 2 prints a sum). alpha is kept
at or above 0 by `clamp`, which the paper asks for without a mechanism. The gradient sent up is the exact mean over the
training data in eval mode; the code drops the last batch and stays in train mode. The server reads gradients and alpha
client by client, so secure sums cover the models only. Of alpha the server keeps a matrix, and with more than 1,000
clients only the pairs that it ever set: all others are at the start, 1 / M. Only M entries of a row travel. Gradients
are kept for the last cohort only.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.methods.shared.pairs import all_pairs, read_pairs, write_pairs


@dataclass(frozen=True)
class PGFed(Method):
    mu: float = hyper(0.1, "weight of the other clients' risks; 0 is FedAvg training", at_least=0)
    alpha_lr: float = hyper(0.01, "learning rate eta_2 of the mixture alpha; 0 keeps it at 1 / cohort", at_least=0)
    order: Literal["theta", "alpha"] = hyper("theta", "what moves first in a batch: theta (paper) or alpha (code)")
    clamp: bool = hyper(True, "keep alpha at or above 0")
    keep_momentum: bool = hyper(False, "the momentum buffer survives a client's rounds, as in the authors' code")

    evaluates = "own"
    category = "personalised models: multi-task"

    def init_server(self, clients):
        w, M = self.model.init(self.context.seed), self.context.cohort or clients
        last = {"ids": torch.full((M,), -1, device=w.device), "grads": w.new_zeros(M, len(w)), "c": w.new_zeros(M)}
        return {"w": w, "alpha": all_pairs(clients, w.new_tensor(1 / M)), **last}

    def init_client(self):
        theta = self.model.init(self.context.seed)
        return {"theta": theta, "velocity": self.start(theta)} if self.keep_momentum else {"theta": theta}

    def broadcast(self, server, ids):
        alpha = read_pairs(server["alpha"], ids, server["ids"])  # [m, M]; empty places meet gradients of 0
        mean = self.mu * server["grads"].mean(0)
        mixed = self.mu * alpha @ server["grads"]  # [m, P], eq. 13
        return Down(shared={"w": server["w"], "mean": mean, "c": server["c"]}, own={"alpha": alpha, "mixed": mixed})

    def step(self, carry, batch, given):
        theta, velocity, alpha = carry
        g, theta, _ = self.model.grad(theta, batch)
        moved, velocity = self.update(theta, velocity, g + given["mixed"])
        point = moved if self.order == "theta" else theta
        s = (point * given["mean"]).sum(dtype=torch.float64)
        alpha = (alpha - self.alpha_lr * (given["c"] + s)).to(alpha.dtype)
        return moved, velocity, alpha.clamp_min(0) if self.clamp else alpha

    def risk(self, batch, theta):
        g, _, f = self.model.grad(theta, batch, train=False)
        return g, f

    def local(self, client, down, data):
        w, own = down.shared["w"], down.own
        velocity = client["velocity"] if self.keep_momentum else self.start(w)
        given = {"mean": down.shared["mean"], "c": down.shared["c"], "mixed": own["mixed"]}
        theta, velocity, alpha = data.fold(self.step, (w, velocity, own["alpha"]), given)
        g, f = data.mean(self.risk, theta)
        c = self.mu * (f - (g * theta).sum(dtype=torch.float64)).to(theta.dtype)
        client = {"theta": theta, "velocity": velocity} if self.keep_momentum else {"theta": theta}
        return client, Up(mean=theta - w, own={"grad": g, "c": c, "alpha": alpha})

    def aggregate(self, server, cohort):
        seen = server["ids"] >= 0
        alpha = write_pairs(server["alpha"], cohort.ids, server["ids"][seen], cohort.own["alpha"][:, seen])
        free = len(server["ids"]) - len(cohort.ids)
        ids, c = pad(cohort.ids, (0, free), value=-1), pad(cohort.own["c"], (0, free))
        grads = pad(cohort.own["grad"], (0, 0, 0, free))
        return {"w": server["w"] + cohort.mean, "alpha": alpha, "ids": ids, "grads": grads, "c": c}

    def newcomer(self, server):  # nothing is known of it: it gets what a first reception gives, the mean gradient
        down = self.broadcast(server, torch.arange(0, device=server["w"].device))
        alpha = torch.full_like(server["c"], 1 / len(server["c"]))
        return Down(shared=down.shared, own={"alpha": alpha, "mixed": down.shared["mean"]})

    def global_model(self, server):
        return server["w"]

    @staticmethod
    def kept(server):  # all that `change` reads
        return {"alpha": server["alpha"], "ids": server["ids"]}

    @staticmethod
    def change(server):  # of alpha since the start (Figure 3), where it is a matrix
        alpha = server["alpha"]
        return alpha.double() - 1 / len(server["ids"]) if isinstance(alpha, torch.Tensor) else None

    def personalise(self, client, down, data):
        return client["theta"]
