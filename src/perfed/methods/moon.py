"""MOON: a contrastive term keeps what the network sees near the global model and away from the client's last one.

Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021, Algorithm 1. https://arxiv.org/abs/2103.16257

The representation z is what enters the head (`--head`). The paper puts a projection (two layers, 256 outputs) between
encoder and classifier; here there is none unless the network has one below its head. Both fixed models are in eval
mode. A client has no contrastive term until it has a model of its own from an earlier round; in the authors' code one
that is first chosen later is contrasted with its random initial network. One earlier model is kept.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perfed.core.errors import Problem
from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.model import average
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class MOON(FedAvg):
    mu: float = hyper(1.0, "weight of the contrastive term; 0 is FedAvg", at_least=0)
    temperature: float = hyper(0.5, "temperature T of the contrastive term", above=0)

    category = "global model: regularised local loss"

    def check(self):
        if not len(self.model.body):
            raise Problem("moon contrasts what enters the head, but this model learns nothing below its head")

    def init_client(self):
        w = self.model.init(self.context.seed)
        return {"previous": w, "seen": torch.zeros_like(w[0])}

    def contrast(self, w, batch, given):
        z_glob, z_prev = (self.model.features(given[name], batch)[1] for name in ("global", "previous"))

        def loss(w, batch, train):
            logits, z, fresh = self.model.features(w, batch, train)
            away = F.cosine_similarity(z, z_prev) - F.cosine_similarity(z, z_glob)
            each = F.softplus(away / self.temperature)  # -log(e^(glob / T) / (e^(glob / T) + e^(prev / T)))
            each = self.model.task.losses(logits, batch.y) + self.mu * given["seen"] * each
            return average(self.model.by_class(each, batch.y), batch.weight), fresh

        g, fresh, _ = self.model.grad(w, batch, loss)
        return g, fresh

    def local(self, client, down, data):
        w = self.descend(down.shared, data, self.contrast, {"global": down.shared, **client})
        return {"previous": w, "seen": torch.ones_like(client["seen"])}, Up(mean=w - down.shared)
