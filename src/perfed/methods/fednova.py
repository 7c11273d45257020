"""FedNova: changes are divided by the number of steps behind them before they are averaged.

After the description of Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization. NeurIPS 2020. https://arxiv.org/abs/2007.07481

Whoever takes more steps (more samples, no straggler) would else count for more than its samples. A client sends
d_i = (w_i - w) / a_i and a_i, the server adds tau_eff d, where tau_eff and d are their means by sample counts. a_i is
what gradients of 1 would have made of the very steps that the client took: their number tau_i with plain SGD,
(tau_i - r (1 - r^tau_i) / (1 - r)) / (1 - r) with momentum r, (1 - (1 - lr mu)^tau_i) / (lr mu) with the proximal term
mu of FedProx. In this form both may be had at once, and Nesterov momentum. Weight decay counts as part of a gradient.
Our choice: Adam's steps, which are no sums of gradients, are counted; running statistics are plain means. With equal
numbers of steps this is FedAvg. A change of few steps is scaled up to tau_eff of them, as if more would lead on: where
numbers of steps are far apart and long local training levels off, this goes too far and is behind FedAvg.
"""

from dataclasses import dataclass

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.optim import sgd
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedNova(FedAvg):
    mu: float = hyper(0.0, "weight of a proximal term, as in fedprox", at_least=0)

    category = "global model"
    averages = False

    def check(self):
        if self.lr * self.mu >= 1:
            raise Problem(f"fednova needs lr * mu below 1, not {self.lr:g} * {self.mu:g}: a step would overshoot")

    def step(self, carry, batch, w_t):
        w, state, a, v = carry
        g, fresh = self.gradient(w, batch)
        w, state = self.update(fresh, state, g + self.mu * self.pull(w, w_t))
        if self.optimizer != "sgd":
            return w, state, a + 1, v
        return w, state, *sgd(a, v, self.lr * self.mu * a - 1, 1.0, self.momentum, self.nesterov)

    def local(self, client, down, data):
        w, zero = down.shared, self.model.zeros()[0]
        w_i, _, a, _ = data.fold(self.step, (w, self.start(w), zero, zero), w)
        return client, Up(mean={"d": self.model.weights.only((w_i - w) / a, w_i - w), "a": a})

    def aggregate(self, server, cohort):
        d, tau_eff = cohort.mean["d"], cohort.mean["a"]
        return server + self.model.weights.only(tau_eff * d, d)
