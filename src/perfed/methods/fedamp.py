"""FedAMP: the server mixes one cloud model per client, with more weight on models that are near the client's own.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data. AAAI 2021,
Algorithm 1. https://arxiv.org/abs/2007.03797

xi_ij = alpha_k A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma) and xi_ii = 1 - sum_j xi_ij, over parameters only.
alpha_k = share sigma / (N - 1) keeps xi_ii at or above 0. A fixed sigma is a trap: squared distances of networks grow
from round to round until exp(-x / sigma) vanishes and every client is alone; so by default sigma is the median of the
squared distances between the last cohort's models and all others, those at 0 left out. A widely used copy builds the
pull from detached tensors, without any gradient, and never starts at u_i: that is Local. The server mixes the last
known models of ALL clients and reads models client by client: secure sums do not apply.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class FedAMP(Method):
    lam: float = hyper(0.1, "pull lambda / alpha_k towards the cloud model u_i; 0 trains freely", at_least=0)
    sigma: float = hyper(0.0, "width sigma of the kernel; 0: median squared distance after each round", at_least=0)
    share: float = hyper(1.0, "most that others weigh in u_i, alpha_k (N - 1) / sigma", at_least=0, at_most=1)
    begin: Literal["cloud", "own"] = hyper("cloud", "where local training begins: at u_i or at the client's own w_i")

    evaluates = "own"
    category = "personalised models: multi-task"
    averages = False

    def check(self):
        if self.optimizer == "sgd" and self.lr * self.lam >= 2 * (1 + self.momentum):
            raise Problem(f"lr * lam is {self.lr * self.lam:g}: steps along the pull grow from 2 (1 + momentum) on")

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        return {"models": w.repeat(clients, 1), "sigma": w.new_tensor(self.sigma)}

    def init_client(self):
        return self.model.init(self.context.seed)  # w_i

    def squared(self, rows, models):
        """Return squared distances [rows, models], from differences: products of near models would cancel."""
        exact = "donot_use_mm_for_euclid_dist"
        return torch.cdist(self.model.weights.only(rows), self.model.weights.only(models), compute_mode=exact) ** 2

    def attention(self, server, ids):
        """Return every client's weight in the cloud models of `ids` [m, N]; that of a model's owner is not used."""
        near = torch.exp(-self.squared(server["models"][ids], server["models"]) / server["sigma"].clamp_min(1e-30))
        return self.share / max(len(server["models"]) - 1, 1) * near

    def broadcast(self, server, ids):
        self_at = torch.arange(len(server["models"]), device=ids.device) == ids[:, None]
        xi = self.attention(server, ids).masked_fill(self_at, 0)
        xi = torch.where(self_at, 1 - xi.sum(1, keepdim=True), xi)
        return Down(own=xi @ server["models"])  # u_i

    def pulled(self, w, batch, u):
        g, fresh = self.gradient(w, batch)
        return g + self.lam * self.pull(w, u), fresh

    def local(self, client, down, data):
        w = self.descend(down.own if self.begin == "cloud" else client, data, self.pulled, down.own)
        return w, Up(own=w)

    def aggregate(self, server, cohort):
        models = server["models"].index_copy(0, cohort.ids, cohort.own)
        apart = self.squared(cohort.own, models)
        apart = apart[apart > 0]
        return {"models": models, "sigma": server["sigma"] if self.sigma or not len(apart) else apart.median()}

    def show(self, server, ids):
        return Down()  # an evaluation takes what clients have

    def newcomer(self, server):  # as near to one as to the other
        return Down(own=server["models"].mean(0))

    def personalise(self, client, down, data):
        return client

    def notes(self, server):
        return {"sigma": float(server["sigma"])}
