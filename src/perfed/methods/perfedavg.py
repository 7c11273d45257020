"""Per-FedAvg: a common start from which one gradient step makes a good model for each client.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. NeurIPS 2020, Algorithm 1. https://arxiv.org/abs/2002.07948

The step for evaluation has size alpha and the exact gradient of the TRAINING data, in eval mode; public copies adapt on
test batches. Each local step draws two or three independent batches. The server's mean is uniform, as in the paper.
v is not normalised, so the finite difference has a fixed length instead of a fixed delta. Running statistics are those
of the pass at the adapted model; the other passes leave none.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    inner_lr: float = hyper(0.1, "step size alpha of the adaptation (lr is beta); 0 is FedAvg, uniform", at_least=0)
    variant: Literal["hf", "fo"] = hyper("hf", "Hessian by finite differences (hf) or left out (fo, first order)")
    delta: float = hyper(0.01, "length of hf's finite difference, delta ||v|| in the paper's letters", above=0)

    evaluates = "adapted"
    category = "global model: meta-learning"

    def step(self, carry, batches, given):
        w, state = carry
        g, _, _ = self.model.grad(w, batches[1])
        v, fresh, _ = self.model.grad(w - self.inner_lr * g, batches[0])
        if self.variant == "hf":
            length = torch.linalg.vector_norm(v).clamp_min(1e-12)
            there, back = (self.model.grad(w + way * v / length, batches[2])[0] for way in (self.delta, -self.delta))
            v = v - self.inner_lr * (there - back) * (length / (2 * self.delta))  # (I - alpha H) v
        return self.update(self.model.weights.only(w, fresh), state, v)

    def local(self, client, down, data):
        start = (down.shared, self.start(down.shared))
        w, _ = data.fold(self.step, start, draws=3 if self.variant == "hf" else 2)
        return client, Up(mean=w - down.shared, weight=1.0)

    def risk(self, batch, w):
        return self.model.grad(w, batch, train=False)[0]

    def personalise(self, client, down, data):
        return down.shared - self.inner_lr * data.mean(self.risk, down.shared)
