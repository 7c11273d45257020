"""pFedMe: each personal model theta is tied to a local copy of the global one, which follows it.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, Algorithm 1.
https://arxiv.org/abs/2006.08848

Only the clients of a cohort compute (the paper trains all and averages some); their mean is weighted by sample counts,
as in the authors' code. theta starts at the received w, is carried from batch to batch, and is kept for evaluation:
in the authors' code it shares its memory with the network, so that what is reported as personal is w_i. Their weight
decay of 0.001 on theta is `weight_decay` here. w_i never sees data; it takes theta's running statistics.
"""

from dataclasses import dataclass

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class PFedMe(FedAvg):
    lam: float = hyper(5.0, "tie lambda between theta and w_i", above=0)
    inner_lr: float = hyper(0.1, "step size etahat of theta (lr is eta, of w_i)", above=0)
    inner_steps: int = hyper(5, "steps K of theta on each batch", at_least=1, at_most=10_000)
    steps: int = hyper(0, "batches R per round; 0: all batches of `epochs` epochs", at_least=0, at_most=1_000_000)
    beta: float = hyper(1.0, "step of the server towards the mean of the w_i; 1 is that mean", above=0)

    evaluates = "own"
    category = "global model: meta-learning"

    def check(self):
        if self.momentum or self.optimizer != "sgd":
            raise Problem("pfedme takes plain gradient steps: set momentum to 0 and optimizer to sgd")
        for name, rate in {"lr": self.lr, "inner_lr": self.inner_lr}.items():
            if rate * self.lam >= 1:
                raise Problem(f"pfedme needs {name} * lam below 1, not {rate:g} * {self.lam:g}: a step would overshoot")

    def init_client(self):
        return self.model.init(self.context.seed)  # theta

    def step(self, carry, batch, given):
        w, theta = carry
        for _ in range(self.inner_steps):
            g, theta = self.gradient(theta, batch)
            g = self.clipped(g + self.lam * self.pull(theta, w)) + self.weight_decay * self.model.weights.only(theta)
            theta = theta - self.inner_lr * g
        return self.model.weights.only(w - self.lr * self.lam * (w - theta), theta), theta

    def local(self, client, down, data):
        w, theta = data.fold(self.step, (down.shared, down.shared), steps=self.steps or None)
        return theta, Up(mean=w - down.shared)

    def aggregate(self, server, cohort):
        return server + self.model.weights.only(self.beta * cohort.mean, cohort.mean)  # statistics: the plain mean

    def personalise(self, client, down, data):
        return {"personal": client, "global": down.shared}
