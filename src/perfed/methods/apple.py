"""APPLE: a client's model is a mixture of everybody's core models, with weights that it learns and keeps to itself.

Luo, Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning. IJCAI 2022, Algorithm 1.
https://arxiv.org/abs/2110.08394

w_i = sum_j p_ij c_j. A batch's gradient g at w_i moves the own core model by p_ii g and p_i by <g, c_j>; others' models
are constant. The CORE model is uploaded (a widely used copy sends w_i). The penalty is lam(r) mu ||p_i - p0||^2, as in
the authors' code (the paper has mu / 2); p moves by plain SGD. p0_j = n_j / n from the counts uploaded so far; clients
not heard of count as the mean. Core models start equal unless `spread`: the mean of random networks is nearly 0.
BatchNorm statistics are the client's own: p may be negative, a variance not. With `downloads` a client asks for the
models that it gets next, first for those it never had (the authors' code never marks a model as received, so it always
chooses at random), and keeps copies of all: N P numbers per client.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import derive, uniform


@dataclass(frozen=True)
class APPLE(Method):
    lr: float = hyper(0.5, "learning rate of the own core model, whose gradient is p_ii g", above=0)
    p_lr: float = hyper(0.0001, "learning rate of the mixture p; 0 keeps it at p0", at_least=0)
    mu: float = hyper(0.1, "weight of the penalty that holds p at p0", at_least=0)
    horizon: int = hyper(5, "rounds L after which the penalty is gone", at_least=1, at_most=1_000_000_000)
    schedule: Literal["exponential", "cosine"] = hyper("exponential", "how lam(r) falls from 1 to 0")
    downloads: int = hyper(
        0, "core models of others downloaded per round, M; 0 is all", at_least=0, at_most=1_000_000_000
    )
    spread: bool = hyper(False, "core models start from different seeds")

    evaluates = "own"
    category = "personalised models: interpolation"
    averages = False

    def cores(self, N):  # what everybody knows before round 1
        seed = self.context.seed
        return torch.stack([self.model.init(seed * N + j if self.spread else seed) for j in range(N)])

    def init_server(self, clients):
        C, place = self.cores(clients), torch.arange(clients, device=self.model.device)
        wants = (place[:, None] + place[1:][: self.downloads]) % clients  # [N, M]: at first the next ones
        return {"cores": C, "n": C.new_zeros(clients), "round": torch.zeros_like(wants.sum()), "wants": wants}

    def init_client(self):
        N = self.context.population
        C, (p, had) = self.cores(N), self.model.zeros().new_zeros(2, N)  # p = 0: not begun
        return {"p": p, "had": had, "w": C.mean(0), "copies": C if self.downloads else C[:0]}

    def broadcast(self, server, ids):
        C, n, x, wants = server["cores"], server["n"], server["round"].double() / self.horizon, server["wants"][ids]
        n = torch.where(n > 0, n, (n.sum() / (n > 0).sum()).nan_to_num(1.0))
        lam = 0.001**x if self.schedule == "exponential" else (torch.cos(math.pi * x) + 1) / 2
        shared = {"p0": n / n.sum(), "lam": lam.where(x < 1, 0.0).to(n.dtype), "round": server["round"]}
        return Down({**shared, "cores": C[:0] if self.downloads else C}, {"id": ids, "wants": wants, "cores": C[wants]})

    def mix(self, c, p, given):
        w = p @ given["C"] + (p * given["me"]).sum() * (c - given["c"])  # C has the own core model as it was
        return self.model.weights.only(w, c)

    def step(self, carry, batch, given):
        c, state, p = carry
        g, w, _ = self.model.grad(self.mix(c, p, given), batch)
        slope = given["C"] @ g + given["me"] * (g @ (c - given["c"])) + 2 * given["hold"] * (p - given["p0"])
        c, state = self.update(self.model.weights.only(c, w), state, (p * given["me"]).sum() * g)
        return c, state, p - self.p_lr * slope

    def local(self, client, down, data):
        own, p0, round = down.own, down.shared["p0"], down.shared["round"]
        N, M, place = len(p0), len(own["wants"]), torch.arange(len(p0), device=p0.device)
        me = (place == own["id"]).to(p0.dtype)  # 1 at this client's place
        C = client["copies"].index_copy(0, own["wants"], own["cores"]) if self.downloads else down.shared["cores"]
        p = torch.where(client["p"].any(), client["p"], p0)
        given = {"C": C, "me": me, "c": me @ C, "p0": p0, "hold": self.mu * down.shared["lam"]}
        c, _, p = data.fold(self.step, (given["c"], self.start(given["c"]), p), given)
        had = torch.maximum(client["had"], (place[:, None] == own["wants"]).any(1).to(p0.dtype))
        luck = uniform(derive(self.context.seed, 16, round, own["id"]), (N,), torch.float64)
        wish = p.abs() * (round * M / N).clamp_min(1.5).log() - (-luck.log()).log() + 1e3 * (1 - had)  # Gumbel
        copies = C + me[:, None] * (c - given["c"]) if self.downloads else client["copies"]
        wants = wish.masked_fill(me > 0, -torch.inf).topk(M).indices
        up = Up(own={"cores": c, "n": data.size.to(p0.dtype), "wants": wants})
        return {"p": p, "had": had, "w": self.mix(c, p, given), "copies": copies}, up

    def aggregate(self, server, cohort):
        new = {name: server[name].index_copy(0, cohort.ids, rows) for name, rows in cohort.own.items()}
        return {**server, **new, "round": server["round"] + 1}

    def personalise(self, client, down, data):
        return client["w"]
