"""ARUBA: the server learns, from round to round, which rate clients should train each weight with, or all of them.

Khodak, Balcan, Talwalkar: Adaptive Gradient-Based Meta-Learning Methods. NeurIPS 2019. https://arxiv.org/abs/1906.02717

After the authors' code (mkhodak/ARUBA), whose server takes clients one after another; here their sums are added at
once, which is the same. The rate eta = sqrt(b / g) is fixed within a round: b sums half the squared distances that
clients have moved, g their squared gradients, and both begin and are regularised with what makes eta the setting `lr`
(eps0 = lr zeta0), 0.1 here and 1 there. A learning-rate schedule multiplies eta. Models are averaged by sample counts.
Clients are evaluated after `adapt_epochs` epochs with eta, of which nothing is kept; with c above 0 (ARUBA++) they add
their own squared gradients to g meanwhile.

So that all is summed, clients send w, b and g (3 P numbers); `compact` sends w and g, as the authors do, for the server
to read one by one. With `isotropic`, b and g are single numbers. Momentum and Adam are refused: steps are plain.
"""

from dataclasses import dataclass

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class ARUBA(Method):
    zeta0: float = hyper(1.0, "what g begins with, squared; the larger, the slower do rates leave lr", above=0)
    p: float = hyper(1.0, "power with which the regularisation of b and g falls from client to client", at_least=0)
    isotropic: bool = hyper(False, "one rate for all weights")
    compact: bool = hyper(False, "upload 2 P numbers the server reads one by one, not 3 P inside sums; same result")
    adapt_epochs: int = hyper(1, "epochs with these rates before an evaluation", at_least=0, at_most=10_000)
    c: float = hyper(0.0, "share of its own squared gradients that an adapting client adds to g", at_least=0)

    evaluates = "adapted"
    category = "global model: meta-learning"
    averages = False

    def check(self):
        if self.momentum or self.optimizer != "sgd":
            raise Problem("aruba needs plain SGD: its rates follow from the sum of squared gradients")
        if self.compact and self.isotropic:
            raise Problem("aruba has nothing to make compact where it is isotropic: it sends P + 2 numbers already")

    @property
    def one(self):
        """What a square of 1 for each weight amounts to."""
        w = self.model.zeros()
        return w.new_tensor(len(self.model.weights)) if self.isotropic else torch.ones_like(w)

    def squares(self, vector):
        return (vector**2).sum() if self.isotropic else vector**2

    def init_server(self, clients):
        w, g = self.model.init(self.context.seed), self.zeta0**2 * self.one
        return {"w": w, "b": self.lr**2 * g, "g": g, "t": w.new_tensor(1)}

    def broadcast(self, server, ids):
        eta = (server["b"] / server["g"]).sqrt()
        return Down(shared={"w": server["w"], "eta": eta / self.lr})  # clients know lr, which may have a schedule

    def show(self, server, ids):
        return Down(shared={**self.broadcast(server, ids).shared, "g": server["g"]})

    def newcomer(self, server):
        return self.show(server, torch.arange(0))

    def step(self, carry, batch, given):
        w, q = carry
        d, fresh = self.gradient(w, batch)
        d = self.clipped(d) + self.weight_decay * self.model.weights.only(w)
        eta = self.lr * given["eta"]
        if "c/g" in given:  # where a client adapts
            eta = eta / (1 + given["c/g"] * q).sqrt()
        return fresh - eta * d, q + self.squares(d)

    def local(self, client, down, data):
        w, eta = down.shared["w"], down.shared["eta"]
        w_i, q = data.fold(self.step, (w, torch.zeros_like(eta)), {"eta": eta})
        if self.compact:
            return client, Up(own={"w": w_i - w, "g": q, "samples": data.size})
        b = self.squares(self.pull(w_i, w)) / 2
        return client, Up(mean={"w": w_i - w, "b": b, "g": q}, weight={"w": None, "b": 1.0, "g": 1.0})

    def aggregate(self, server, cohort):
        if self.compact:
            w, g, samples = cohort.own["w"], cohort.own["g"].sum(0), cohort.own["samples"]
            b, samples = (self.model.weights.only(w) ** 2).sum(0) / 2, samples.to(w.dtype)
            w = samples / samples.sum() @ w
        else:
            w, b, g = cohort.mean["w"], cohort.size * cohort.mean["b"], cohort.size * cohort.mean["g"]
        turns = torch.arange(len(cohort.ids), device=w.device)  # of clients, as if they came one after another
        falls = ((server["t"] + 1 + turns) ** -self.p * (turns < cohort.size)).sum() * self.zeta0**2 * self.one
        b, g = server["b"] + b + self.lr**2 * falls, server["g"] + g + falls
        return {"w": server["w"] + w, "b": b, "g": g, "t": server["t"] + cohort.size}

    def personalise(self, client, down, data):
        w, eta, g = (down.shared[name] for name in ("w", "eta", "g"))
        start, given = (w, torch.zeros_like(g)), {"eta": eta, "c/g": self.c / g}
        return {"personal": data.fold(self.step, start, given, epochs=self.adapt_epochs)[0], "global": w}

    def global_model(self, server):
        return server["w"]
