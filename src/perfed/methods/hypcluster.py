"""HypCluster: K models, which begin far from each other; each client trains the one that fits its data best.

Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning. 2020,
Section 3. https://arxiv.org/abs/2002.10619
After the authors' code (google/fedjax, hyp_cluster).

Rounds are IFCA's: a client chooses by its mean training loss, weights are samples, and a model that nobody chose stays
as it was. What is added is a start, in the first round. Furthest: the clients of the cohort train from a common model;
one of their models is drawn, then, again and again, that of the client whose loss under the best model so far is the
largest. Nobody's model is taken twice, which the code leaves open: equal models would never separate. For this the
server sees models and losses client by client, and keeps them. Random: K different initial models, and no such round,
which is IFCA.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.random import SELECT, choose, derive
from perfed.core.rounds import Phase
from perfed.methods.ifca import IFCA


@dataclass(frozen=True)
class HypCluster(IFCA):
    centres: Literal["furthest", "random"] = hyper("furthest", "first models: those of clients far apart, or random")

    def init_server(self, clients):
        if self.centres == "random":
            return IFCA.init_server(self, clients)
        w, m = self.model.init(self.context.seed), self.context.cohort or clients
        known = {"id": torch.full((m,), -1, device=w.device), "loss": w.new_zeros(m), "trained": w.repeat(m, 1)}
        models = {"models": w.repeat(self.clusters, 1), "samples": w.new_zeros(self.clusters, dtype=torch.float64)}
        return models | known | {"started": False}

    def phase(self, server):
        return Phase() if server.get("started", True) else Phase("start", exchanges=self.clusters)

    def broadcast(self, server, ids):
        models = server["models"]
        return Down(shared=models[max(self.context.exchange - 1, 0)] if self.context.phase else models)

    def loss(self, batch, w):
        return self.model.loss(w, batch)[0]

    def local_start(self, client, down, data):
        trains = self.context.exchange == 0
        return client, Up(own=self.descend(down.shared, data) if trains else data.mean(self.loss, down.shared))

    def aggregate(self, server, cohort):
        if not self.context.phase:
            return server | {"models": server["models"] + cohort.mean, "samples": cohort.weight}
        trained, loss, id = (server[name].clone() for name in ("trained", "loss", "id"))
        k = self.context.exchange
        if k == 0:
            n = len(cohort.ids)
            id[:n], trained[:n], loss[:n] = cohort.ids, cohort.own, torch.inf
            chosen = choose(derive(self.context.seed, SELECT), 1, n)[0]
        else:
            row, place = (id[:, None] == cohort.ids).nonzero(as_tuple=True)
            loss[row] = torch.minimum(loss[row], cohort.own[place])  # under the best of the models so far
            chosen = row[loss[row].argmax()]
        models = server["models"].clone()
        models[k], loss[chosen] = trained[chosen], -torch.inf  # nobody is chosen twice
        known = {"id": id, "loss": loss, "trained": trained}
        return server | known | {"models": models, "started": k == self.clusters - 1}
