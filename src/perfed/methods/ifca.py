"""IFCA: K models; each client trains the one that fits its data best, the server averages per model.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020, Algorithm 1,
model averaging. https://arxiv.org/abs/2006.04088

A client chooses by its mean loss on TRAINING data, in training and for evaluation (the authors' code chooses by the
labelled test data). The K models start from different seeds: equal ones would never separate. A model that nobody
chose stays as it was. Watch `cluster_samples` in the metrics: one cluster can swallow everything.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.func import vmap

from perfed.core.fields import hyper
from perfed.core.messages import Down, Up
from perfed.core.method import Method


@dataclass(frozen=True)
class IFCA(Method):
    clusters: int = hyper(2, "number of models K; 1 is FedAvg", at_least=1, at_most=1_000)

    evaluates = "assembled"
    category = "personalised models: clustering"
    starts = "clusters"

    @property
    def groups(self):
        return self.clusters

    def init_server(self, clients) -> Any:
        models = torch.stack([self.model.init(self.context.seed * self.clusters + k) for k in range(self.clusters)])
        return {"models": models, "samples": models.new_zeros(self.clusters, dtype=torch.float64)}

    def broadcast(self, server, ids):
        return Down(shared=server["models"])

    def losses(self, batch, models):
        return vmap(lambda w: self.model.loss(w, batch)[0])(models)  # [K]

    def choose(self, models, data):
        k = data.mean(self.losses, models).argmin()
        return k, models.index_select(0, k.reshape(1))[0]

    def local(self, client, down, data):
        k, w = self.choose(down.shared, data)
        return client, Up(mean=self.descend(w, data) - w, group=k)

    def aggregate(self, server, cohort):
        return {"models": server["models"] + cohort.mean, "samples": cohort.weight}

    def personalise(self, client, down, data):
        return self.choose(down.shared, data)[1]

    def notes(self, server):
        return {"cluster_samples": server["samples"].tolist()}
