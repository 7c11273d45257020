"""Jiang: FedAvg, then rounds of few local steps and small steps of the server, for a model good before tuning, too.

After the description of Jiang, Konecny, Rush, Kannan: Improving Federated Learning Personalization via Model Agnostic
Meta Learning. 2019. https://arxiv.org/abs/1909.12488

First FedAvg(E) with `epochs` and momentum beta at the server; then, in the last `share` of the run's rounds,
Reptile(K): `steps` local steps, and Adam at the server along the uniform mean of changes, or plain steps. Clients are
evaluated after `adapt_steps` steps with the optimiser of training, of which nothing is kept; `global` in the results is
the paper's initial accuracy. Our choice: all lengths and rates, running statistics that are plain means in both phases,
and a momentum that ends with the first one. Where few clients take part, what helps is that the server stops following
the last cohort alone: plain steps of 0.3 (`meta_optimizer` sgd) there, with long local training, do as well.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.optim import adam, adam_start
from perfed.core.rounds import Phase


@dataclass(frozen=True)
class Jiang(Method):
    share: float = hyper(0.33, "share of the rounds, the last ones, that are Reptile's", at_least=0, at_most=1)
    beta: float = hyper(0.5, "momentum of the server before them", at_least=0, below=1)
    steps: int = hyper(10, "local steps K in a round of Reptile", at_least=1, at_most=1_000_000, toy=4)
    meta_optimizer: Literal["adam", "sgd"] = hyper("adam", "optimiser of the server in rounds of Reptile")
    meta_lr: float = hyper(0.001, "its learning rate", above=0)
    adapt_steps: int = hyper(
        10, "local steps K_p before an evaluation; 0 evaluates as is", at_least=0, at_most=1_000_000
    )

    evaluates = "adapted"
    category = "global model: meta-learning"
    averages = False

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        return {"w": w, "m": torch.zeros_like(w), "adam": adam_start(w)}

    def phase(self, server):
        last = round(self.share * self.context.rounds)
        return Phase() if self.context.round <= self.context.rounds - last else Phase("reptile", steps=self.steps)

    def broadcast(self, server, ids):
        return Down(shared=server["w"])

    def local(self, client, down, data):
        return client, Up(mean=self.descend(down.shared, data) - down.shared)

    def local_reptile(self, client, down, data):
        return client, Up(mean=self.descend(down.shared, data) - down.shared, weight=1.0)

    def aggregate(self, server, cohort):
        w, m, state = server["w"], server["m"], server["adam"]
        D = self.model.weights.only(cohort.mean)
        if not self.context.phase:
            m = self.beta * m + D
            stepped = w + m
        elif self.meta_optimizer == "adam":
            stepped, state = adam(w, state, -D, self.meta_lr)
        else:
            stepped = w + self.meta_lr * D
        return {"w": self.model.weights.only(stepped, w + cohort.mean), "m": m, "adam": state}

    def personalise(self, client, down, data):
        return {"personal": self.descend(down.shared, data, steps=self.adapt_steps), "global": down.shared}

    def global_model(self, server):
        return server["w"]
