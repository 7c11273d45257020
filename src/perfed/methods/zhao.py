"""Data sharing: clients also train on a part of a small public data set, after a warm-up on all of it.

After the description of Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data. 2018.
https://arxiv.org/abs/1806.00582

The server trains the initial model on the labelled public samples G for `warmup` steps. A client is sent share |G| of
them when it first takes part, and from then on they are training samples like its own: in its batches, in the number of
its steps and in its weight. The rest is FedAvg. Our own choices: a client's part is drawn with the same share of every
class, so that it is as balanced as G is; G is what the run holds out, with the classes' shares of all samples. The
warm-up alone explains most of the gain: `--share 0` is FedAvg after it, the row to compare with.
"""

from dataclasses import dataclass

import torch.nn.functional as F

from perfed.core.fields import hyper
from perfed.core.messages import Extension
from perfed.core.random import derive, uniform
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Zhao(FedAvg):
    share: float = hyper(0.5, "share a of the public samples that each client trains on", at_least=0, at_most=1)
    warmup: int = hyper(
        100, "steps on the public samples before round 1; 0: none", at_least=0, at_most=1_000_000, toy=10
    )

    category = "global model: data augmentation"
    public = "labelled"
    sends_public = True
    refine_before = True

    @property
    def public_sent(self):
        return round(self.share * self.context.public)

    def refine(self, server, cohort, public):
        return server if cohort is not None else self.descend(server, public, steps=self.warmup)

    def sample(self, batch, given):
        return batch.x, batch.y, uniform(derive(batch.key, batch.index), ())

    def extend(self, client, down, data):
        x, y, draw = data.public.map(self.sample)
        kind = y if self.model.task.kind == "classification" else (0 * draw).long()
        order = draw.argsort(stable=True)
        of = F.one_hot(kind[order], self.model.outputs)
        part = (of.cumsum(0) * of).sum(1) / of.sum(0)[kind[order]]  # the k-th of a class with c samples has k/c
        chosen = order[part.argsort(stable=True)[: self.public_sent]]
        return Extension(x[chosen], y[chosen])
