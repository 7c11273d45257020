"""FedCL: FedAvg with a pull on each parameter as strong as the parameter matters to the server's public samples.

Yao, Sun: Continual Local Training for Better Initialization of Federated Learning. ICIP 2020.
https://arxiv.org/abs/2005.12657

After the authors' code (https://github.com/thu-media/FedCL), with importance estimated in the centre: before each round
the server measures on labelled samples of its own how much every parameter matters, Omega, and the local loss has the
penalty lam sum_k Omega_k (w_k - w^t_k)^2, without 1/2. The code has one number for each tensor: all squares of its
gradient, summed over batches and divided by the samples (`--granularity tensor --raw true --lam 0.5`). The default is a
number for each parameter, as the paper is described: the mean square of single samples' gradients, a Fisher diagonal.

Our own choices: unless it is raw, Omega has the mean 1 over all parameters, so that `lam` means the same in all rounds
(Omega = 1 is FedProx with mu = 2 lam), and a tensor's is the mean over its parameters; it is at most `limit`, as local
training diverges where 2 lr lam Omega is above 2. Left out: the code's policy mas, and importance that clients estimate
on data of their own, as the code does unless it is told otherwise. A few steps on the same samples before round 1 do
more than the penalty: `zhao --share 0` is the row to compare with.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F

from perfed.core.fields import hyper
from perfed.core.messages import Up
from perfed.core.method import Method
from perfed.core.model import average

CHUNK = 32  # samples whose gradients are in memory together


@dataclass(frozen=True)
class FedCL(Method):
    lam: float = hyper(0.03, "weight of the penalty; 0 is FedAvg", at_least=0)
    granularity: Literal["parameter", "tensor"] = hyper("parameter", "what has an importance of its own")
    raw: bool = hyper(False, "importance as it is measured, not scaled to a mean of 1")
    limit: float = hyper(100.0, "largest importance", above=0)

    evaluates = "global"
    category = "global model: regularised local loss"
    public = "labelled"
    refine_before = True

    @property
    def tensor(self):
        """The number of the tensor that each parameter is in: [P]."""
        sizes = [math.prod(shape) for shape in self.model.shapes.values()]  # parameters, then statistics
        sizes = [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end <= self.model.P]
        return torch.repeat_interleave(torch.tensor(sizes)).to(self.model.device)

    def by_tensor(self, each):
        number = self.tensor
        total = each.new_zeros(int(number[-1]) + 1).index_add(0, number, each[: len(number)])
        return total if self.raw else total / number.bincount()

    def of_entries(self, omega):
        """Return the importance of each entry of theta."""
        if self.granularity == "parameter":
            return omega
        return F.pad(omega[self.tensor], (0, self.model.width - self.model.P))

    def init_server(self, clients):
        w = self.model.init(self.context.seed)
        none = torch.zeros_like(w)
        return {"w": w, "omega": none if self.granularity == "parameter" else self.by_tensor(none)}

    def squares(self, batch, w):
        return average(self.model.grads(w, batch) ** 2, batch.weight)

    def batch_squares(self, total, batch, w):
        return total + self.model.grad(w, batch, train=False)[0] ** 2

    def refine(self, server, cohort, public):
        w = server["w"]
        if self.granularity == "parameter":
            omega = public.mean(self.squares, w, chunk=CHUNK)
        else:
            omega = self.by_tensor(public.fold(self.batch_squares, torch.zeros_like(w), w, epochs=1) / public.size)
        if not self.raw:
            mean = self.model.weights.take(self.of_entries(omega)).mean()
            omega = omega / mean.clamp_min(torch.finfo(mean.dtype).tiny)
        return {"w": w, "omega": omega.clamp_max(self.limit)}

    def anchored(self, w, batch, given):
        g, fresh = self.gradient(w, batch)
        return g + 2 * self.lam * given["omega"] * self.pull(w, given["w"]), fresh

    def local(self, client, down, data):
        w_t, omega = down.shared["w"], self.of_entries(down.shared["omega"])
        w = self.descend(w_t, data, self.anchored, {"w": w_t, "omega": omega})
        return client, Up(mean=w - w_t)

    def aggregate(self, server, cohort):
        return {**server, "w": server["w"] + cohort.mean}

    def global_model(self, server):
        return server["w"]

    def personalise(self, client, down, data):
        return down.shared["w"]
