"""FedFomo: a client downloads some others' models and mixes those that do better on its own validation data.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization. ICLR 2021,
eqs. 3-5. https://arxiv.org/abs/2012.08565

weight_n = max(0, [L_i(base) - L_i(w_n)] / ||w_n - base||_2), normalised to 1: the base drops out of the mixture, so the
client's own trained model is always among the candidates (it costs no download), or its progress would be lost. base
is the model trained a round before that (paper), or the one the last training began with (the published command, whose
distances are L1). Losses are on validation data, on training data where a client has none. Preferences add the signed
weights divided by the sum of their sizes. Models that were never uploaded come last. Clients see others' models.
The first `warmup` rounds are FedAvg's, as the authors' code offers (--fedavg_rounds): from a random start, where no two
clients have alike data, it ends near Local, here as in the comparisons of the pFedMB and PGFed papers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.func import vmap

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method
from perfed.core.random import derive, uniform
from perfed.core.tree import send


@dataclass(frozen=True)
class FedFomo(Method):
    downloads: int = hyper(3, "models of others downloaded per round, M; or all", at_least=1, at_most=1_000_000_000)
    epsilon: float = hyper(0.3, "chance that a download is random, not the most preferred", at_least=0, at_most=1)
    decay: float = hyper(0.05, "what epsilon loses per round", at_least=0, at_most=1)
    base: Literal["trained", "begun"] = hyper("trained", "base: last but one trained model, or where it began")
    warmup: int = hyper(20, "rounds of FedAvg before the others; 0 starts from scratch", at_least=0, at_most=1_000_000)

    category = "personalised models: interpolation"
    warms_up = "warmup"
    averages = False

    def init_server(self, clients):
        w, none = self.model.init(self.context.seed), torch.zeros(clients, dtype=torch.bool, device=self.model.device)
        table = {"models": w.repeat(clients, 1), "seen": none, "preference": w.new_zeros(clients, clients)}
        return {**table, "w": w, "round": 0}

    def init_client(self):
        w = self.model.init(self.context.seed)
        return {"w": w, "base": w.clone()}

    def choose(self, server, ids):
        """Choose whose models the clients `ids` download [m, M]: epsilon-greedy, ties at random."""
        N, M, unseen = len(server["seen"]), min(self.downloads, len(server["seen"]) - 1), ~server["seen"]
        draw = uniform(send(derive(self.context.seed, 16, server["round"]), ids.device), (N, N + M), torch.float64)[ids]
        epsilon = self.epsilon - self.decay * (server["round"] - self.warmup)
        explore = (draw[:, N:] < epsilon).sum(1, keepdim=True)  # how many of M
        itself = torch.arange(N, device=ids.device) == ids[:, None]
        luck = (draw[:, :N] - unseen.to(draw.dtype)).masked_fill(itself, -torch.inf)
        liked = server["preference"][ids].masked_fill(unseen, -1e9).masked_fill(itself, -torch.inf)
        order = luck.argsort(dim=1, descending=True)
        best = order.gather(1, liked.gather(1, order).argsort(dim=1, descending=True, stable=True))
        score = torch.where(best.argsort(1) < M - explore, 2.0, luck)
        return score.argsort(dim=1, descending=True, stable=True)[:, :M]

    def broadcast(self, server, ids):
        if server["round"] < self.warmup:
            return Down(shared={"fedavg": server["w"]})
        return Down(own=server["models"][self.choose(server, ids)])

    def show(self, server, ids):
        return Down()

    def newcomer(self, server):  # refused at any time: what a client has comes from its own rounds
        return Method.newcomer(self, {**server, "round": server["round"] + self.warmup})

    def losses(self, batch, models):
        return vmap(lambda w: self.model.loss(w, batch)[0])(models)

    def after(self, client, begun, trained):
        return {"w": trained, "base": client["w"] if self.base == "trained" else begun}

    def local(self, client, down, data):
        if "fedavg" in down.shared:
            w = down.shared["fedavg"]
            trained = self.descend(w, data)
            return self.after(client, w, trained), Up(own=(trained, data.size))
        base = client["base"]
        models = torch.cat([torch.stack([base, client["w"]]), down.own])
        val, train = data.mean(self.losses, models, split="val"), data.mean(self.losses, models)
        L = torch.where(data.count("val") > 0, val, train)
        change = models[1:] - base
        far = self.model.weights.only(change).norm(dim=1)
        weight = torch.where(far > 0, (L[0] - L[1:]) / far.where(far > 0, 1.0), 0.0)
        good = weight.clamp_min(0)
        w = base + (good / good.sum().where(good.sum() > 0, 1.0)) @ change
        trained = self.descend(w, data)
        signed = weight[1:] / weight.abs().sum().where(weight.any(), 1.0)
        return self.after(client, w, trained), Up(own=(trained, signed))

    def aggregate(self, server, cohort):
        trained, numbers = cohort.own  # sizes in the warm-up, then signed weights
        w, preference = server["w"], server["preference"].clone()
        if server["round"] < self.warmup:
            w = (numbers.double() / numbers.sum().clamp_min(1) @ trained.double()).to(w.dtype)
        else:
            preference[cohort.ids[:, None], self.choose(server, cohort.ids)] += numbers
        models = server["models"].index_copy(0, cohort.ids, trained)
        seen = server["seen"].index_fill(0, cohort.ids, True)
        return {"models": models, "seen": seen, "preference": preference, "w": w, "round": int(server["round"]) + 1}

    def personalise(self, client, down, data):
        return client["w"]
