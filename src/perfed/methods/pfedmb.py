"""pFedMB: every layer is a mixture of B shared branches, with weights that each client learns for itself.

Mori, Yoshiyama, Furukawa, Teranishi: Personalized Federated Learning with Multi-branch Architecture. IJCNN 2023,
Algorithm 1. https://arxiv.org/abs/2211.07931

The paper trains and sends B branches; here a client trains ONE merged network and sends one vector, with the same
result: with alpha fixed a branch's gradient is alpha_b times its layer's, so W_b = c W_b(0) - alpha_b D and theta = c
theta(0) - s D, s = sum_b alpha_b^2; c follows weight decay alone. SGD on theta with the gradient times s is that of the
branches; Adam is not. Eq. 5 sums over participants; a branch that nobody uses stays. Eq. 3 leaves the simplex open:
`softmax` (at first a step B^2 times smaller) and `projection` keep it. Biases are branched with their layer;
normalisation has one copy, averaged with n_i; the alpha phase has no momentum or decay and moves no statistics.
What is fine-tuned the paper does not say: with `fine_tune` it is one more visit to the client, alpha, then W. Tuning
the merged network would be steps 1/s times as large as in training, B times where the mixture is uniform.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import FINE_TUNING, Method
from perfed.core.optim import sgd
from perfed.core.tree import rows
from perfed.methods.shared.mixture import Mixture, convex, convex_step


@dataclass(frozen=True)
class PFedMB(Method):
    branches: int = hyper(3, "branches B of every layer; 1 is FedAvg", at_least=1, at_most=1_000)
    alpha_lr: float = hyper(1.0, "learning rate eta_alpha; 0 keeps the uniform mixture", at_least=0)
    simplex: Literal["softmax", "projection", "none"] = hyper("softmax", "what keeps alpha on the simplex")
    shared_alpha: bool = hyper(False, "one alpha for all layers")
    weighted: bool = hyper(True, "average branches with n_i alpha_i (eq. 5); false: with n_i alone")
    init: Literal["branch", "mean"] = hyper("branch", "what starts at the usual size: branches, or their mean")
    inside_sums: bool = hyper(False, "upload B vectors inside a sum, not one that the server reads; same result")

    evaluates = "assembled"
    category = "personalised models: parameter decoupling"
    averages = False
    mixture = True
    starts = "branches"

    def check(self):
        if self.optimizer != "sgd":
            raise Problem("pfedmb needs SGD: Adam's steps do not scale with alpha, so B branches are not one vector")

    @cached_property
    def layers(self):
        return Mixture(self.model, self.model.weights.mask & ~self.model.norm.mask, self.shared_alpha)

    def init_server(self, clients):
        W = torch.stack([self.model.init(self.context.seed * self.branches + b) for b in range(self.branches)])
        size = self.branches**0.5 if self.init == "mean" else 1.0
        return torch.where(self.layers.mask, size * W, W[0])

    def init_client(self):
        return self.model.zeros().new_full((self.branches, self.layers.L), 1 / self.branches)

    def weights(self, a):  # alpha [B, L], layer by layer
        return convex(a, self.simplex)

    def alpha_step(self, a, batch, W):
        g, _ = self.gradient(self.layers.blend(self.weights(a), W), batch)
        return convex_step(a, self.layers.slopes(W, g), self.alpha_lr, self.simplex)

    def W_step(self, carry, batch, s):
        theta, v, c, p = carry
        g, fresh = self.gradient(theta, batch)
        theta, v = self.update(fresh, v, s * g)
        return theta, v, *sgd(c, p, self.weight_decay * c, self.lr, self.momentum, self.nesterov)

    def train(self, a, W, data, epochs=None, stream=0):
        a = data.fold(self.alpha_step, a, W, epochs=epochs, stream=stream + 1)
        alpha = self.weights(a)
        start, s, c = self.layers.blend(alpha, W), self.layers.spread((alpha**2).sum(0)), torch.ones_like(alpha[0])
        carry = start, self.start(start), c, 0 * c
        theta, _, c, _ = data.fold(self.W_step, carry, s, epochs=epochs, stream=stream)
        return a, start, s, theta, c

    def local(self, a, down, data):
        a, start, s, theta, c = self.train(a, down.shared, data)
        sent = {"D": (self.layers.spread(c) * start - theta) / s.clamp_min(1e-12), "a": a, "c": c[0]}
        if self.inside_sums:
            return a, Up(mean=self.terms(sent))
        return a, Up(own={**sent, "n": data.size.to(theta.dtype)})

    def terms(self, sent):  # what eq. 5 averages with n_i: alpha_b, alpha_b c and alpha_b^2 D
        alpha = self.weights(sent["a"])
        use = alpha if self.weighted else torch.ones_like(alpha)
        return {"use": use, "keep": use * sent["c"], "move": self.layers.spread(use * alpha) * sent["D"]}

    def aggregate(self, server, cohort):
        mean = cohort.mean
        if not self.inside_sums:
            mean, n = {}, cohort.own["n"]
            for i, share in enumerate(n / n.sum()):  # one by one: B vectors in memory, not B for each client
                mean = {name: mean.get(name, 0) + share * t for name, t in self.terms(rows(cohort.own, i)).items()}
        used, spread = mean["use"] > 1e-12, self.layers.spread
        use = torch.where(used, mean["use"], 1.0)
        return spread(torch.where(used, mean["keep"] / use, 1.0)) * server - spread(used / use) * mean["move"]

    def personalise(self, a, down, data):
        return self.layers.blend(self.weights(a), down.shared)

    def tuned(self, theta, a, down, data):
        return self.train(a, down.shared, data, self.fine_tune, FINE_TUNING)[3]
