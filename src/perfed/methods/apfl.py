"""APFL: a client predicts with a mixture of its own and the global parameters, and learns how much of each.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. 2020, Algorithm 1. https://arxiv.org/abs/2003.13461

PARAMETERS are mixed, v_bar = alpha v + (1 - alpha) w; the authors' code mixes outputs, which is the same for linear
models only. w is the client's local copy while it trains, and the latest global model in evaluation. alpha moves once
per round, before the steps, along the exact gradient of the training data. v keeps its own state: it is never
overwritten by the mixture, and its running statistics are those of v_bar. v and alpha stay with the client.
"""

from dataclasses import dataclass

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class APFL(FedAvg):
    mix: float = hyper(
        0.5, "share alpha of v in the mixture before training; 0 is FedAvg, 1 Local", at_least=0, at_most=1
    )
    alpha_lr: float = hyper(0.01, "learning rate of alpha; 0 keeps it fixed", at_least=0)

    evaluates = "assembled"
    category = "personalised models: interpolation"

    def init_client(self):
        v = self.model.init(self.context.seed)
        return {"v": v, "alpha": v.new_tensor(self.mix)}

    def mixed(self, v, w, alpha):
        return self.model.weights.only(w + alpha * (v - w), v)

    def risk(self, batch, theta):
        return self.model.grad(theta, batch, train=False)[0]

    def step(self, carry, batch, alpha):
        w, w_state, v, v_state = carry
        g, fresh_w = self.gradient(w, batch)
        g_bar, fresh_v = self.gradient(self.mixed(v, w, alpha), batch)  # both at the old point
        v = self.model.weights.only(v, fresh_v)
        return *self.update(fresh_w, w_state, g), *self.update(v, v_state, alpha * g_bar)

    def local(self, client, down, data):
        w, v, alpha = down.shared, client["v"], client["alpha"]
        if self.alpha_lr:
            slope = (self.pull(v, w) * data.mean(self.risk, self.mixed(v, w, alpha))).sum()
            alpha = (alpha - self.alpha_lr * slope).clamp(0, 1)
        w, _, v, _ = data.fold(self.step, (w, self.start(w), v, self.start(v)), alpha)
        return {"v": v, "alpha": alpha}, Up(mean=w - down.shared)

    def personalise(self, client, down, data):
        return self.mixed(client["v"], down.shared, client["alpha"])
