"""pFedMB: every layer is a mixture of B shared branches, with weights that each client learns for itself.

Mori, Yoshiyama, Furukawa, Teranishi: Personalized Federated Learning with Multi-branch Architecture. IJCNN 2023,
Algorithm 1. https://arxiv.org/abs/2211.07931

The paper trains and sends B branches; here a client trains ONE merged network and sends one vector, with the same
result. With alpha fixed the gradient of branch b is alpha_b times that of the merged layer, so W_b = c W_b(0) - alpha_b D
and theta = c theta(0) - s D, s = sum_b alpha_b^2: SGD with the gradient times s moves theta, and D = (c theta(0) -
theta) / s gives back every branch (c follows weight decay alone). Adam has no such form. Eq. 5 sums over participants; a
branch that nobody uses stays. Eq. 3 is plain SGD and leaves the simplex open: `softmax` (at first a step B^2 times
smaller) and `projection` keep it. Biases are branched with their layer; normalisation has one copy, averaged with n_i;
the alpha phase moves no statistics. `fine_tune` tunes the merged network with the plain gradient, a step 1/s larger.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.optim import sgd, simplex


@dataclass(frozen=True)
class PFedMB(Method):
    branches: int = hyper(3, "branches B of every layer; 1 is FedAvg", at_least=1)
    alpha_lr: float = hyper(1.0, "learning rate eta_alpha; 0 keeps the uniform mixture", at_least=0)
    simplex: Literal["softmax", "projection", "none"] = hyper("softmax", "what keeps alpha on the simplex")
    shared_alpha: bool = hyper(False, "one alpha for all layers")
    weighted: bool = hyper(True, "average branches with n_i alpha_i (eq. 5); false: with n_i alone")
    init_scale: float = hyper(1.0, "factor on the initial branches; sqrt(B) gives their mean the usual size", above=0)
    inside_sums: bool = hyper(False, "upload B vectors inside a sum, not one that the server reads; same result")

    evaluates = "assembled"
    category = "personalised models: parameter decoupling"

    def check(self):
        if self.optimizer != "sgd":
            raise Problem("pfedmb needs SGD: Adam's steps do not scale with alpha, so B branches are not one vector")

    @cached_property
    def layout(self):  # (branched entries, column of alpha for each entry, number of columns L, runs of equal columns)
        inside = self.model.weights.mask & ~self.model.norm.mask
        layers, index = self.model.layer[inside].unique(return_inverse=True)
        L = 1 if self.shared_alpha else len(layers)
        column = torch.full_like(self.model.layer, L)  # column L: what has one copy, in branch 0
        column[inside] = index.clamp_max(L - 1)
        columns, sizes = column.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0)
        runs = torch.stack([columns, ends - sizes, ends], 1).tolist()
        return inside.nonzero().flatten(), column, L, runs

    def blend(self, coefficients, rows):  # sums of rows [R, width] with [..., R, L + 1], by layer
        return torch.cat([coefficients[..., l] @ rows[:, a:b] for l, a, b in self.layout[3]], -1)

    def alpha(self, client):  # [B, L + 1]: the mixture, and (1, 0, ...) for what has one copy
        alpha = client.softmax(0) if self.simplex == "softmax" else client
        return torch.cat([alpha, torch.eye(self.branches, 1, dtype=alpha.dtype, device=alpha.device)], 1)

    def init_server(self, clients):
        W = torch.stack([self.model.init(self.seed * self.branches + b) for b in range(self.branches)])
        return torch.where(self.layout[1] < self.layout[2], self.init_scale * W, W)

    def init_client(self):
        start = 0.0 if self.simplex == "softmax" else 1 / self.branches
        return self.model.zeros().new_full((self.branches, self.layout[2]), start)

    def broadcast(self, server, ids):
        return Down(shared={"first": server[0], "more": server[1:].index_select(1, self.layout[0])})

    def received(self, down):  # [B, width]
        first, more = down.shared["first"][None], down.shared["more"]
        return torch.cat([first, first.repeat(len(more), 1).index_copy(1, self.layout[0], more)])

    def alpha_step(self, client, batch, W):
        alpha, L = self.alpha(client), self.layout[2]
        g, _ = self.gradient(self.blend(alpha, W), batch)
        slope = [sum(W[:, a:b] @ g[a:b] for k, a, b in self.layout[3] if k == l) for l in range(L)]
        slope = torch.stack(slope, 1)  # of alpha
        if self.simplex == "softmax":
            slope = alpha[:, :L] * (slope - (alpha[:, :L] * slope).sum(0))
        moved = client - self.alpha_lr * slope
        return simplex(moved) if self.simplex == "projection" else moved

    def W_step(self, carry, batch, s):
        theta, v, c, p = carry
        g, fresh = self.gradient(theta, batch)
        theta, v = self.update(fresh, v, s * g)
        return theta, v, *sgd(c, p, self.weight_decay * c, self.lr, self.momentum, self.nesterov)

    def local(self, client, down, data):
        W = self.received(down)
        client = data.fold(self.alpha_step, client, W, stream=1)
        alpha = self.alpha(client)
        start, s, one = self.blend(alpha, W), (alpha**2).sum(0)[self.layout[1]], torch.ones_like(W[0, 0])
        theta, _, c, _ = data.fold(self.W_step, (start, self.start(start), one, 0 * one), s)
        D = (c * start - theta) / s.clamp_min(1e-12)
        if not self.inside_sums:
            return client, Up(own={"D": D, "a": client, "c": c, "n": data.size.to(D.dtype)})
        use = alpha if self.weighted else torch.ones_like(alpha)
        return client, Up(mean={"use": use, "keep": c * use, "move": (use * alpha)[:, self.layout[1]] * D})

    def aggregate(self, server, cohort):
        if self.inside_sums:
            use, keep, move = (cohort.mean[name] for name in ("use", "keep", "move"))
        else:
            a, c, n = torch.stack([self.alpha(one) for one in cohort.own["a"]]), cohort.own["c"], cohort.own["n"]
            share = (n / n.sum())[:, None, None] * (a if self.weighted else torch.ones_like(a))
            use, keep = share.sum(0), (share * c[:, None, None]).sum(0)
            move = self.blend((share * a).transpose(0, 1), cohort.own["D"])
        used, column = use.abs() > 1e-12, self.layout[1]
        use = torch.where(used, use, 1.0)
        return torch.where(used, keep / use, 1.0)[:, column] * server - (used / use)[:, column] * move

    def personalise(self, client, down, data):
        return self.blend(self.alpha(client), self.received(down))
